"""Blocks of pages of keys and values on TPU: how kernels copy them, and add them up by online softmax; see `pages`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hfax.kernels.tiles import LANES, in_lanes
from hfax.kernels.tpu.pages_write import bits_of_rows, rows_of_words, words_of_rows

MASKED = -1e30
"""Finite, so that the difference of two masked scores is a number, and in any unit."""
_LOG2_E = 1.4426950408889634
_BLOCK = 512
"""Tokens of a block of pages."""
_BLOCK_BYTES = 2 << 20


def pages_together(page_size: int, page_bytes: int, pages: int) -> int:
    """Pages of a block.

    Args:
        page_size: tokens of a page.
        page_bytes: what is copied of a page.
        pages: of a sequence, at most.
    """
    return max(1, min(_BLOCK // page_size, _BLOCK_BYTES // page_bytes, pages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """As in `pages_attention`."""

    scale: float
    softcap: float | None
    window: int | None

    @property
    def unit(self) -> float:
        """What the kernel's scores are multiples of: products are scaled with the conversion to powers of two."""
        return self.scale if self.softcap is None else 1.0

    def scores(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """[rows, tokens], in multiples of `unit`."""
        found = jax.lax.dot_general(query, key, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return found if self.softcap is None else self.softcap * jnp.tanh(found * (self.scale / self.softcap))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lanes:
    """Where a row of a page, a token's key and value, has what a kernel multiplies: whole registers.

    Args:
        keys: lanes that hold keys, and maybe the beginning of the values, which meet zeros.
        first: the first of the lanes whose sums are kept.
        values: number of these.
        at: the values' first number among these.
    """

    keys: int
    first: int
    values: int
    at: int

    @classmethod
    def of(cls, key_width: int, value_width: int, value_at: int | None = None) -> Lanes:
        """For these head dimensions of keys and values, of which these are at `value_at`; None: after the keys."""
        begin = key_width if value_at is None else value_at
        first = begin // LANES * LANES
        return cls(
            keys=in_lanes(key_width), first=first, values=in_lanes(begin + value_width) - first, at=begin - first
        )


class Copies:
    """The blocks of pages of sequences, which are copied to two buffers in turns.

    Args:
        pages: all pages, in HBM: [pages, kv_heads, page_size, width].
        tables: [sequences, pages].
        buffers: [2, pages of a block, heads, page_size, width].
        semaphores: [2].
        head: the first of the heads to copy.
    """

    def __init__(self, pages: Any, tables: Any, buffers: Any, semaphores: Any, head: Any) -> None:
        self._pages, self._tables, self._semaphores = pages, tables, semaphores
        self.buffers = buffers
        self._heads = pl.ds(head, buffers.shape[2])

    def _each(self, sequence: Any, block: Any, slot: Any, seen: tuple[Any, Any], do: Callable[[Any], None]) -> None:
        together, page_size = self.buffers.shape[1], self.buffers.shape[3]
        for index in range(together):
            number = block * together + index

            @pl.when((number * page_size < seen[1]) & ((number + 1) * page_size > seen[0]))
            def _(index: int = index, number: Any = number) -> None:
                source = self._pages.at[self._tables[sequence, number], self._heads]
                do(pltpu.make_async_copy(source, self.buffers.at[slot, index], self._semaphores.at[slot]))

    def start(self, sequence: Any, block: Any, slot: Any, seen: tuple[Any, Any]) -> None:
        """Start to copy the pages of a block that hold positions `seen`, from the first to before the last."""
        self._each(sequence, block, slot, seen, lambda copy: copy.start())

    def wait(self, sequence: Any, block: Any, slot: Any, seen: tuple[Any, Any]) -> None:
        """Wait for the block, and clear what it has of other positions, which may be no numbers."""
        self._each(sequence, block, slot, seen, lambda copy: copy.wait())
        together, heads, page_size, width = self.buffers.shape[1:]
        first = block * together * page_size

        @pl.when((first < seen[0]) | (first + together * page_size > seen[1]))
        def _() -> None:
            for index in range(together):
                at = first + index * page_size
                mask = bits_of_rows((heads, page_size, width), self.buffers.dtype, seen[0] - at, seen[1] - at)
                kept = words_of_rows(self.buffers[slot, index]) & mask
                self.buffers[slot, index] = rows_of_words(kept, self.buffers.dtype)

    def keys_and_values(self, slot: Any, head: Any, lanes: Lanes, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """A head's keys, [tokens of a block, lanes], and values, [tokens of a block, lanes]."""
        held = self.buffers[slot, :, head].reshape(self.tokens, -1)
        if held.dtype != dtype:
            held = held.astype(jnp.float32).astype(dtype)
        return held[:, : lanes.keys], held[:, lanes.first : lanes.first + lanes.values]

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.buffers.shape[1] * self.buffers.shape[3]

    def block_of(self, position: Any) -> Any:
        """The number of the block that holds a position. Mosaic asks the default device how to round `//`."""
        return jax.lax.div(position, jnp.int32(self.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A step of a kernel's grid that attends to pages of a sequence.

    Args:
        sequence: its number.
        seen: the first position that is seen, and the one after the last.
    """

    sequence: Any
    seen: tuple[Any, Any]


def visit_blocks(
    copies: Copies,
    turn: Any,
    item: Any,
    following: Any,
    items: Any,
    at: Callable[[Any], Item],
    attend: Callable[[Any, Any], None],
) -> None:
    """Attend to each block of pages of an item, given its number and its buffer; the next one is copied meanwhile.

    Args:
        copies: of the pages.
        turn: [1], the buffer to which the item's first block was copied; then that of the following item's.
        item: its number.
        following: the number of the next item with something to do.
        items: number of items.
        at: the item of a number.
        attend: for one block.
    """
    own = at(item)
    last = copies.block_of(own.seen[1] - 1)

    def visit(number: Any, slot: Any) -> Any:
        coming = jnp.where(number == last, following, item)

        @pl.when(coming < items)
        def _() -> None:
            then = at(coming)
            block = jnp.where(number == last, copies.block_of(then.seen[0]), number + 1)
            copies.start(then.sequence, block, 1 - slot, then.seen)

        copies.wait(own.sequence, number, slot, own.seen)
        attend(number, slot)
        return 1 - slot

    turn[0] = jax.lax.fori_loop(copies.block_of(own.seen[0]), last + 1, visit, turn[0])


def add(
    scores: jax.Array, value: jax.Array, state: Sequence[Any], unit: float, is_own: jax.Array | None = None
) -> None:
    """Add a block to the sums of rows, by online softmax.

    Args:
        scores: [rows, tokens], multiples of `unit`.
        value: [tokens, lanes].
        state: sums, [rows, lanes], totals, [rows, 128], and largest scores, [rows, 128].
        unit: as in `Options`.
        is_own: [rows, 1]: the values are those of the row's sequence. Others may be no numbers, which a share of 0 does not hide.
    """
    sums, totals, largest = state
    before = largest[...]
    after = jnp.maximum(before, scores.max(axis=1, keepdims=True))
    kept = jnp.exp2((before - after) * (unit * _LOG2_E))
    shares = jnp.exp2((scores - after[:, :1]) * (unit * _LOG2_E))
    largest[...] = after
    totals[...] = totals[...] * kept + shares.sum(axis=1, keepdims=True)
    added = jnp.dot(shares.astype(value.dtype), value, preferred_element_type=jnp.float32)
    found = sums[...] * kept[:, :1] + added
    sums[...] = found if is_own is None else jnp.where(is_own, found, sums[...])


def for_heads(count: int, do: Callable[[Any], None]) -> None:
    """For each head; few at once, that a program with many compiles soon."""
    at_once = next(number for number in (8, 4, 2, 1) if count % number == 0)

    def some(step: Any, _: None) -> None:
        for head in range(at_once):
            do(step * at_once + head)

    if count == at_once:
        some(0, None)
    else:
        jax.lax.fori_loop(0, count // at_once, some, None)
