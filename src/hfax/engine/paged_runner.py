"""Steps over a paged KV cache: all sequences' tokens packed in one row, prefill chunks and decode tokens together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from hfax.engine.page_layout import PageLayout
from hfax.engine.runner import Logits
from hfax.engine.scheduler import Limits, Part
from hfax.errors import OutOfMemoryError
from hfax.kernels.pool import pool_spec
from hfax.kernels.rows import Rows
from hfax.load.placement import free_bytes
from hfax.programs.model_parts import ModelParts
from hfax.programs.program_cache import Program
from hfax.sharding.layout import describe

_SHARE_OF_HOST = 0.3
"""Fraction of free host memory for the KV cache on the CPU platform."""
_SHARE_OF_DEVICE = 0.85
_FEWEST_ROWS = 4
_FEW_ROWS = 64
"""Up to so many, a step's products are compiled as a decoding step's."""


def row_buckets(limits: Limits) -> list[int]:
    """Step sizes in tokens to compile programs for: powers of four times the smallest, and both limits.

    Never 1: on CPU, bfloat16 sums run in a different order for a single row than for several, and a completion should not depend
    on the batch size.
    """
    sizes, size = {limits.max_num_seqs, limits.max_num_batched_tokens}, _FEWEST_ROWS
    while size < limits.max_num_batched_tokens:
        sizes.add(size)
        size *= 4
    return sorted(max(s, _FEWEST_ROWS) for s in sizes)


class PagedRunner:
    """Runs steps over a paged KV cache.

    Args:
        parts: the model's parts.
        limits: limits of a step.
        pages: what a page holds, from `read_page_layout`.
        num_pages: number of pages; None: enough for all sequences, or as many as fit in memory.
        is_batch_invariant: a sequence's logits do not depend on the sequences beside it.

    Raises:
        OutOfMemoryError: not even one sequence of `limits.max_model_len` tokens fits.
        UnsupportedModelError: with `is_batch_invariant`, the model has products that XLA computes.
    """

    def __init__(
        self,
        parts: ModelParts,
        limits: Limits,
        pages: PageLayout,
        *,
        num_pages: int | None = None,
        is_batch_invariant: bool = False,
    ) -> None:
        self._parts = parts
        self._is_batch_invariant = is_batch_invariant
        self._limits = limits
        self._layout = pages
        self.page_size = pages.page_size
        self._max_pages = pages.pages_for(limits.max_model_len)
        self.num_pages = self._choose_num_pages(num_pages)
        self._pools = self._make_pools()
        self._made: dict[int, Program] = {}
        self._sizes = row_buckets(limits)
        if is_batch_invariant:  # refused now rather than with the first request
            newest = jax.ShapeDtypeStruct((limits.max_num_seqs,), jnp.int32)
            num_rows = self._sizes[0]
            step, _ = self._rows_of([], num_rows)
            self._program(num_rows, self._args(step, newest))

    def _choose_num_pages(self, wanted: int | None) -> int:
        """Number of pages, including the unused page 0."""
        most = self._limits.max_num_seqs * self._max_pages
        if wanted is not None:
            return wanted + 1
        device, layout = self._parts.layout.device, self._parts.layout
        free = free_bytes(device)
        if free is None:
            return most + 1
        share, page = _SHARE_OF_HOST if device.platform == "cpu" else _SHARE_OF_DEVICE, self._layout.page_bytes
        devices = 1 if device.platform == "cpu" else len(layout.devices)
        fitting = int(free * share) * devices // page
        if fitting < self._max_pages:
            raise OutOfMemoryError(
                f"A sequence of {self._limits.max_model_len} tokens needs {self._max_pages * page / 1e9:.2f} GB of "
                f"KV cache; {fitting * page / 1e9:.2f} GB are available.",
                "The KV cache must hold at least one sequence of max_model_len tokens.",
                "Reduce max_model_len, or load the model in a smaller dtype.",
            )
        return min(most, fitting) + 1

    def _make_pools(self) -> dict[str, jax.Array]:
        layout, arrays = self._parts.layout, self._layout.arrays(self.num_pages)

        def place(name: str, shape: tuple[int, ...]) -> Sharding:
            if layout.mesh is None:
                return layout.replicated
            return NamedSharding(layout.mesh, pool_spec(layout.mesh, shape))

        def make() -> dict[str, jax.Array]:
            return {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in arrays.items()}

        return jax.jit(make, out_shardings={name: place(name, shape) for name, (shape, _) in arrays.items()})()

    def reset(self) -> None:
        """Implements `Runner`."""
        self._pools = self._make_pools()

    def update_weights(self, weights: Mapping[str, jax.Array]) -> None:
        """Implements `Runner`."""
        self._parts = dataclasses.replace(self._parts, weights=weights)

    def _num_logits(self, num_rows: int) -> int:
        return min(num_rows, self._limits.max_num_seqs)

    def forward(self, parts: list[Part], newest: jax.Array) -> list[Logits]:
        """Implements `Runner`."""
        total = sum(part.count for part in parts)
        num_rows = next(size for size in self._sizes if size >= total)
        step, owners = self._rows_of(parts, num_rows)
        return [Logits(array=self._run(num_rows, step, newest), owners=tuple(owners))]

    def _rows_of(self, parts: list[Part], num_rows: int) -> tuple[dict[str, Any], list[tuple[Part, int] | None]]:
        """A step's input arrays, and the owners of its logits rows."""
        num_sequences = self._num_logits(num_rows)
        used = sum(part.count for part in parts)
        tokens = np.zeros(num_rows, np.int32)
        slots = np.full(num_rows, self._limits.max_num_seqs, np.int32)
        starts = np.full(num_sequences + 1, used, np.int32)
        lengths = np.zeros(num_sequences, np.int32)
        tables = np.zeros((num_sequences, self._max_pages), np.int32)
        wanted = np.zeros(num_sequences, np.int32)
        owners: list[tuple[Part, int] | None] = []
        row = 0
        for index, part in enumerate(parts):
            sequence, end = part.sequence, part.start + part.count
            known = sequence.tokens(part.start, end)
            tokens[row : row + len(known)] = known
            if len(known) < part.count:  # the newest token is only on the device
                assert sequence.slot is not None
                slots[row + part.count - 1] = sequence.slot
            starts[index], lengths[index] = row, end
            tables[index, : len(sequence.pages)] = sequence.pages
            if part.scores:
                rows = range(part.count)
            else:
                rows = range(part.count - 1, part.count) if part.draws else range(0)
            for offset in rows:
                wanted[len(owners)] = row + offset
                owners.append((part, part.start + offset))
            row += part.count
        rows_of = Rows(starts=starts, lengths=lengths, tables=tables)  # pyright: ignore[reportArgumentType]
        return {"tokens": tokens, "slots": slots, "rows": rows_of, "wanted": wanted}, owners

    def _run(self, num_rows: int, step: dict[str, Any], newest: jax.Array) -> jax.Array:
        args = self._args(step, newest)
        logits, self._pools = self._program(num_rows, args).run(*args)
        return logits

    def _args(self, step: dict[str, Any], newest: Any) -> tuple[Any, ...]:
        return dict(self._parts.weights), self._pools, self._parts.layout.put(step), newest

    @property
    def max_step_tokens(self) -> int:
        """Implements `Runner`."""
        return self._sizes[-1]

    def use_fewest(self) -> None:
        """Implements `Runner`: the smallest size with a row for every running sequence."""
        self._sizes = [next(size for size in self._sizes if size >= self._limits.max_num_seqs)]

    def unused(self) -> list[int]:
        """Implements `Runner`: the size of few sequences comes first, then that of long prompts."""
        missing = [size for size in row_buckets(self._limits) if size not in self._sizes]
        return [*missing[:1], *missing[:0:-1]]

    def compile(self, size: int) -> Any:
        """Implements `Runner`."""
        pools = {name: describe(array, array.sharding) for name, array in self._pools.items()}
        step, _ = self._rows_of([], size)
        newest = jnp.zeros(self._limits.max_num_seqs, jnp.int32)
        args = (dict(self._parts.weights), pools, self._parts.layout.put(step), self._parts.layout.put(newest))
        logits, _ = self._program(size, args).results
        return logits

    def use(self, size: int) -> None:
        """Implements `Runner`."""
        self._sizes = sorted([*self._sizes, size])

    def _program(self, num_rows: int, args: tuple[Any, ...]) -> Program:
        traced = self._parts.traced

        def run(params: Any, pools: Any, step: Any, newest: jax.Array) -> Any:
            is_on_device = step["slots"] < newest.shape[0]
            tokens = jnp.where(is_on_device, newest[jnp.minimum(step["slots"], newest.shape[0] - 1)], step["tokens"])
            return traced.run_rows(params, pools, tokens, step["rows"], step["wanted"]), None

        if (program := self._made.get(num_rows)) is None:
            key = ("engine", self.page_size)
            program = self._made[num_rows] = self._parts.programs.get(
                f"step[{num_rows}]",
                key,
                run,
                args,
                donate=(1,),
                is_step=num_rows <= _FEW_ROWS,
                is_batch_invariant=self._is_batch_invariant,
            )
        return program

    def warm_up(self, newest: jax.Array) -> list[jax.Array]:
        """Implements `Runner`."""
        found: dict[int, jax.Array] = {}
        for num_rows in self._sizes:
            step, _ = self._rows_of([], num_rows)
            logits = self._run(num_rows, step, newest)
            found[logits.shape[0]] = logits
        return list(found.values())
