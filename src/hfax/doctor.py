"""Diagnoses whether a model runs in hfax, and with which patches, from its config without loading weights.

Turns a config into a `Diagnosis`: traces the forward pass and one decoding step with abstract weights, which shows the patches
applied, modelling code lines that cannot be traced, the cache size and the operations per token. With `check`, a small copy is
also compared with plain transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import transformers
from transformers import PretrainedConfig

from hfax.backends.jax.size_classes import size_classes_of
from hfax.errors import (
    CheckpointAccessError,
    CheckpointNotFoundError,
    HfaxError,
    InvalidInputError,
    UnsupportedModelError,
)
from hfax.kernels.cpu import library
from hfax.kernels.target import compiling_for
from hfax.load.config import read_any_config
from hfax.load.formats import method_of
from hfax.load.skeleton import Skeleton
from hfax.load.stored_weights import StoredWeights, stored_weights
from hfax.parallelism import weight_bytes
from hfax.patches import registry
from hfax.programs.program_cache import environment_parts
from hfax.programs.program_files import program_folder
from hfax.programs.program_records import read_records, shortened
from hfax.tracing.abstract import example_inputs, open_skeleton, without_weights
from hfax.tracing.observations import Observations, observing
from hfax.tracing.prefixes import UnprovenError
from hfax.tracing.traced_model import TracedModel

_PROMPT, _CAPACITIES = 64, (128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredProgram:
    """A program on disk.

    Args:
        name: such as `prefill[1, 64]`.
        num_bytes: size of its file.
        last_used_s: when it was last loaded, in seconds since 1970.
        differences: what it was made for that is different now, such as "jax (0.10.1, now 0.10.2)"; empty if it can be used.
    """

    name: str
    num_bytes: int
    last_used_s: float
    differences: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of diagnosing a model.

    Args:
        model_type: transformers model type.
        class_name: transformers class name.
        verdict: "works", "works with patches" or "fails".
        problems: what fails, why, and how to fix it, one string each.
        unsupported_operations: line of modelling code to the torch operation without a lowering.
        value_reads: line to the data-dependent control flow there. In a forward pass, values are read between programs; in
            generation, they are problems.
        wide_dtypes: line to the 64-bit dtype ("float64" or "int64") requested there; programs compute in 32 bits.
        patches: patches that were applied, name to reason.
        refusals: patches that were not applied because the model's code differs, name to reason; the original code runs.
        why_not_padded: why forward calls are compiled for each number of tokens and rows; None if sizes share programs, or if the
            model fails.
        shares_image_sizes: whether prompts with images of many sizes share programs; None if the model does not generate from
            images with grids, or if it fails.
        lowerings: kernels selected for the default device and these shapes; empty if the model does not generate.
        cpu_kernels: instruction set of hfax's C++ kernels and where their library is from, or why there are none; None if the
            default device is not a CPU, or the model does not generate.
        num_parameters: parameter count of the full model.
        weight_bytes: size of the weights on the default device, in bytes; quantized ones count in the config's dtype if only the
            config is at hand.
        quantization: how the checkpoint's weights are quantized; None: they are not, or all are dequantized while they are loaded.
        has_packed_size: whether `weight_bytes` counts quantized weights as they are packed.
        cache_bytes_per_token: KV cache size per token for one sequence, in bytes; None if the model does not generate.
        state_bytes: fixed-size state (windows, recurrent states) for one sequence, in bytes.
        operations_per_token: multiplications and additions in the matrix products of a decoding step, including attention over
            256 tokens (loop bodies count once); None if the model does not generate.
        static_arguments: forward parameters that are compile-time constants.
        dtype: weight dtype.
        checked: result of the comparison with plain transformers; None if not requested.
        versions: library versions.
    """

    model_type: str
    class_name: str
    verdict: str
    problems: tuple[str, ...]
    unsupported_operations: dict[str, str]
    value_reads: dict[str, str]
    wide_dtypes: dict[str, str]
    patches: dict[str, str]
    refusals: dict[str, str]
    why_not_padded: str | None
    shares_image_sizes: bool | None
    lowerings: tuple[str, ...]
    cpu_kernels: str | None
    num_parameters: int
    weight_bytes: int
    quantization: str | None
    has_packed_size: bool
    cache_bytes_per_token: int | None
    state_bytes: int | None
    operations_per_token: int | None
    static_arguments: tuple[str, ...]
    dtype: str
    checked: str | None
    versions: dict[str, str]


def stored_programs(
    model: str | Path | PretrainedConfig, *, task: str | None = None, trust_remote_code: bool = False
) -> list[StoredProgram]:
    """The programs on disk that were made for a model's class, the newest first.

    Args:
        model: see `diagnose`.
        task: see `diagnose`.
        trust_remote_code: see `diagnose`.

    Raises:
        HfaxError: the config was not found, or names no known class.
    """
    config = read_any_config(model, trust_remote_code)
    traced, _ = without_weights(_skeleton(model, config, task, trust_remote_code))
    now = {**traced.key_parts, **environment_parts(jax.local_devices()[0])}
    found = []
    for record in read_records(program_folder()):
        if record.parts.get("class") == shortened(now)["class"]:
            with contextlib.suppress(FileNotFoundError):
                seen = record.path.stat()
                found.append(
                    StoredProgram(
                        name=record.name,
                        num_bytes=seen.st_size,
                        last_used_s=seen.st_mtime,
                        differences=tuple(record.differences(now)),
                    )
                )
    return sorted(found, key=lambda program: -program.last_used_s)


def _skeleton(
    model: str | Path | PretrainedConfig,
    config: PretrainedConfig,
    task: str | None,
    trust_remote_code: bool,
    stored: StoredWeights | None = None,
) -> Skeleton:
    code_folder = str(model) if trust_remote_code and not isinstance(model, PretrainedConfig) else None
    dtype = None if stored is None else stored.float_dtype
    return open_skeleton(config, task=task, stored_dtype=dtype, code_folder=code_folder)


def _stored(model: str | Path | PretrainedConfig, config: PretrainedConfig) -> StoredWeights | None:
    """The weights of a quantized checkpoint, if its files are at hand."""
    if isinstance(model, PretrainedConfig):
        return None
    try:
        return stored_weights(str(model), config)
    except (InvalidInputError, CheckpointNotFoundError, CheckpointAccessError):
        return None


def diagnose(
    model: str | Path | PretrainedConfig,
    *,
    task: str | None = None,
    check: bool = False,
    trust_remote_code: bool = False,
) -> Diagnosis:
    """Diagnose a model without loading its weights.

    Args:
        model: a Hub id, a folder, a config.json, "demo", or a transformers config.
        task: pipeline task name, to select another class than the config's own.
        check: also run a small copy and compare it with plain transformers; takes a few seconds.
        trust_remote_code: run the model repository's own code.

    Returns:
        The diagnosis. A model that cannot be traced is a result, not an error.

    Raises:
        HfaxError: the config was not found, or names no known class.
    """
    config = read_any_config(model, trust_remote_code)
    stored = _stored(model, config)
    skeleton = _skeleton(model, config, task, trust_remote_code, stored)
    traced, params = without_weights(skeleton)
    look = _Look(traced, params)
    look.run()
    checked = _check(config, type(skeleton.module).__name__, task) if check else None
    if checked is not None and checked != "agrees":
        look.problems.append(checked)
    packed = {} if stored is None else stored.layouts(skeleton, jax.default_backend())
    buffers = {name for name, _ in skeleton.module.named_buffers(remove_duplicate=False)}
    reasons = {p.name: p.why for p in registry.all_patches()}
    patches = {name: reasons.get(name, "") for name in sorted(traced.patches_used)}
    return Diagnosis(
        model_type=config.model_type,
        class_name=type(skeleton.module).__name__,
        verdict="fails" if look.problems else "works with patches" if patches else "works",
        problems=tuple(look.problems),
        unsupported_operations=look.seen.missing,
        value_reads=look.seen.reads,
        wide_dtypes=look.seen.wide,
        patches=patches,
        refusals=registry.refusals(skeleton.module),
        why_not_padded=None if look.problems else _why_not_padded(traced, params),
        shares_image_sizes=None if look.problems else _shares_image_sizes(traced, params),
        lowerings=tuple(sorted(look.lowerings)),
        cpu_kernels=look.cpu_kernels,
        num_parameters=sum(t.numel() for name, t in skeleton.shapes.items() if name not in buffers),
        weight_bytes=sum(weight_bytes(skeleton, packed).values()),
        quantization=method_of(config) if stored is None else stored.method,
        has_packed_size=bool(packed),
        cache_bytes_per_token=look.cache_bytes_per_token,
        state_bytes=look.state_bytes,
        operations_per_token=look.operations_per_token,
        static_arguments=_static_arguments(skeleton.module),
        dtype=str(skeleton.dtype).removeprefix("torch."),
        checked=checked,
        versions={"transformers": transformers.__version__, "jax": jax.__version__},
    )


class _Look:
    """Traces a model and collects findings."""

    def __init__(self, traced: TracedModel, params: dict[str, Any]) -> None:
        self.traced, self.params = traced, params
        self.problems: list[str] = []
        self.seen = Observations()
        self.cache_bytes_per_token: int | None = None
        self.state_bytes: int | None = None
        self.operations_per_token: int | None = None
        self.lowerings: set[str] = set()
        self.cpu_kernels: str | None = None

    def run(self) -> None:
        """Trace the forward pass; for text generation models, prefill and a decoding step."""
        module, traits = self.traced.module, self.traced.traits
        if traits.main_input == "input_ids" and module.can_generate() and not traits.is_encoder_decoder:
            self._try(self._decoding, may_read=False)
        else:
            self._try(self._forward, may_read=True)

    def _try(self, trace: Callable[[], Any], *, may_read: bool) -> None:
        """Trace normally; on failure, trace again past unsupported code to find all problems.

        Args:
            trace: what is traced.
            may_read: values can be read between its programs.
        """
        with observing(goes_on=False) as self.seen:
            error = _error_of(trace)
        if error is None:
            return
        with observing(goes_on=True) as self.seen:
            later = _error_of(trace)
        missing, reads = self.seen.missing.items(), self.seen.reads.items()
        found = [f"{line} uses {name}, for which hfax has no lowering. {_OPERATION_FIX}" for line, name in missing]
        if not may_read:
            found += [f"{line} reads the value of a traced tensor ({how}). {_VALUE_FIX}" for line, how in reads]
        if later is not None and found:
            found.append(later)
        # what fails after a placeholder, with nothing else in the way, may be due to it
        self.problems += found or ([] if may_read and reads else [error])

    def _forward(self) -> Any:
        arrays, rest = example_inputs(self.traced, self.params)
        return jax.eval_shape(lambda p, x: self.traced.apply(p, (), {**x, **rest}), self.params, arrays)

    def _decoding(self) -> None:
        sizes, cache = [], {}
        for capacity in _CAPACITIES:
            _, cache = jax.eval_shape(
                lambda p, x, c=capacity: self.traced.prefill(p, x, {}, c),
                self.params,
                {"input_ids": _ids(_PROMPT), "attention_mask": _ids(_PROMPT)},
            )
            sizes.append(sum(a.size * a.dtype.itemsize for a in cache.values()))
        small, large = _CAPACITIES
        per_token = (sizes[1] - sizes[0]) // (large - small)
        self.cache_bytes_per_token, self.state_bytes = per_token, sizes[0] - per_token * small
        scalar, row = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)

        def step(params: Any, cache: Any, tokens: Any, length: Any, positions: Any, mask: Any) -> Any:
            return self.traced.decode_step(
                params,
                cache,
                tokens,
                length=length,
                positions=positions,
                attention_mask=mask,
                capacity=large,
                static={},
            )

        traced = jax.make_jaxpr(step)(self.params, cache, token, scalar, row, _ids(large))
        self.operations_per_token = _product_operations(traced.jaxpr)
        # trace again for this machine's device; its kernels may hide matrix products from the count
        prompt = {"input_ids": _ids(_PROMPT), "attention_mask": _ids(_PROMPT)}
        with compiling_for(jax.devices()[0], chosen=self.lowerings) as target:
            _, cache = jax.eval_shape(lambda p, x: self.traced.prefill(p, x, {}, large), self.params, prompt)
            jax.eval_shape(lambda *a: step(*a), self.params, cache, token, scalar, row, _ids(large))
        if target.platform == "cpu":
            self.cpu_kernels = str(library.kernels())


def _why_not_padded(traced: TracedModel, params: dict[str, Any]) -> str | None:
    """Why a forward call with a mask is not padded to a size class; None if it is."""
    traits, tokens = traced.traits, jax.ShapeDtypeStruct((3, _PROMPT), jnp.int32)
    if traits.main_input != "input_ids":
        return f"its main input is {traits.main_input}, not token ids"
    inputs = {"input_ids": tokens}
    inputs |= {"attention_mask": tokens} if traits.takes_attention_mask else {}
    inputs |= {"decoder_input_ids": tokens} if traits.is_encoder_decoder else {}
    why = "it takes fewer tokens than are tried"
    for call in size_classes_of(traced.module, traits).calls(inputs):
        try:
            call.prove(traced, params)
        except UnprovenError as error:
            why = str(error)
        else:
            return None
    return why


def _shares_image_sizes(traced: TracedModel, params: dict[str, Any]) -> bool | None:
    """Whether the grids of images are arguments of the programs of prompts; None if there are none."""
    if not traced.module.can_generate() or "image_grid_thw" not in inspect.signature(traced.module.forward).parameters:
        return None
    try:
        arrays, rest = example_inputs(traced, params)
    except NotImplementedError:
        return None
    given = {name: arrays[name] for name in ("input_ids", "pixel_values")}
    grid = jax.ShapeDtypeStruct(rest["image_grid_thw"].array.shape, jnp.int32)
    return traced.takes_packed_images(params, {**given, "image_grid_thw": grid})


_OPERATION_FIX = "Register an OpPatch for it (hfax.register_patch)."
_VALUE_FIX = "Register a patch for that function (hfax.register_patch), or keep that input on the host."


def _error_of(trace: Callable[[], Any]) -> str | None:
    try:
        trace()
    except HfaxError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def _product_operations(jaxpr: Any) -> int:
    """Multiplications and additions in all matrix products of a traced function."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * depth
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += _product_operations(inner)
    return total


def _ids(length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, length), jnp.int32)


def _static_arguments(module: Any) -> tuple[str, ...]:
    """Forward parameters that take no arrays, by annotation."""
    found = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        text = str(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD or "Tensor" in text or "Cache" in text:
            continue
        if "bool" in text or "int" in text or "str" in text:
            found.append(name)
    return tuple(found)


def _check(config: PretrainedConfig, class_name: str, task: str | None) -> str:
    """ "agrees", or how the small copy differs from plain transformers."""
    from hfax.matrix.architectures import MAPPINGS, Architecture, architectures
    from hfax.matrix.runner import run_cases

    mapping = next(
        (
            m
            for m in MAPPINGS
            if any(a.class_name == class_name and a.model_type == config.model_type for a in architectures(m))
        ),
        None,
    )
    if mapping is None:
        raise UnsupportedModelError(
            f"{class_name} cannot be checked.",
            "It is in none of transformers' auto mappings, so hfax does not know its inputs.",
            "Omit the check, and compare a forward pass with plain transformers yourself.",
        )
    architecture = Architecture(mapping=mapping, model_type=config.model_type, class_name=class_name)
    (result,) = run_cases([architecture], num_jobs=1)
    return "agrees" if result.outcome == "works" else f"A small copy: {result.outcome}. {result.reason}"
