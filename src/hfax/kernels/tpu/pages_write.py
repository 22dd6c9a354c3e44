"""Writes the keys and values of a step's tokens to pages on TPU, in place, by a Pallas kernel; see `pages`.

A part of a page as high as a register is the least that can be copied. Parts that are written in part are read before.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hfax.kernels.rows import Rows
from hfax.kernels.tiles import rows_of

VMEM_BYTES = 64 << 20
_TILES = 8
"""Parts written at once."""


def pages_write(pages: jax.Array, key: jax.Array, value: jax.Array, rows: Rows, *, interpret: Any = False) -> jax.Array:
    """The pages with the keys and values of a step, in place if they are donated.

    Args:
        pages: [pages, kv_heads, page_size, width].
        key: [kv_heads, tokens, head_dim], in the pages' dtype.
        value: [kv_heads, tokens, value_dim].
        rows: maps tokens to sequences.
        interpret: interpret the kernel, for tests.
    """
    tiles = _tiles(rows, key.shape[1], pages.shape[2], rows_of(pages.dtype))
    return _written(pages, key, value, tiles, interpret)


def pages_write_newest(
    pages: jax.Array, key: jax.Array, value: jax.Array, page: jax.Array, offset: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """`pages_write` for one token of each sequence.

    Args:
        pages: as there.
        key: [kv_heads, sequences, head_dim], in the pages' dtype.
        value: [kv_heads, sequences, value_dim].
        page: [sequences] int32, the page of each token, another one for each.
        offset: [sequences] int32, its place within the page.
        interpret: as there.
    """
    tile, count = rows_of(pages.dtype), len(page)

    def of_parts(array: jax.Array) -> jax.Array:
        return jnp.pad(array, (0, -count % _TILES))

    begin = offset % tile
    tiles = _Tiles(
        page=of_parts(page),
        place=of_parts(offset // tile),
        begin=of_parts(begin),
        end=of_parts(begin + 1),
        token=of_parts(jnp.arange(count, dtype=jnp.int32) - begin),
    )
    return _written(pages, key, value, tiles, interpret)


def _written(pages: jax.Array, key: jax.Array, value: jax.Array, tiles: _Tiles, interpret: Any) -> jax.Array:
    """The pages with the tokens of a step in these parts of theirs."""
    _, heads, _, width = pages.shape
    count, tile = key.shape[1], rows_of(pages.dtype)
    after = -count % tile + tile
    new = jnp.concatenate(
        [key, value, jnp.zeros((heads, count, width - key.shape[2] - value.shape[2]), key.dtype)], axis=2
    )
    kernel = pl.pallas_call(
        functools.partial(_write, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(tiles.page.shape[0] // _TILES,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((_TILES, heads, tile, width), pages.dtype),
                pltpu.VMEM((_TILES, heads, 2 * tile, width), pages.dtype),
                pltpu.SemaphoreType.DMA((_TILES,)),
                pltpu.SemaphoreType.DMA((_TILES,)),
                pltpu.SemaphoreType.DMA((_TILES,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="pages_write",
    )
    new = jnp.pad(new, ((0, 0), (0, after), (0, 0)))
    return kernel(tiles.page, tiles.place, tiles.begin, tiles.end, tiles.token, new, pages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiles:
    """The parts of pages that a step writes to, [tiles] int32 each, a multiple of `_TILES` of them.

    Args:
        page: of each part.
        place: the part's number within its page.
        begin: the first of the part's rows that is written.
        end: after the last one; `begin` or less for unused entries.
        token: the step's token for the part's first row; negative if that row is of an earlier step.
    """

    page: jax.Array
    place: jax.Array
    begin: jax.Array
    end: jax.Array
    token: jax.Array


def _tiles(rows: Rows, count: int, page_size: int, tile: int) -> _Tiles:
    sequences = rows.lengths.shape[0]
    most = min(count, count // tile + 2 * sequences)
    index = jnp.arange(-(-most // _TILES) * _TILES, dtype=jnp.int32)
    starts, ends = rows.starts[:-1], rows.starts[1:]
    first = rows.lengths - (ends - starts)
    number = jnp.where(ends > starts, (rows.lengths - 1) // tile - first // tile + 1, 0)
    after = jnp.cumsum(number)
    found = jnp.searchsorted(after, index, side="right", method="compare_all")
    is_used, of = found < sequences, jnp.minimum(found, sequences - 1)
    position = (first[of] // tile + index - (after - number)[of]) * tile
    table = jnp.clip(position // page_size, 0, rows.tables.shape[1] - 1)
    return _Tiles(
        page=jnp.where(is_used, rows.tables[of, table], 0),
        place=jnp.where(is_used, position % page_size // tile, 0),
        begin=jnp.maximum(first[of] - position, 0),
        end=jnp.where(is_used, jnp.minimum(rows.lengths[of] - position, tile), 0),
        token=(starts - first)[of] + position,
    )


def _write(
    page: Any,
    place: Any,
    begin: Any,
    end: Any,
    token: Any,
    new: Any,
    _: Any,
    pages: Any,
    held: Any,
    coming: Any,
    reads: Any,
    fetches: Any,
    writes: Any,
    *,
    tile: int,
) -> None:
    """Insert rows of `new`, [heads, tokens, width], into parts of pages; parts that are written in part are read first."""
    at = pl.program_id(0) * _TILES

    def is_used(entry: int) -> jax.Array:
        return end[at + entry] > begin[at + entry]

    def read(entry: int) -> tuple[jax.Array, Any]:
        copy = pltpu.make_async_copy(part(entry), held.at[entry], reads.at[entry])
        return is_used(entry) & (end[at + entry] - begin[at + entry] < tile), copy

    def part(entry: int) -> Any:
        return pages.at[page[at + entry], :, pl.ds(pl.multiple_of(place[at + entry] * tile, tile), tile), :]

    def fetch(entry: int) -> tuple[jax.Array, Any]:
        first = pl.multiple_of(jnp.maximum(token[at + entry], 0) & -tile, tile)
        return is_used(entry), pltpu.make_async_copy(
            new.at[:, pl.ds(first, 2 * tile), :], coming.at[entry], fetches.at[entry]
        )

    def write(entry: int) -> tuple[jax.Array, Any]:
        return is_used(entry), pltpu.make_async_copy(held.at[entry], part(entry), writes.at[entry])

    for entry in range(_TILES):
        for is_needed, copy in (read(entry), fetch(entry)):
            pl.when(is_needed)(copy.start)
    for entry in range(_TILES):
        for is_needed, copy in (read(entry), fetch(entry)):
            pl.when(is_needed)(copy.wait)

        @pl.when(is_used(entry))
        def _(entry: int = entry) -> None:
            first = token[at + entry]
            shift = jnp.where(first < 0, first, first & (tile - 1))
            mask = bits_of_rows(held.shape[1:], held.dtype, begin[at + entry], end[at + entry])
            rows = _shifted(coming[entry], shift, tile)
            held[entry] = rows_of_words((words_of_rows(rows) & mask) | (words_of_rows(held[entry]) & ~mask), held.dtype)

        is_needed, copy = write(entry)
        pl.when(is_needed)(copy.start)
    for entry in range(_TILES):
        is_needed, copy = write(entry)
        pl.when(is_needed)(copy.wait)


def _shifted(array: jax.Array, shift: jax.Array, count: int) -> jax.Array:
    """`count` rows from the `shift`th on, around the end, of [heads, 2 * count, width]. Only 32-bit rows can be rotated."""
    wide = array.astype(jnp.float32)
    turned = [pltpu.roll(wide[head], jnp.where(shift > 0, 2 * count - shift, -shift), 0) for head in range(len(wide))]
    return jnp.stack([head[:count] for head in turned]).astype(array.dtype)


def words_of_rows(array: jax.Array) -> jax.Array:
    """[heads, rows, width] as 32-bit words, each of numbers of several rows: [heads, rows / numbers of a word, width] int32."""
    heads, rows, width = array.shape
    return pltpu.bitcast(array.reshape(heads * rows, width), jnp.int32).reshape(heads, -1, width)


def rows_of_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `words_of_rows`."""
    heads, _, width = words.shape
    return pltpu.bitcast(words.reshape(-1, width), dtype).reshape(heads, -1, width)


def bits_of_rows(shape: tuple[int, ...], dtype: jnp.dtype, begin: jax.Array, end: jax.Array) -> jax.Array:
    """The bits of rows from `begin` to `end` in the `words_of_rows` of an array of that shape, [heads, rows, width]."""
    packed = 4 // dtype.itemsize
    word = jax.lax.broadcasted_iota(jnp.int32, (shape[0], shape[1] // packed, shape[2]), 1)
    found = jnp.zeros_like(word)
    for part in range(packed):
        bits = np.array(((1 << 32 // packed) - 1) << (32 // packed * part), np.uint32).astype(np.int32)
        row = word * packed + part
        found |= jnp.where((row >= begin) & (row < end), bits, 0)
    return found
