"""Reading what `hfax.export_stablehlo` wrote: StableHLO programs and weights, run by jax alone.

    import hfax.portable
    model = hfax.portable.load("folder")
    model.generate([[1, 2, 3]], max_new_tokens=20)

Neither torch nor transformers is imported, and nothing in a folder is code of Python's. A program is compiled for the machine at
hand when it is first called.
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
"""Before the names of constants of the requests that programs were made for: this, the number of the programs, a name."""


def load(folder: str | Path) -> PortableModel:
    """The model in a folder, its weights on the first device.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointCorruptError: a file is not what its name says, or is missing.
        BackendNotAvailableError: the programs are for other platforms than this one; flatbuffers is not installed.
    """
    require_serialization()
    from safetensors.flax import load_file

    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{folder} has no {MANIFEST}.",
            "It holds no programs of StableHLO.",
            "Write them with hfax export --format stablehlo.",
        )
    try:
        found: Any = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError("it was written by another version of hfax")
        forwards = [(_read(folder / f), shapes) for f, shapes in found["forward"]]
        loops = [
            _Loop(number=i, rows=r, prompt=p, capacity=c, prefill=_read(folder / a), decode=_read(folder / b))
            for i, (r, p, c, a, b) in enumerate(found["generate"])
        ]
        arrays = load_file(folder / WEIGHTS)
        model = PortableModel(forwards, loops, arrays, tuple(found["eos_token_ids"]), found["pad_token_id"])
    except Exception as error:
        raise CheckpointCorruptError(
            f"{folder} could not be read.",
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "It was not written or copied completely, or by another version; export it again.",
        ) from error
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if platform not in (made_for := found["platforms"]):
        raise BackendNotAvailableError(
            f"The programs in {folder} are for {', '.join(made_for)}; JAX runs on {platform} here.",
            "StableHLO is lowered for the platforms that it is exported for.",
            f"Export again with this platform among them, or set JAX_PLATFORMS to {' or '.join(made_for)}.",
        )
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
    """Two programs of `generate`, and the sizes that they were made for."""

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
    """Programs and their weights. Made by `load`.

    Attributes:
        params: weights by name. May be replaced by arrays of the same shapes.
        eos_token_ids: tokens that end a text.
        pad_token_id: stands after the end.
    """

    def __init__(
        self,
        forwards: list[tuple[jax.export.Exported, dict[str, Any]]],
        loops: list[_Loop],
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
        """A forward pass.

        Args:
            **inputs: arrays by name, of a shape that a program was made for.

        Returns:
            The results by name; those inside of others under a path such as "past_key_values.0".

        Raises:
            InvalidInputError: no program takes inputs of these names and shapes.
        """
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        known = []
        for run, wanted in self._forwards:
            if {name: shape for name, (shape, _) in wanted.items()} == shapes:
                return run(self.params, {name: array.astype(wanted[name][1]) for name, array in arrays.items()})
            known.append({name: shape for name, (shape, _) in wanted.items()})
        raise InvalidInputError(
            f"No program takes inputs of the shapes {shapes}.",
            f"Programs were made for {known or 'no forward pass'}.",
            "Pass inputs of such shapes, or export a program for these.",
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
        """Write tokens after prompts, with the options that the programs were exported with.

        Args:
            input_ids: [batch, length] ids; or rows of unequal length.
            attention_mask: [batch, length], 0 at padding, which is on the left.
            max_new_tokens: None: as many as fit.
            eos_token_id: as many as the model has; None: the model's own.
            seed: of the random draws.

        Returns:
            [batch, length + new] int32; the pad token before shorter prompts and after a text's end.

        Raises:
            InvalidInputError: no programs for so many prompts of this length, or of such tokens.
        """
        rows = [list(row) for row in np.asarray(input_ids)] if hasattr(input_ids, "shape") else [*map(list, input_ids)]
        if attention_mask is not None:
            rows = [[t for t, m in zip(r, ms, strict=True) if m] for r, ms in zip(rows, attention_mask, strict=True)]
        longest = max(map(len, rows), default=0)
        if not longest or not min(map(len, rows)):
            raise InvalidInputError("A prompt is empty.", "There is nothing to continue.", "Pass at least one token.")
        wanted = 1 if max_new_tokens is None else max_new_tokens
        fitting = (it for it in self._loops if it.rows >= len(rows) and it.prompt >= longest)
        loop = next((it for it in fitting if it.capacity >= it.prompt + wanted), None)
        if loop is None or wanted < 1:
            sizes = [f"{it.rows} x {it.prompt} with up to {it.capacity - it.prompt} new" for it in self._loops]
            raise InvalidInputError(
                f"No program takes {len(rows)} prompts of {longest} tokens and writes {wanted} more.",
                f"Programs were made for {', '.join(sizes) or 'no generation'}.",
                "Shorten the prompts, ask for fewer tokens, or export programs for these sizes.",
            )
        ids = np.full((loop.rows, loop.prompt), self.pad_token_id, np.int32)
        mask = np.zeros_like(ids)
        mask[:, -1] = 1
        for i, row in enumerate(rows):
            ids[i, loop.prompt - len(row) :], mask[i, loop.prompt - len(row) :] = row, 1
        ends = list(self.eos_token_ids if eos_token_id is None else np.atleast_1d(eos_token_id))
        if len(ends) != len(self.eos_token_ids) and not (ends and len(ends) < len(self.eos_token_ids)):
            raise InvalidInputError(
                f"eos_token_id names {len(ends)} tokens.",
                f"The programs compare with {len(self.eos_token_ids)}.",
                "Name as many or fewer, or export the model with another generation config.",
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
    """Raise `BackendNotAvailableError` without the library that JAX reads and writes exported programs with."""
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise BackendNotAvailableError(
            "Programs of StableHLO need flatbuffers.", str(error), "Install it: pip install 'hfax[export]'."
        ) from error


def _read(path: Path) -> jax.export.Exported:
    return jax.export.deserialize(bytearray(path.read_bytes()))
