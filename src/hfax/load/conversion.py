"""Maps checkpoint tensors to model weights.

Turns the tensor names in the checkpoint's files and a skeleton into an ordered list of steps, each reading one or more stored
tensors and yielding one or more weights. The renaming, splitting, merging and stacking rules are transformers' own
(`transformers.conversion_mapping`); this module runs them one weight at a time, so the model is never held in memory twice.
It reads no files itself.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    PermuteForRope,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.gguf.gguf_conversion_mapping import PermuteRows, Unsqueeze

from hfax.errors import CheckpointCorruptError
from hfax.load.packed import PackedTensor
from hfax.load.skeleton import Skeleton

logger = logging.getLogger(__name__)

Rules = Callable[[PretrainedConfig], list[WeightTransform]]
"""transformers' conversion rules for a model of a config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionStep:
    """One unit of loading.

    Args:
        sources: checkpoint tensors to read.
        target: the first weight this step yields.
        converter: transformers' conversion rule, source names already collected; None if the single source is used unchanged.
    """

    sources: tuple[tuple[str, str], ...]
    target: str
    converter: WeightConverter | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """All steps for one model, and the checkpoint tensors that match no weight."""

    steps: tuple[ConversionStep, ...]
    unexpected: tuple[str, ...]


def plan_conversion(skeleton: Skeleton, checkpoint_names: Iterable[str], rules: Rules | None = None) -> ConversionPlan:
    """Match checkpoint tensor names to a skeleton's weights.

    Args:
        skeleton: the model structure.
        checkpoint_names: names of the stored tensors.
        rules: the conversion rules of a format with names of its own; None: those of the model's class.
    """
    module = skeleton.module
    found = get_model_conversion_mapping(module) if rules is None else rules(module.config)
    renamings = [rule for rule in found if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in found if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = {**skeleton.shapes, **{alias: skeleton.shapes[name] for alias, name in skeleton.tied.items()}}

    plain: dict[str, str] = {}
    merged: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
    unexpected: list[str] = []
    for name in sorted(checkpoint_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], module.base_model_prefix, state)
        if target not in state:
            unexpected.append(name)
        elif pattern is None:
            plain[target] = name
        else:
            _, sources = merged.setdefault(target, (copy.deepcopy(by_pattern[pattern]), []))
            sources.append((name, pattern))
    steps = [ConversionStep(sources=((name, name),), target=target, converter=None) for target, name in plain.items()]
    steps += [
        ConversionStep(sources=tuple(sources), target=target, converter=converter)
        for target, (converter, sources) in merged.items()
    ]
    return ConversionPlan(steps=tuple(steps), unexpected=tuple(_not_ignored(skeleton, unexpected)))


def run_step(
    step: ConversionStep, read: Callable[[str], torch.Tensor], module: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read a step's sources and yield `(weight name, tensor)` in the stored dtype.

    Raises:
        CheckpointCorruptError: the stored tensors do not fit transformers' conversion rule.
    """
    if step.converter is None:
        yield step.target, read(step.sources[0][0])
        return
    converter = step.converter
    for name, pattern in step.sources:
        later: Any = lambda name=name: read(name)  # noqa: E731 (transformers calls it when it needs the tensor)
        converter.add_tensor(step.target, name, pattern, later)
    try:
        converted = converter.convert(step.target, model=module, config=module.config)
    except Exception as error:
        raise CheckpointCorruptError(
            f"{len(step.sources)} stored tensors could not be merged into {step.target!r}: "
            f"{', '.join(name for name, _ in step.sources[:4])}…",
            f"{type(error).__name__}: {error}",
            "The checkpoint is incomplete, or was written by a tool with a different layout for experts or fused weights; "
            "save it again with transformers.",
        ) from error
    for name, tensor in converted.items():
        yield name, tensor[0] if isinstance(tensor, list) else tensor


def run_packed_step(
    step: ConversionStep, read: Callable[[str], PackedTensor], module: PreTrainedModel
) -> dict[str, PackedTensor] | None:
    """The packed weights of a conversion step, by name; None if the step computes with values instead of moving whole rows.

    Args:
        step: all of its sources are packed.
        read: reads a source by its stored name.
        module: the model.

    Raises:
        CheckpointCorruptError: the stored tensors do not fit transformers' conversion rule.
    """
    if step.converter is None:
        return {step.target: read(step.sources[0][0])}
    if not moves_rows(step):
        return None
    parts = {name: read(name) for name, _ in step.sources}
    first = next(iter(parts.values()))
    if any(part.columns is not None or _kind(part) != _kind(first) for part in parts.values()):
        return None

    def converted(component: str) -> dict[str, torch.Tensor]:
        again = dataclasses.replace(step, converter=copy.deepcopy(step.converter))
        return dict(run_step(again, lambda name: getattr(parts[name], component), module))

    codes, scale = converted("codes"), converted("scale")
    offset: dict[str, Any] = dict.fromkeys(codes) if first.offset is None else converted("offset")
    found = {
        name: PackedTensor(encoding=first.encoding, codes=codes[name], scale=scale[name], offset=offset[name])
        for name in codes
    }
    fits = (p.codes.shape[:-1] == p.scale.shape[:-1] and p.layout.group == first.layout.group for p in found.values())
    return found if all(fits) else None


def moves_rows(step: ConversionStep) -> bool:
    """Whether a step stacks, joins, splits or reorders rows, and does nothing else."""
    return step.converter is None or all(isinstance(operation, _MOVES_ROWS) for operation in step.converter.operations)


_MOVES_ROWS = (Chunk, Concatenate, MergeModulelist, PermuteForRope, PermuteRows, SplitModulelist, Unsqueeze)
"""Operations that stack, join, split or reorder rows, which does the same to a row's scales."""


def _kind(part: PackedTensor) -> tuple[Any, ...]:
    """What rows must have in common to be stacked."""
    return part.encoding, part.layout.group, part.scale.dtype, part.offset is None


def check_complete(
    skeleton: Skeleton, loaded: set[str], unexpected: tuple[str, ...], *, strict: bool, without: Collection[str] = ()
) -> list[str]:
    """The weights missing from the checkpoint. It is an error unless `strict` is False, transformers marks them as computed by
    the model (sinusoidal tables), or the format never stores them (`without`).

    Raises:
        CheckpointCorruptError: weights are missing, or the checkpoint has unexpected tensors.
    """
    ignore = _pattern(skeleton.module._keys_to_ignore_on_load_missing)
    absent = sorted(name for name in skeleton.shapes if name not in loaded)
    missing = [name for name in absent if not (ignore and ignore.search(name)) and name not in without]
    kind = type(skeleton.module).__name__
    if strict and (missing or unexpected):
        parts = [
            f"{len(names)} {what}: {', '.join(names[:6])}{', …' if len(names) > 6 else ''}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise CheckpointCorruptError(
            f"The checkpoint does not fit {kind}; tensors {'; '.join(parts)}.",
            "The weights were saved from another class or configuration, or a file is incomplete.",
            "Pass the task= that the checkpoint was trained for; or strict=False to drop unexpected tensors and "
            "randomly initialise missing ones, such as a new classification head before training.",
        )
    for what, names in (("initialised at random", missing), ("dropped", unexpected)):
        if names:
            logger.warning("%s: %d tensors %s: %s", kind, len(names), what, ", ".join(names))
    return absent


def _not_ignored(skeleton: Skeleton, unexpected: list[str]) -> Iterator[str]:
    """Skip keys that transformers ignores, and stored copies of buffers that the model computes."""
    ignore = _pattern(skeleton.module._keys_to_ignore_on_load_unexpected)
    computed = {name.rpartition(".")[2] for name in skeleton.buffers}
    for name in unexpected:
        if name.rpartition(".")[2] not in computed and not (ignore and ignore.search(name)):
            yield name


def _pattern(patterns: Iterable[str] | None) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({p})" for p in patterns)) if patterns else None
