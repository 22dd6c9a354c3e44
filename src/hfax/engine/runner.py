"""The runner interface, and the token sampler that both runners share.

A runner turns the scheduler's parts into logits (`forward`); `TokenDrawer` samples tokens from them (`draw`), which stay on the
device until they are read. `PagedRunner` shares a pool of pages between sequences; `SlotRunner` is for models with state that does
not fit pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hfax.engine.sampler import KINDS, Draw, draw_tokens, init_counts, kind_of, load_counts, make_rows
from hfax.engine.scheduler import Limits, Part
from hfax.engine.sequence import Sequence
from hfax.programs.model_parts import ModelParts
from hfax.programs.program_cache import Program
from hfax.sharding.layout import describe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logits:
    """A step's logits on the device, and the owners of their rows.

    Args:
        array: [rows, vocab] float32.
        owners: for each of the first rows, the part and the index of the token that the logits follow; None for padding.
        failure: the exception, if these parts failed.
    """

    array: jax.Array
    owners: tuple[tuple[Part, int] | None, ...]
    failure: Exception | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Sampled tokens, on the device.

    Args:
        arrays: the output arrays of `draw_tokens`.
        owners: owners of the first rows.
    """

    arrays: dict[str, jax.Array]
    owners: tuple[tuple[Part, int] | None, ...]


class Runner(Protocol):
    """Runs steps on the device, with a program for each of a few sizes. Any program serves all smaller sizes, too."""

    @property
    def max_step_tokens(self) -> int | None:
        """Number of tokens that a step may have, with the sizes in use; None: no limit."""
        ...

    def forward(self, parts: list[Part], newest: jax.Array) -> list[Logits]:
        """Dispatch a step; returns its logits without waiting for them.

        Args:
            parts: the step's parts.
            newest: [slots] int32, the newest token of each slot.
        """
        ...

    def reset(self) -> None:
        """Recreate the cache after a failed step."""
        ...

    def update_weights(self, weights: Mapping[str, jax.Array]) -> None:
        """Use other weights from the next step on: arrays of the same shapes, by name."""
        ...

    def warm_up(self, newest: jax.Array) -> list[jax.Array]:
        """Compile the programs of `forward` for all sizes in use, and run them once; returns logits, one array per possible number
        of rows."""
        ...

    def use_fewest(self) -> None:
        """Use only the size that serves every request, until `use` is called for others."""
        ...

    def unused(self) -> list[int]:
        """Sizes that are not in use, those with most traffic first."""
        ...

    def compile(self, size: int) -> Any:
        """Compile the program of a size without running it; from any thread. Returns abstract logits, [rows, vocab]."""
        ...

    def use(self, size: int) -> None:
        """Use a size from the next step on; from any thread."""
        ...


class TokenDrawer:
    """Samples tokens for slots.

    Args:
        parts: the model's parts.
        limits: limits of a step.
        is_batch_invariant: sample with as many rows of logits as there are slots, so that sums over the vocabulary have one order.
    """

    def __init__(self, parts: ModelParts, limits: Limits, *, is_batch_invariant: bool = False) -> None:
        self._programs, self._layout = parts.programs, parts.layout  # not the weights, which may be replaced
        self._is_batch_invariant = is_batch_invariant
        self._slots = limits.max_num_seqs
        self._max_tokens = limits.max_model_len
        self._counts: dict[str, jax.Array] | None = None
        self._vocab_size = parts.num_logits()
        self._made: dict[tuple[int, str], Program] = {}
        self._kinds: Collection[str] = KINDS
        self.newest: jax.Array = parts.layout.put(np.zeros(self._slots, np.int32))

    def draw(self, logits: Logits, draws: list[Draw], owners: tuple[tuple[Part, int] | None, ...]) -> Drawn:
        """Sample one token for each of the first rows of `logits`."""
        kind = next(kind for kind in KINDS[KINDS.index(kind_of(draws)) :] if kind in self._kinds)
        if self._is_batch_invariant:
            logits = dataclasses.replace(logits, array=self._padded(logits.array))
        rows = make_rows(draws, logits.array.shape[0], kind, vocab_size=self._vocab_size, num_slots=self._slots)
        return Drawn(arrays=self._run(kind, logits.array, rows), owners=owners)

    def _run(self, kind: str, logits: jax.Array, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        counts = self._require_counts() if kind == "general" else None
        args = (logits, self._layout.put(rows), self.newest, counts)
        out, self.newest, counts = self._program(kind, args).run(*args)
        if kind == "general":
            self._counts = counts
        return out

    def _program(self, kind: str, args: tuple[Any, ...]) -> Program:
        num_rows = args[0].shape[0]
        if (program := self._made.get((num_rows, kind))) is None:
            program = self._made[num_rows, kind] = self._programs.get(
                f"draw[{num_rows}] {kind}",
                ("engine", kind),
                lambda logits, rows, newest, counts: (draw_tokens(kind, logits, rows, newest, counts), None),
                args,
                donate=(3,) if kind == "general" else (),
            )
        return program

    def _padded(self, logits: jax.Array) -> jax.Array:
        """The logits with a row for each slot; in a program of its own, since XLA orders the sums of what it fuses."""
        return logits if logits.shape[0] >= self._slots else self._padding(logits).run(logits)

    def _padding(self, logits: Any) -> Program:
        missing = self._slots - logits.shape[0]
        return self._programs.get(
            f"pad[{logits.shape[0]}]",
            ("engine", self._slots),
            lambda logits: (jnp.pad(logits, ((0, missing), (0, 0))), None),
            (logits,),
        )

    def remember(self, sequence: Sequence) -> None:
        """Load a sequence's token counts, for penalties, into its slot."""
        assert sequence.slot is not None
        tokens = np.full(self._max_tokens + 1, self._vocab_size, np.int32)
        known = sequence.tokens(0, sequence.num_known)[: len(tokens)]
        tokens[: len(known)] = known
        is_written = np.arange(len(tokens)) >= len(sequence.prompt)
        self._load(sequence.slot, tokens, is_written)

    def _load(self, slot: int, tokens: np.ndarray, is_written: np.ndarray) -> None:
        put = self._layout.put
        args = (self._require_counts(), put(np.int32(slot)), put(tokens), put(is_written))
        program = self._programs.get(
            "load counts", ("engine",), lambda *args: (load_counts(*args), None), args, donate=(0,)
        )
        self._counts = program.run(*args)

    def _require_counts(self) -> dict[str, jax.Array]:
        if self._counts is None:
            self._counts = self._layout.put(init_counts(self._slots, self._vocab_size))
        assert self._counts is not None
        return self._counts

    def reset(self) -> None:
        """Drop the token counts; their device arrays may be lost."""
        self._counts = None
        self.newest = self._layout.put(np.zeros(self._slots, np.int32))

    def use_fewest(self) -> None:
        """Use only the program that supports all options, until `use_all` is called."""
        self._kinds = KINDS[-1:]

    def use_all(self) -> None:
        """Use the cheapest program that supports the options of a step."""
        self._kinds = KINDS

    def compile(self, logits: Any) -> None:
        """Compile every sampling program for this number of logits rows without running it; from any thread.

        Args:
            logits: [rows, vocab], abstract.
        """
        where = self._layout.replicated

        def abstract(tree: Any) -> Any:
            return jax.tree.map(lambda array: describe(array, where), tree)

        if self._is_batch_invariant and logits.shape[0] < self._slots:
            logits = self._padding(logits).results
        counts = abstract(jax.eval_shape(lambda: init_counts(self._slots, self._vocab_size)))
        for kind in KINDS:
            rows = make_rows([], logits.shape[0], kind, vocab_size=self._vocab_size, num_slots=self._slots)
            args = logits, self._layout.put(rows), abstract(self.newest), counts if kind == "general" else None
            self._program(kind, args)

    def warm_up(self, logits: jax.Array) -> None:
        """Compile the sampling programs in use for this number of logits rows, and run them once."""
        if self._is_batch_invariant:
            logits = self._padded(logits)
        num_rows = logits.shape[0]
        for kind in self._kinds:
            rows = make_rows([], num_rows, kind, vocab_size=self._vocab_size, num_slots=self._slots)
            self._run(kind, logits, rows)
        length = self._max_tokens + 1
        self._load(0, np.full(length, self._vocab_size, np.int32), np.zeros(length, np.bool_))
