"""Attention of one token of each sequence to pages on TPU, for a batch's decoding; `pages` has that of a step of several tokens.

A step of the grid is a sequence. So queries and results stay in the order in which layers have them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hfax.kernels import precision
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
from hfax.kernels.tpu.pages_write import VMEM_BYTES


def decode_attention(
    query: jax.Array,
    pages: jax.Array,
    lengths: jax.Array,
    tables: jax.Array,
    sinks: jax.Array | None = None,
    *,
    value_width: int,
    value_at: int | None = None,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of the newest token of each sequence.

    Args:
        query: [sequences, heads, head_dim].
        pages: [pages, kv_heads, page_size, width], including the keys and values of these tokens.
        lengths: [sequences] int32, tokens of each sequence, one or more.
        tables: [sequences, pages] int32, the page of each block of `page_size` tokens.
        sinks: [heads], the score of a key without a value; None: there is none.
        value_width: the head dimension of values.
        value_at: where a row of a page has the value; None: after the key. At 0 it is a part of the key.
        scale: multiplies the scores; positive.
        softcap: scores become `softcap * tanh(scores / softcap)`; None: they do not.
        window: number of tokens each token attends to, itself included; None: all.
        interpret: interpret the kernel, for tests.

    Returns:
        [sequences, heads, value_dim] in the query's dtype.
    """
    sequences, num_heads, width = query.shape
    _, kv_heads, page_size, row = pages.shape
    groups, lanes = num_heads // kv_heads, Lanes.of(width, value_width, value_at)
    rows = -(-groups // SUBLANES) * SUBLANES
    together = pages_together(page_size, kv_heads * page_size * row * pages.dtype.itemsize, tables.shape[1])
    options = Options(scale=scale, softcap=softcap, window=window)
    padded = jnp.pad(
        query.reshape(sequences, kv_heads, groups, width).astype(jnp.float32),
        ((0, 0), (0, 0), (0, rows - groups), (0, lanes.keys - width)),
    )

    def of_sequence(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, kv_heads, rows, width), lambda item, *_: (item, 0, 0, 0))

    in_specs, operands = [of_sequence(lanes.keys), pl.BlockSpec(memory_space=pl.ANY)], [padded, pages]
    if sinks is not None:
        logits = sinks.astype(jnp.float32).reshape(kv_heads, groups, 1) / options.unit
        logits = jnp.pad(logits, ((0, 0), (0, rows - groups), (0, 0)))
        operands.append(jnp.broadcast_to(logits, (kv_heads, rows, LANES)))
        in_specs.append(pl.BlockSpec((kv_heads, rows, LANES), lambda *_: (0, 0, 0)))
    kernel = pl.pallas_call(
        functools.partial(_attend, lanes=lanes, options=options, dtype=query.dtype, has_sinks=sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(sequences,),
            in_specs=in_specs,
            out_specs=of_sequence(lanes.values),
            scratch_shapes=[
                pltpu.VMEM((2, together, kv_heads, page_size, row), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                *(pltpu.VMEM((kv_heads, rows, size), jnp.float32) for size in (lanes.values, LANES, LANES)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((sequences, kv_heads, rows, lanes.values), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="pages_decode_attention",
    )
    first = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    with precision.of_kernel(query):
        out = kernel(first, lengths, tables, *operands)
    kept = out[:, :, :groups, lanes.at : lanes.at + value_width]
    return kept.astype(query.dtype).reshape(sequences, num_heads, value_width)


def _attend(
    seen_from: Any,
    seen_to: Any,
    tables: Any,
    query: Any,
    pages: Any,
    *rest: Any,
    lanes: Lanes,
    options: Options,
    dtype: jnp.dtype,
    has_sinks: bool,
) -> None:
    """A sequence. The first pages of the next one are copied meanwhile."""
    logits, rest = (rest[0], rest[1:]) if has_sinks else (None, rest)
    out, buffers, semaphores, turn, *state = rest
    sums, totals, largest = state
    item, items = pl.program_id(0), pl.num_programs(0)
    copies = Copies(pages, tables, buffers, semaphores, 0)

    def at(item: Any) -> Item:
        return Item(sequence=item, seen=(seen_from[item], seen_to[item]))

    @pl.when(item == 0)
    def _() -> None:
        turn[0] = 0
        copies.start(0, copies.block_of(seen_from[0]), 0, at(0).seen)

    sums[...] = jnp.zeros_like(sums)
    totals[...] = jnp.full_like(totals, 1.0 if has_sinks else 0.0)
    largest[...] = jnp.full_like(largest, MASKED) if logits is None else logits[...]

    def attend(number: Any, slot: Any) -> None:
        tokens = copies.tokens
        position = number * tokens + jax.lax.broadcasted_iota(jnp.int32, (query.shape[2], tokens), 1)
        is_seen = (position >= seen_from[item]) & (position < seen_to[item])

        def attend_head(head: Any) -> None:
            key, value = copies.keys_and_values(slot, head, lanes, dtype)
            scores = jnp.where(is_seen, options.scores(query[0, head].astype(dtype), key), MASKED)
            add(scores, value, [part.at[head] for part in state], options.unit)

        for_heads(buffers.shape[2], attend_head)

    visit_blocks(copies, turn, item, item + 1, items, at, attend)
    out[0] = sums[...] / totals[...][:, :, :1]
