"""Loads `hfax.export_stablehlo` exports: StableHLO programs and weights that need only jax to run.

    import hfax.portable
    model = hfax.portable.load("folder")
    model.generate([[1, 2, 3]], max_new_tokens=20)

Neither torch nor transformers is imported, and an export contains no Python code. A program is compiled for the current machine
on first call.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from hfax.errors import BackendNotAvailableError, CheckpointCorruptError, CheckpointNotFoundError, InvalidInputError
from hfax.programs.compiler_options import DECODE_OPTIONS

MANIFEST = "stablehlo.json"
WEIGHTS = "weights.safetensors"
FORMAT = 1
REQUEST = "request."
"""Prefix of request constants' names: prefix, program number, name."""


def load(folder: str | Path) -> PortableModel:
    """Load an exported model, with its weights on the first device.

    Raises:
        CheckpointNotFoundError: no export in the folder.
        CheckpointCorruptError: a file is damaged or missing.
        BackendNotAvailableError: the programs are for other platforms, or flatbuffers is not installed.
    """
    require_serialization()
    from safetensors.flax import load_file

    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{folder} has no {MANIFEST}.",
            "It is not a StableHLO export.",
            "Create one with hfax export --format stablehlo.",
        )
    try:
        found: Any = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError("it was written by another version of hfax")
        forwards = [(_read(folder / f), shapes) for f, shapes in found["forward"]]
        loops = [
            _PortableLoop(number=i, rows=r, prompt=p, capacity=c, prefill=_read(folder / a), decode=_read(folder / b))
            for i, (r, p, c, a, b) in enumerate(found["generate"])
        ]
        arrays = load_file(folder / WEIGHTS)
        model = PortableModel(forwards, loops, arrays, tuple(found["eos_token_ids"]), found["pad_token_id"])
    except Exception as error:
        raise CheckpointCorruptError(
            f"{folder} could not be read.",
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "Export it again; it is incomplete or was written by another hfax version.",
        ) from error
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if platform not in (made_for := found["platforms"]):
        raise BackendNotAvailableError(
            f"The programs in {folder} are for {', '.join(made_for)}; JAX runs on {platform} here.",
            "StableHLO programs run only on the platforms they were exported for.",
            f"Export again with this platform included, or set JAX_PLATFORMS to {' or '.join(made_for)}.",
        )
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PortableLoop:
    """The two programs of `generate`, and their sizes."""

    number: int
    rows: int
    prompt: int
    capacity: int
    prefill: jax.export.Exported
    decode: jax.export.Exported

    @functools.cached_property
    def run_prompt(self) -> Any:
        return jax.jit(self.prefill.call)

    @functools.cached_property
    def run_loop(self) -> Any:
        options = DECODE_OPTIONS.get(jax.default_backend())
        return jax.jit(self.decode.call, donate_argnums=1, compiler_options=options)


class PortableModel:
    """Exported programs and their weights. Created by `load`.

    Attributes:
        params: weights by name. May be replaced by arrays of the same shapes.
        eos_token_ids: end-of-sequence token ids.
        pad_token_id: padding token id.
    """

    def __init__(
        self,
        forwards: list[tuple[jax.export.Exported, dict[str, Any]]],
        loops: list[_PortableLoop],
        arrays: Mapping[str, jax.Array],
        eos_token_ids: tuple[int, ...],
        pad_token_id: int,
    ) -> None:
        self.params = {name: array for name, array in arrays.items() if not name.startswith(REQUEST)}
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = pad_token_id
        self._constants = {n.removeprefix(REQUEST): a for n, a in arrays.items() if n.startswith(REQUEST)}
        self._forwards = [(jax.jit(exported.call), shapes) for exported, shapes in forwards]
        self._loops = sorted(loops, key=lambda loop: (loop.rows, loop.prompt, loop.capacity))

    def __call__(self, **inputs: Any) -> dict[str, jax.Array]:
        """Run a forward pass.

        Args:
            **inputs: arrays by name, with the shapes of an exported program.

        Returns:
            Outputs by name; nested outputs under a path such as "cache.0".

        Raises:
            InvalidInputError: no program for these input names and shapes.
        """
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        known = []
        for run, wanted in self._forwards:
            if {name: shape for name, (shape, _) in wanted.items()} == shapes:
                return run(self.params, {name: array.astype(wanted[name][1]) for name, array in arrays.items()})
            known.append({name: shape for name, (shape, _) in wanted.items()})
        raise InvalidInputError(
            f"No program takes inputs of shapes {shapes}.",
            f"Programs were exported for {known or 'no forward pass'}.",
            "Pass inputs of those shapes, or export a program for these.",
        )

    def generate(
        self,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        max_new_tokens: int | None = None,
        eos_token_id: int | list[int] | None = None,
        seed: int = 0,
    ) -> np.ndarray:
        """Generate tokens with the options that the programs were exported with.

        Args:
            input_ids: [batch, length] token ids; or rows of different lengths.
            attention_mask: [batch, length], 0 at left padding.
            max_new_tokens: maximum number of new tokens; None: as many as fit.
            eos_token_id: end-of-sequence ids, no more than the model has; None: the model's own.
            seed: sampling seed.

        Returns:
            [batch, length + new] int32, with pad tokens before shorter prompts and after the end of a sequence.

        Raises:
            InvalidInputError: no program for this batch size, prompt length or number of end-of-sequence ids.
        """
        rows = [list(row) for row in np.asarray(input_ids)] if hasattr(input_ids, "shape") else [*map(list, input_ids)]
        if attention_mask is not None:
            rows = [[t for t, m in zip(r, ms, strict=True) if m] for r, ms in zip(rows, attention_mask, strict=True)]
        longest = max(map(len, rows), default=0)
        if not longest or not min(map(len, rows)):
            raise InvalidInputError(
                "A prompt is empty.", "Generation needs at least one token.", "Pass a non-empty prompt."
            )
        wanted = 1 if max_new_tokens is None else max_new_tokens
        fitting = (it for it in self._loops if it.rows >= len(rows) and it.prompt >= longest)
        loop = next((it for it in fitting if it.capacity >= it.prompt + wanted), None)
        if loop is None or wanted < 1:
            sizes = [f"{it.rows} x {it.prompt} with up to {it.capacity - it.prompt} new" for it in self._loops]
            raise InvalidInputError(
                f"No program takes {len(rows)} prompts of {longest} tokens and generates {wanted} more.",
                f"Programs were exported for {', '.join(sizes) or 'no generation'}.",
                "Shorten the prompts, lower max_new_tokens, or export programs for these sizes.",
            )
        ids = np.full((loop.rows, loop.prompt), self.pad_token_id, np.int32)
        mask = np.zeros_like(ids)
        mask[:, -1] = 1
        for i, row in enumerate(rows):
            ids[i, loop.prompt - len(row) :], mask[i, loop.prompt - len(row) :] = row, 1
        ends = list(self.eos_token_ids if eos_token_id is None else np.atleast_1d(eos_token_id))
        if len(ends) != len(self.eos_token_ids) and not (ends and len(ends) < len(self.eos_token_ids)):
            raise InvalidInputError(
                f"eos_token_id has {len(ends)} tokens.",
                f"The programs were exported with {len(self.eos_token_ids)}.",
                "Pass between 1 and that many, or export the model with another generation config.",
            )
        request = {
            "seed": np.uint32(seed),
            "pad": np.int32(self.pad_token_id),
            "eos": np.resize(np.asarray(ends, np.int32), len(self.eos_token_ids)),
            "unused": np.arange(loop.rows) >= len(rows),
            "sampling": {
                name.partition(".")[2]: array
                for name, array in self._constants.items()
                if name.partition(".")[0] == str(loop.number)
            },
        }
        state = dict(loop.run_prompt(self.params, {"input_ids": ids, "attention_mask": mask}, request))
        state.pop("checks")
        limit = np.int32(loop.capacity - loop.prompt if max_new_tokens is None else max_new_tokens)
        state = loop.run_loop(self.params, state, request, limit)
        steps = int(state["step"])
        tokens = np.asarray(state["tokens"])[: len(rows), loop.prompt - longest : loop.prompt + steps]
        return tokens


def require_serialization() -> None:
    """Raise `BackendNotAvailableError` if flatbuffers, which JAX needs for exported programs, is missing."""
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise BackendNotAvailableError(
            "StableHLO programs require flatbuffers.", str(error), "Install it: pip install 'hfax[export]'."
        ) from error


def _read(path: Path) -> jax.export.Exported:
    return jax.export.deserialize(bytearray(path.read_bytes()))
