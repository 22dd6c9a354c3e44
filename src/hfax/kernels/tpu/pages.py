"""Attention to keys and values in pages on TPU, by a Pallas kernel, for any head dimension and number of heads.

A page holds the keys and values of `page_size` tokens, [kv_heads, page_size, width]: a token's key, its value and zeros up to a
multiple of 128. So all lanes are used where a head has 64 numbers, and a head's keys are multiplied as they lie in memory.

As in vLLM (https://arxiv.org/abs/2309.06180), the pages that are seen are read and no others, into two buffers in turns, and added
up by online softmax (https://arxiv.org/abs/1805.02867). `pages_write` has the kernel that writes the tokens of a step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hfax.kernels import precision
from hfax.kernels.rows import Rows
from hfax.kernels.tiles import LANES, SUBLANES
from hfax.kernels.tpu.page_blocks import (
    MASKED,
    Copies,
    Item,
    Lanes,
    Options,
    add,
    for_heads,
    pages_together,
    visit_blocks,
)
from hfax.kernels.tpu.pages_decode import decode_attention
from hfax.kernels.tpu.pages_write import VMEM_BYTES, pages_write, pages_write_newest
from hfax.kernels.trial import agrees, drawn, expected_by_xla

_QUERIES = 128
"""Tokens of a block of queries."""
_FEW_QUERIES = 16
_STATE_BYTES = 16 << 20
"""Of a block's queries, results and partial sums."""


@functools.cache
def works(dtype: Any, cache_dtype: Any) -> bool:
    """Whether the kernels give the right values on this process's TPU; tested once, on a few pages.

    Args:
        dtype: of the queries.
        cache_dtype: of the pages.
    """
    trial = functools.partial(_trial, dtype, cache_dtype)
    return agrees("of pages", trial, 2.0**-6, "pages are gathered one after the other")


def _trial(dtype: Any, cache_dtype: Any, interpret: Any = False) -> tuple[np.ndarray, np.ndarray]:
    """The last 3 tokens of a sequence of 570 and the last one of a sequence of 700, of which 600 are seen."""
    query, key, value = (array[0] for array in drawn(700, 700, dtype))
    key, value = key.astype(cache_dtype), value.astype(cache_dtype)
    tables = jnp.arange(22, dtype=jnp.int32).reshape(2, 11)
    pages = jnp.zeros((22, 2, 64, LANES), cache_dtype)

    def of_step(array: jax.Array, parts: list[tuple[int, int]]) -> jax.Array:
        return jnp.concatenate([array[:, begin:end] for begin, end in parts], axis=1)

    def rows(parts: list[tuple[int, int]]) -> Rows:
        counts = np.cumsum([0, *(end - begin for begin, end in parts)])
        lengths = [end for _, end in parts]
        return Rows(
            starts=jnp.asarray(counts, jnp.int32),
            lengths=jnp.array(lengths, jnp.int32),
            tables=tables,
        )

    newest, last = [(567, 570), (699, 700)], jnp.array([569, 699], jnp.int32)
    for parts in ([(0, 567), (0, 132)], [(567, 569), (132, 699)]):
        pages = pages_write(pages, of_step(key, parts), of_step(value, parts), rows(parts), interpret=interpret)
    page = jnp.take_along_axis(tables, last[:, None] // 64, axis=1)[:, 0]
    pages = pages_write_newest(pages, key[:, last], value[:, last], page, last % 64, interpret=interpret)
    options: dict[str, Any] = {"value_width": 64, "scale": 0.125, "window": 600, "interpret": interpret}
    got = pages_attention(of_step(query, newest), pages, rows(newest), **options).swapaxes(0, 1)
    of_last = decode_attention(query[:, last].swapaxes(0, 1), pages, last + 1, tables, **options)
    position, seen = jnp.array([567, 568, 569, 699])[:, None], jnp.arange(700)
    mask = (seen <= position) & (seen > position - 600)
    asked = of_step(query, newest)[None]
    expected = expected_by_xla(asked, key[None], value[None], mask[None, None])[0]
    return np.asarray(jnp.concatenate([got, of_last]), np.float32), np.concatenate([expected, expected[2:]])


def pages_attention(
    query: jax.Array,
    pages: jax.Array,
    rows: Rows,
    sinks: jax.Array | None = None,
    *,
    value_width: int,
    value_at: int | None = None,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    is_batch_invariant: bool = False,
    interpret: Any = False,
) -> jax.Array:
    """Causal attention of each token of a step to its own sequence.

    The tokens are divided into blocks of queries. For each sequence of a block, the grid has a step, which visits the blocks of
    pages that the sequence's tokens see. A sequence with one token is a product of its few heads, one with several a product of
    the whole block of queries.

    Args:
        query: [heads, tokens, head_dim].
        pages: [pages, kv_heads, page_size, width], including the keys and values of the step.
        rows: maps tokens to sequences.
        sinks: [heads], the score of a key without a value; None: there is none.
        value_width: the head dimension of values.
        value_at: where a row of a page has the value; None: after the key. At 0 it is a part of the key.
        scale: multiplies the scores; positive.
        softcap: scores become `softcap * tanh(scores / softcap)`; None: they do not.
        window: number of tokens each token attends to, itself included; None: all.
        is_batch_invariant: a sequence with one token is computed as one with several, which round differently.
        interpret: interpret the kernel, for tests.

    Returns:
        [heads, tokens, value_dim] in the query's dtype; padding rows are undefined.
    """
    shape = _Shape.of(query, pages, rows, Lanes.of(query.shape[2], value_width, value_at))
    work = _work(rows, shape, window, is_batch_invariant)
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, shape.lanes.keys - query.shape[2])))
    singles = padded[:, rows.starts[:-1]].reshape(shape.kv_heads, shape.groups, -1, shape.lanes.keys)
    singles = jnp.pad(
        singles.transpose(2, 0, 1, 3).astype(jnp.float32), ((0, 0), (0, 0), (0, shape.rows - shape.groups), (0, 0))
    )
    whole = shape.blocks * shape.queries
    several = jnp.pad(padded, ((0, 0), (0, whole - shape.tokens), (0, 0))).reshape(
        shape.kv_heads, shape.groups, whole, -1
    )

    def of_block(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (shape.heads, shape.groups, shape.queries, lanes),
            lambda heads, item, blocks, *_: (heads, 0, blocks[item], 0),
        )

    in_specs = [
        of_block(shape.lanes.keys),
        pl.BlockSpec(
            (1, shape.heads, shape.rows, shape.lanes.keys),
            lambda heads, item, _, sequences, *__: (sequences[item], heads, 0, 0),
        ),
        pl.BlockSpec(memory_space=pl.ANY),
    ]
    operands = [several, singles, pages]
    options = Options(scale=scale, softcap=softcap, window=window)
    if sinks is not None:
        logits = sinks.astype(jnp.float32).reshape(shape.kv_heads, -1, 1, 1) / options.unit
        operands.append(jnp.broadcast_to(logits, (*logits.shape[:2], 1, LANES)))
        in_specs.append(pl.BlockSpec((shape.heads, shape.groups, 1, LANES), lambda heads, *_: (heads, 0, 0, 0)))
    state = functools.partial(pltpu.VMEM, dtype=jnp.float32)
    kernel = pl.pallas_call(
        functools.partial(_attend, shape=shape, options=options, has_sinks=sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work) + 3,
            grid=(shape.kv_heads // shape.heads, work[0].shape[0]),
            in_specs=in_specs,
            out_specs=of_block(shape.lanes.values),
            scratch_shapes=[
                pltpu.VMEM((2, shape.together, shape.heads, *pages.shape[2:]), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((shape.queries, shape.block), jnp.int32),
                *(state((shape.heads, shape.rows, lanes)) for lanes in (shape.lanes.values, LANES, LANES)),
                *(
                    state((shape.heads, shape.groups, shape.queries, lanes))
                    for lanes in (shape.lanes.values, LANES, LANES)
                ),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((shape.kv_heads, shape.groups, whole, shape.lanes.values), query.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="pages_attention",
    )
    with precision.of_kernel(query):
        out = kernel(*work, rows.starts, rows.lengths, rows.tables, *operands)
    at = slice(shape.lanes.at, shape.lanes.at + value_width)
    return out[:, :, : shape.tokens, at].reshape(-1, shape.tokens, value_width)


def _work(rows: Rows, shape: _Shape, window: int | None, is_batch_invariant: bool) -> list[jax.Array]:
    """The steps of the grid, arrays of [steps] int32.

    Returns:
        The block of queries; the sequence; the first position that is seen; the one after the last, 0 if there is nothing to do;
        the next step with something to do, from this one on; whether the sequence has one token.
    """
    used, sequences = rows.starts[-1], rows.lengths.shape[0]
    row = jnp.arange(shape.blocks, dtype=jnp.int32) * shape.queries
    first, last = (
        jnp.searchsorted(rows.starts, jnp.minimum(at, used - 1), side="right", method="compare_all").astype(jnp.int32)
        - 1
        for at in (row, row + shape.queries - 1)
    )
    # nothing is done for rows of padding, but their sums are written
    number = jnp.where(row < used, last - first + 1, 1)
    after = jnp.cumsum(number)
    item = jnp.arange(shape.blocks + sequences, dtype=jnp.int32)
    block = jnp.searchsorted(after, item, side="right", method="compare_all").astype(jnp.int32)
    is_used, block = item < after[-1], jnp.minimum(block, shape.blocks - 1)
    sequence = jnp.clip(first[block] + item - (after - number)[block], 0, sequences - 1)
    begin = jnp.maximum(rows.starts[sequence], row[block])
    end = jnp.minimum(rows.starts[sequence + 1], row[block] + shape.queries)
    shift = rows.lengths[sequence] - rows.starts[sequence + 1]
    is_used &= end > begin
    seen_from = jnp.zeros_like(begin) if window is None else jnp.maximum(begin + shift - window + 1, 0)
    seen_to = jnp.where(is_used, end + shift, 0)
    following = jax.lax.cummin(jnp.where(is_used, item, item.shape[0]), reverse=True)
    following = jnp.concatenate([following, jnp.full(1, item.shape[0], jnp.int32)])
    is_single = jnp.zeros_like(block)
    if not is_batch_invariant:
        is_single = (rows.starts[sequence + 1] - rows.starts[sequence] == 1).astype(jnp.int32)
    return [block, sequence, seen_from, seen_to, following, is_single]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    """The sizes of a step's attention.

    Args:
        kv_heads: heads of keys and values.
        groups: query heads of each.
        tokens: of the step.
        page_size: tokens of a page.
        queries: tokens of a block of queries.
        rows: `groups`, in whole registers.
        heads: of keys and values, of a step of the grid.
        together: pages of a block.
        lanes: of a row of a page.
    """

    kv_heads: int
    groups: int
    tokens: int
    page_size: int
    queries: int
    rows: int
    heads: int
    together: int
    lanes: Lanes

    @classmethod
    def of(cls, query: jax.Array, pages: jax.Array, rows: Rows, lanes: Lanes) -> _Shape:
        num_heads, tokens, width = query.shape
        _, kv_heads, page_size, row = pages.shape
        groups = num_heads // kv_heads
        query_bytes = groups * 4 * (2 * LANES + 2 * lanes.values + width)
        queries = min(_QUERIES, max(_FEW_QUERIES, 1 << (tokens - 1).bit_length()))
        while queries > _FEW_QUERIES and queries * query_bytes > _STATE_BYTES:
            queries //= 2
        head_bytes = queries * query_bytes
        heads = next(
            n for n in range(kv_heads, 0, -1) if kv_heads % n == 0 and (n == 1 or n * head_bytes <= _STATE_BYTES)
        )
        page_bytes = heads * page_size * row * pages.dtype.itemsize
        return cls(
            kv_heads=kv_heads,
            groups=groups,
            tokens=tokens,
            page_size=page_size,
            queries=queries,
            rows=-(-groups // SUBLANES) * SUBLANES,
            heads=heads,
            together=pages_together(page_size, page_bytes, rows.tables.shape[1]),
            lanes=lanes,
        )

    @property
    def blocks(self) -> int:
        """Blocks of queries."""
        return -(-self.tokens // self.queries)

    @property
    def block(self) -> int:
        """Tokens of a block of pages."""
        return self.together * self.page_size


def _attend(
    block_of: Any,
    sequence_of: Any,
    seen_from: Any,
    seen_to: Any,
    following: Any,
    is_single: Any,
    starts: Any,
    lengths: Any,
    tables: Any,
    query: Any,
    single: Any,
    pages: Any,
    *rest: Any,
    shape: _Shape,
    options: Options,
    has_sinks: bool,
) -> None:
    """A sequence of a block of queries. The first pages of the next one are copied meanwhile."""
    logits, rest = (rest[0], rest[1:]) if has_sinks else (None, rest)
    out, buffers, semaphores, turn, mask, *states = rest
    few, many = states[:3], states[3:]
    item, items = pl.program_id(1), pl.num_programs(1)
    block, sequence = block_of[item], sequence_of[item]
    copies = Copies(pages, tables, buffers, semaphores, pl.program_id(0) * shape.heads)

    def at(item: Any) -> Item:
        return Item(sequence=sequence_of[item], seen=(seen_from[item], seen_to[item]))

    @pl.when((item == 0) | (block_of[jnp.maximum(item - 1, 0)] != block))
    def _() -> None:
        _clear(logits, *many)

    @pl.when((item == 0) & (following[0] < items))
    def _() -> None:
        turn[0] = 0
        first = at(following[0])
        copies.start(first.sequence, copies.block_of(first.seen[0]), 0, first.seen)

    def visit(attend: Callable[[Any, Any], None]) -> None:
        visit_blocks(copies, turn, item, following[item + 1], items, at, attend)

    @pl.when((seen_to[item] > 0) & (is_single[item] != 0))
    def _() -> None:
        _clear(logits, *few)

        def attend(number: Any, slot: Any) -> None:
            position = number * shape.block + jax.lax.broadcasted_iota(jnp.int32, (shape.rows, shape.block), 1)
            is_seen = (position >= seen_from[item]) & (position < seen_to[item])

            def attend_head(head: Any) -> None:
                key, value = copies.keys_and_values(slot, head, shape.lanes, query.dtype)
                scores = jnp.where(is_seen, options.scores(single[0, head].astype(query.dtype), key), MASKED)
                add(scores, value, [part.at[head] for part in few], options.unit)

            for_heads(shape.heads, attend_head)

        visit(attend)
        row = starts[sequence] - block * shape.queries
        for part, whole in zip(few, many, strict=True):
            for head in range(shape.heads):
                for group in range(shape.groups):
                    whole[head, group, pl.ds(row, 1), :] = part[head, group : group + 1, :]

    @pl.when((seen_to[item] > 0) & (is_single[item] == 0))
    def _() -> None:
        first = block * shape.queries
        shift = lengths[sequence] - starts[sequence + 1]  # from a row to its position
        own = first + jax.lax.broadcasted_iota(jnp.int32, (shape.queries, 1), 0)
        is_own = (own >= starts[sequence]) & (own < starts[sequence + 1])

        def attend(number: Any, slot: Any) -> None:
            row = first + jax.lax.broadcasted_iota(jnp.int32, mask.shape, 0)
            position = number * shape.block + jax.lax.broadcasted_iota(jnp.int32, mask.shape, 1)
            is_seen = (row >= starts[sequence]) & (row < starts[sequence + 1]) & (position <= row + shift)
            if options.window is not None:
                is_seen &= position > row + shift - options.window
            mask[...] = is_seen.astype(jnp.int32)

            def attend_head(head: Any) -> None:
                key, value = copies.keys_and_values(slot, head, shape.lanes, query.dtype)
                for group in range(shape.groups):
                    scores = jnp.where(mask[...] != 0, options.scores(query[head, group], key), MASKED)
                    add(scores, value, [part.at[head, group] for part in many], options.unit, is_own)

            for_heads(shape.heads, attend_head)

        visit(attend)

    @pl.when((item == items - 1) | (block_of[jnp.minimum(item + 1, items - 1)] != block))
    def _() -> None:
        sums, totals, _ = many
        for head in range(shape.heads):
            for group in range(shape.groups):
                total = totals[head, group][:, :1]
                out[head, group] = (sums[head, group] / jnp.where(total == 0.0, 1.0, total)).astype(out.dtype)


def _clear(logits: Any, sums: Any, totals: Any, largest: Any) -> None:
    """Sums of nothing, or of a sink: [heads, rows of several groups, lanes] or [heads, groups, rows, lanes]."""
    sums[...] = jnp.zeros_like(sums)
    totals[...] = jnp.full_like(totals, 0.0 if logits is None else 1.0)
    if logits is None:
        largest[...] = jnp.full_like(largest, MASKED)
    elif len(largest.shape) == 4:
        largest[...] = jnp.broadcast_to(logits[...], largest.shape)
    else:
        for group in range(logits.shape[1]):
            largest[:, group : group + 1, :] = logits[:, group]
