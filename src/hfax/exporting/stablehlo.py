"""`hfax.export_stablehlo`: a model as StableHLO programs and weights, for processes with jax and neither torch nor transformers.

The programs are traced for no platform in particular, in plain JAX; `hfax.portable` reads them.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.exporting.folders import replacing
from hfax.load.save import save_safetensors
from hfax.phases import phase
from hfax.portable import FORMAT, MANIFEST, REQUEST, WEIGHTS, require_serialization
from hfax.programs.program_cache import Program, ProgramCache, inputs_without
from hfax.sharding.layout import Layout, describe
from hfax.tracing.structure import Leaf, Node, Structure, flatten, is_array

PLATFORMS = ("cpu", "cuda", "tpu")


def export_stablehlo(
    model: JaxModel,
    folder: str | Path,
    *,
    batch_sizes: Sequence[int] = (1,),
    prompt_lengths: Sequence[int] = (64,),
    max_new_tokens: int = 64,
    calls: Sequence[Mapping[str, Any]] = (),
    platforms: Sequence[str] = PLATFORMS,
    **options: Any,
) -> Path:
    """Write StableHLO programs and weights, which `hfax.portable.load` reads.

    Args:
        model: on one device, not quantized.
        folder: must not be there, or be an earlier export, which stays until the new one is complete.
        batch_sizes: of the calls of `generate` that programs are made for, of decoders that read token ids.
        prompt_lengths: likewise.
        max_new_tokens: likewise.
        calls: inputs of forward passes that programs are made for; the arrays' values do not matter.
        platforms: where the programs can run, in JAX's names.
        **options: generation options, whose values become part of the export.

    Returns:
        The folder.

    Raises:
        InvalidInputError: the folder holds something else; no programs are asked for.
        UnsupportedOptionError: the model is quantized or on several devices.
        BackendNotAvailableError: flatbuffers is not installed.
        HfaxError: the folder cannot be written.
    """
    require_serialization()
    if model.mesh is not None or model.quantization is not None:
        raise UnsupportedOptionError(
            "StableHLO is exported of unquantized models on one device.",
            "Programs for several devices, and those that multiply with packed weights, are bound to hfax's own code.",
            "Load the model without parallelism and quantization, or write a bundle (hfax.export).",
        )
    traits = model._traced.traits
    writes = model.can_generate() and not traits.is_encoder_decoder and traits.main_input == "input_ids"
    if not calls and not (writes and batch_sizes and prompt_lengths):
        raise InvalidInputError(
            f"No programs of {type(model).__name__} were asked for.",
            "It does not write text after token ids alone, and there are no calls.",
            'Pass calls=[{"input_ids": …, "attention_mask": …}], with arrays of the shapes to come.',
        )
    with replacing(folder := Path(folder), MANIFEST) as writing:
        constants: dict[str, Any] = {}
        loops, forwards = [], []
        for rows, length in itertools.product(batch_sizes, prompt_lengths) if writes else ():
            programs = _Exported(model._layout.described(), platforms)
            described = _described(model, programs)
            [size] = described.compile([rows], [length], progress=False, max_new_tokens=max_new_tokens, **options)
            values = described.sampling_values(length, max_new_tokens=max_new_tokens, **options)
            constants |= {f"{REQUEST}{len(loops)}.{name}": value for name, value in values.items()}
            files = [f"{name}-{'x'.join(map(str, size.padded))}.stablehlo" for name in ("prefill", "decode")]
            for file, exported in zip(files, programs.exported, strict=True):
                (writing / file).write_bytes(exported.serialize())
            loops.append([*size.padded, *files])
        for inputs in calls:
            exported, arrays = _export_forward(model, inputs, platforms)
            file = f"forward-{len(forwards)}.stablehlo"
            (writing / file).write_bytes(exported.serialize())
            forwards.append([file, {n: [list(a.shape), str(a.dtype)] for n, a in arrays.items()}])
        save_safetensors(writing, {**model._arrays(), **constants}, max_shard_size="9999TB")
        (writing / "model.safetensors").replace(writing / WEIGHTS)
        config: Any = model.generation_config
        eos = config.eos_token_id
        ends = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
        manifest = {
            "format": FORMAT,
            "jax": jax.__version__,
            "platforms": list(platforms),
            "model": type(model).__name__,
            "eos_token_ids": ends,
            "pad_token_id": config.pad_token_id if config.pad_token_id is not None else (ends or [0])[0],
            "generate": loops,
            "forward": forwards,
        }
        (writing / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return folder


class _Exported(ProgramCache):
    """Programs that are exported in the order in which they are asked for, and not run."""

    def __init__(self, layout: Layout, platforms: Sequence[str]) -> None:
        super().__init__("", layout)
        self._platforms = platforms
        self.exported: list[jax.export.Exported] = []

    def get(
        self,
        name: str,
        static_key: Any,
        function: Callable[..., tuple[Any, Any]],
        args: tuple[Any, ...],
        *,
        donate: tuple[int, ...] = (),
        is_loop: bool = False,
        inputs_at: int | None = None,
    ) -> Program:
        with phase("trace", name):
            exported = jax.export.export(jax.jit(lambda *args: function(*args)[0]), platforms=self._platforms)(*args)
        self.exported.append(exported)
        where = self._layout.replicated
        results = exported.out_tree.unflatten([describe(aval, where) for aval in exported.out_avals])
        unread = () if inputs_at is None else inputs_without(exported.module_kept_var_idx, args, inputs_at)
        return Program(name=name, run=lambda *args: results, note=None, unread=unread)


def _described(model: JaxModel, programs: ProgramCache) -> JaxModel:
    """The model with what stands for its arrays, and these programs."""
    layout = model._layout.described()
    other = copy.copy(model)
    other._layout, other._programs = layout, programs
    other.params, other.buffers = layout.put(model.params), layout.put(model.buffers)
    return other


def _export_forward(
    model: JaxModel, inputs: Mapping[str, Any], platforms: Sequence[str]
) -> tuple[jax.export.Exported, dict[str, np.ndarray]]:
    """A forward pass from weights and inputs by name to results by name."""
    found = {name: model._as_input(name, value) for name, value in inputs.items()}
    arrays = {name: np.asarray(value) for name, value in found.items() if is_array(value)}
    static = {name: value for name, value in found.items() if name not in arrays}

    def forward(params: dict[str, jax.Array], arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        results, structure = flatten(model._traced.apply(params, (), {**arrays, **static}), is_array)
        return {path: results[index] for path, index in _paths(structure)}

    with phase("trace", "forward"):
        return jax.export.export(jax.jit(forward), platforms=platforms)(model._arrays(), arrays), arrays


def _paths(structure: Structure, path: str = "") -> list[tuple[str, int]]:
    """Where each array of a result is, as attributes and numbers with dots between them."""
    if isinstance(structure, Leaf):
        return [(path or "result", structure.index)]
    if not isinstance(structure, Node):
        return []
    keys = structure.keys or range(len(structure.children))
    pairs = zip(keys, structure.children, strict=True)
    return [found for key, child in pairs for found in _paths(child, f"{path}.{key}".lstrip("."))]
