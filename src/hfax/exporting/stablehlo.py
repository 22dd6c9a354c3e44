"""`hfax.export_stablehlo`: exports a model as StableHLO programs and weights, to run with jax but without torch or transformers.

Programs are platform-independent, traced in plain JAX; `hfax.portable` loads them.
"""

from __future__ import annotations

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
from hfax.generation.sampling_config import make_sampling_spec
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
    """Write StableHLO programs and weights; load them with `hfax.portable.load`.

    Args:
        model: an unquantized model on one device.
        folder: must not exist, or be an earlier export, which is kept until the new one is complete.
        batch_sizes: batch sizes of `generate` to export, for decoders of token ids.
        prompt_lengths: prompt lengths to export, in tokens.
        max_new_tokens: maximum number of new tokens to export.
        calls: inputs of forward passes to export; array values do not matter.
        platforms: target platforms, by JAX name.
        **options: generation options; their values become part of the export.

    Returns:
        The folder.

    Raises:
        InvalidInputError: the folder has other contents, or there is nothing to export.
        UnsupportedOptionError: the model is quantized or on several devices.
        BackendNotAvailableError: flatbuffers is not installed.
        HfaxError: the folder cannot be written.
    """
    require_serialization()
    if model.mesh is not None or model.quantization is not None:
        raise UnsupportedOptionError(
            "StableHLO export requires an unquantized model on one device.",
            "Multi-device programs and programs with packed weights depend on hfax's own code.",
            "Load the model without parallelism and quantization, or write a bundle (hfax.export).",
        )
    traits = model.parts.traced.traits
    writes = model.can_generate() and not traits.is_encoder_decoder and traits.main_input == "input_ids"
    if not calls and not (writes and batch_sizes and prompt_lengths):
        raise InvalidInputError(
            f"There is nothing to export for {type(model).__name__}.",
            "No calls were passed, and it does not generate from token ids alone or no sizes were given.",
            'Pass calls=[{"input_ids": …, "attention_mask": …}], with arrays of the expected shapes.',
        )
    if writes and options.get("num_beams", model.generation_config.num_beams) not in (None, 1):
        raise UnsupportedOptionError(
            "StableHLO export does not support beam search (num_beams).",
            "The loop of an export, which runs without hfax, continues each sequence on its own.",
            "Pass num_beams=1.",
        )
    with replacing(folder := Path(folder), MANIFEST) as writing:
        constants: dict[str, Any] = {}
        loops, forwards = [], []
        for rows, length in itertools.product(batch_sizes, prompt_lengths) if writes else ():
            programs = _Exported(model.parts.layout.described(), platforms)
            described = model.described(programs)
            [size] = described.compile([rows], [length], progress=False, max_new_tokens=max_new_tokens, **options)
            values = _sampling_values(described, length, max_new_tokens=max_new_tokens, **options)
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
        save_safetensors(writing, {**model.parts.weights, **constants}, max_shard_size="9999TB")
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
    """Exports programs in request order, without running them."""

    def __init__(self, layout: Layout, platforms: Sequence[str]) -> None:
        super().__init__({}, layout)
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
        is_step: bool = False,
        is_batch_invariant: bool = False,
        inputs_at: int | None = None,
    ) -> Program:
        with phase("trace", name):
            exported = jax.export.export(jax.jit(lambda *args: function(*args)[0]), platforms=self._platforms)(*args)
        self.exported.append(exported)
        where = self._layout.replicated
        results = exported.out_tree.unflatten([describe(aval, where) for aval in exported.out_avals])
        unread = () if inputs_at is None else inputs_without(exported.module_kept_var_idx, args, inputs_at)
        return Program(name=name, execute=lambda *args: results, note=None, results=results, unread=unread)


def _sampling_values(model: JaxModel, prompt_length: int, **options: Any) -> dict[str, Any]:
    """The arrays that programs of `generate` take for these options, by name."""
    request = model.read_request(model.example_prompt(1, prompt_length), **options)
    _, values = make_sampling_spec(
        request.options.config,
        vocab_size=model.num_logits(),
        prompt_length=request.prompts.padded_length,
        max_new_tokens=request.options.max_new_tokens,
        **request.options.extra_sampling,
    )
    return dict(values)


def _export_forward(
    model: JaxModel, inputs: Mapping[str, Any], platforms: Sequence[str]
) -> tuple[jax.export.Exported, dict[str, np.ndarray]]:
    """Export a forward pass from weights and inputs by name to outputs by name."""
    found = {name: model.as_input(name, value) for name, value in inputs.items()}
    arrays = {name: np.asarray(value) for name, value in found.items() if is_array(value)}
    static = {name: value for name, value in found.items() if name not in arrays}

    def forward(params: dict[str, jax.Array], arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        results, structure = flatten(model.parts.traced.apply(params, (), {**arrays, **static}), is_array)
        return {path: results[index] for path, index in _paths(structure)}

    with phase("trace", "forward"):
        return jax.export.export(jax.jit(forward), platforms=platforms)(dict(model.parts.weights), arrays), arrays


def _paths(structure: Structure, path: str = "") -> list[tuple[str, int]]:
    """Dotted path of each array in a result."""
    if isinstance(structure, Leaf):
        return [(path or "result", structure.index)]
    if not isinstance(structure, Node):
        return []
    keys = structure.keys or range(len(structure.children))
    pairs = zip(keys, structure.children, strict=True)
    return [found for key, child in pairs for found in _paths(child, f"{path}.{key}".lstrip("."))]
