"""Attention of tokens to a range of keys each, on NVIDIA GPUs, by a Triton kernel that reads only the keys in the ranges.

The ranges are what decoding steps see of a KV cache, which is contiguous or in pages that are found through each sequence's page
table, as in vLLM (https://arxiv.org/abs/2309.06180); and the segments of packed images. The keys of a sequence are divided among
several programs if there are too few sequences and heads to occupy a GPU, and their results are combined afterwards, as in
Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The heads that share keys, and several tokens of a
sequence, are the rows of one matrix product.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from hfax.kernels.cache_numbers import FP8
from hfax.kernels.gpu.codes import numbers
from hfax.kernels.gpu.flash import LOG2_E, MASKED, power, tanh
from hfax.kernels.rows import Rows
from hfax.kernels.trial import agrees, drawn, expected_by_xla

_MAX_WIDTH = 256
_MAX_GROUP = 128
"""Heads that share a key."""
_MAX_NUMBERS = 1 << 31
"""Of a cache: the kernel's indices have 32 bits."""
_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a matrix product: the fewest of a GPU's tensor cores; of the parts of prompts."""
_PROGRAMS = 256
"""About two for each multiprocessor of a large GPU."""
_MIN_KEYS = 256
"""Of a program: fewer are read faster by one than combined from two."""


def fits(query: jax.Array, key: jax.Array, value: jax.Array) -> bool:
    """Whether the kernel supports a cache.

    Args:
        query: [..., heads, tokens, head_dim], in bfloat16, float16 or float32.
        key: of the cache, or its pages: [..., kv_heads, keys, head_dim], in the query's dtype or float8_e4m3fn.
        value: likewise.
    """
    heads, kv_heads = query.shape[-3], key.shape[-3]
    return (
        query.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        and key.dtype == value.dtype
        and key.dtype in (query.dtype, FP8)
        and heads % kv_heads == 0
        and power(heads // kv_heads) <= _MAX_GROUP
        and max(key.shape[-1], value.shape[-1]) <= _MAX_WIDTH
        and max(key.size, value.size) < _MAX_NUMBERS
    )


@functools.cache
def works(dtype: Any, cache_dtype: Any) -> bool:
    """Whether the kernel gives the right values on this process's GPU; tested once, on a small cache.

    Args:
        dtype: of the queries.
        cache_dtype: of the keys and values.
    """
    trial = functools.partial(_trial, dtype, cache_dtype)
    return agrees("of decoding steps", trial, 2.0**-6, "whole caches are read for each token")


def _trial(dtype: Any, cache_dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    query, key, value = drawn(1, 600, dtype)
    key, value = key.astype(cache_dtype), value.astype(cache_dtype)
    seen = ((jnp.arange(600) >= jnp.array([[3], [130]])) & (jnp.arange(600) < 400))[:, None, None]
    got = cache_attention(query, key, value, seen, scale=0.125)
    expected = expected_by_xla(query, key, value, seen)
    pages = [
        jnp.pad(a, ((0, 0), (0, 0), (0, 8), (0, 0))).reshape(2, 2, 19, 32, 64).swapaxes(1, 2) for a in (key, value)
    ]
    rows = Rows(
        starts=jnp.array([0, 1, 2]),
        lengths=jnp.array([600, 600]),
        tables=jnp.arange(38).reshape(2, 19),
    )
    pages = [array.reshape(38, 2, 32, 64) for array in pages]
    of_pages = pages_attention(query[:, :, 0].swapaxes(0, 1), *pages, rows, scale=0.125, window=200)
    near = jnp.broadcast_to(jnp.arange(600) >= 400, (2, 1, 1, 600))
    expected = np.stack([expected[:, 0], expected_by_xla(query, key, value, near)[:, 0]])
    return np.stack([np.asarray(got[:, 0], np.float32), np.asarray(of_pages, np.float32)]), expected


@functools.partial(
    jax.jit, static_argnames=("scale", "softcap", "is_contiguous", "interpret")
)  # the kernel is traced once per shape
def cache_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    is_contiguous: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Attention of a few tokens of each sequence to a cache of arrays that `fits` supports.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, capacity, head_dim].
        value: [batch, kv_heads, capacity, value_dim].
        mask: [batch | 1, 1, tokens, capacity] bool, True: attend. Keys before a tile's first and after its last are not read.
        sinks: [heads], the score of a key without a value; None: there is none.
        scale: multiplies the scores.
        softcap: scores become `softcap * tanh(scores / softcap)`; None: they do not.
        is_contiguous: the keys that a token sees follow each other; the kernel then does not read the mask.
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [batch, tokens, heads, value_dim] in the query's dtype; 0 for tokens that see nothing.
    """
    batch, _, tokens, _ = query.shape
    seen = jnp.broadcast_to(mask[:, 0], (batch, tokens, key.shape[2])).reshape(batch * tokens, -1)
    begins = jnp.argmax(seen, axis=1)
    ends = jnp.where(seen.any(axis=1), key.shape[2] - jnp.argmax(seen[:, ::-1], axis=1), 0)
    options = {"scale": scale, "softcap": softcap, "interpret": interpret}
    seen = None if is_contiguous else seen
    return _attend_by_row(query, key, value, sinks, (begins, ends), seen, rows=_FEW_ROWS, **options)


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "is_local", "interpret"))
def segment_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ranges: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    is_local: bool,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of packed tokens, each to those of its own segment.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, tokens, head_dim], which `fits` supports.
        value: [batch, kv_heads, tokens, value_dim].
        ranges: of each token the first key that it sees, and the one after the last: [batch | 1, 2, tokens] int32.
        sinks: as for `cache_attention`.
        scale: likewise.
        is_local: the segments are short, as the windows of an image are; it names the kernel.
        softcap: likewise.
        interpret: likewise.

    Returns:
        [batch, tokens, heads, value_dim] in the query's dtype.
    """
    begins, ends = jnp.broadcast_to(ranges, (query.shape[0], *ranges.shape[1:])).swapaxes(0, 1).reshape(2, -1)
    name = "window_attention" if is_local else "segment_attention"
    options = {"scale": scale, "softcap": softcap, "interpret": interpret, "name": name}
    return _attend_by_row(query, key, value, sinks, (begins, ends), rows=_MANY_ROWS, **options)


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "window", "interpret"))
def pages_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    rows: Rows,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of each token to its own sequence, whose keys are in pages that `fits` supports.

    Args:
        query: [heads, tokens, head_dim].
        key_pages: [pages, kv_heads, page_size, head_dim].
        value_pages: [pages, kv_heads, page_size, value_dim].
        rows: the sequences of the tokens, and their page tables.
        sinks: as for `cache_attention`.
        scale: likewise.
        softcap: likewise.
        window: number of tokens each token attends to, itself included; None: all.
        interpret: as for `cache_attention`.

    Returns:
        [tokens, heads, value_dim] in the query's dtype; rows of padding are undefined.
    """
    heads, tokens, _ = query.shape
    positions = rows.positions(tokens)
    begins = jnp.zeros_like(positions) if window is None else jnp.maximum(positions - window + 1, 0)
    sequences, pages = rows.tables.shape
    size = _tokens_of_tile(heads // key_pages.shape[1], _FEW_ROWS if tokens <= 2 * sequences else _MANY_ROWS)
    used = rows.starts[1:] - rows.starts[:-1]
    after = jnp.cumsum(-(-used // size))
    tile = jnp.arange(min(tokens, tokens // size + min(sequences, tokens)))
    of = jnp.minimum(jnp.searchsorted(after, tile, side="right", method="compare_all"), sequences - 1)
    done = (tile - (after[of] - -(-used[of] // size))) * size
    count = jnp.clip(used[of] - done, 0, size)
    return _attend_by_tiles(
        query.swapaxes(0, 1),
        key_pages,
        value_pages,
        sinks,
        (begins, positions + 1),
        (jnp.where(count > 0, rows.starts[of] + done, 0), count, of),
        tables=rows.tables,
        name="paged_attention",
        size=size,
        num_keys=pages * key_pages.shape[2],
        scale=scale,
        softcap=softcap,
        interpret=interpret,
    )


def _attend_by_row(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    seen: tuple[jax.Array, jax.Array],
    mask: jax.Array | None = None,
    *,
    rows: int,
    **options: Any,
) -> jax.Array:
    """`_attend_by_tiles` of arrays with as many tokens in each row, [batch, heads, tokens, head_dim].

    Args:
        query: as for `cache_attention`.
        key: likewise.
        value: likewise.
        sinks: likewise.
        seen: of each token of all rows, as for `_attend_by_tiles`.
        mask: likewise.
        rows: of a tile, about.
        **options: of `_attend_by_tiles`.

    Returns:
        [batch, tokens, heads, value_dim].
    """
    batch, heads, tokens, width = query.shape
    size = _tokens_of_tile(heads // key.shape[1], rows)
    each = -(-tokens // size)
    of_row = jnp.repeat(jnp.arange(batch), each)
    first = jnp.tile(jnp.arange(each) * size, batch)
    tiles = first + of_row * tokens, jnp.minimum(size, tokens - first), of_row
    packed = query.swapaxes(1, 2).reshape(batch * tokens, heads, width)
    out = _attend_by_tiles(
        packed, key, value, sinks, seen, tiles, mask=mask, size=size, num_keys=key.shape[2], **options
    )
    return out.reshape(batch, tokens, heads, -1)


def _tokens_of_tile(group: int, rows: int) -> int:
    """Tokens of a tile with about so many rows: one for each token and each of the heads that share keys."""
    return max(1, rows // power(group))


def _attend_by_tiles(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    seen: tuple[jax.Array, jax.Array],
    tiles: tuple[jax.Array, jax.Array, jax.Array],
    *,
    mask: jax.Array | None = None,
    tables: jax.Array | None = None,
    name: str = "decode_attention",
    size: int,
    num_keys: int,
    scale: float,
    softcap: float | None,
    interpret: bool,
) -> jax.Array:
    """Run the kernel for each tile, key head and part of the keys.

    Args:
        query: [tokens, heads, head_dim].
        key: [batch, kv_heads, capacity, head_dim], or pages if there are `tables`.
        value: likewise.
        sinks: [heads], or None.
        seen: of each token the first key that it sees, and the one after the last; [tokens] each.
        tiles: of each tile its first token, how many it has, and their sequence; [tiles] each.
        mask: [tokens, keys] bool, which of these keys are seen; None: all.
        tables: [sequences, pages], or None.
        name: of the kernel, in programs.
        size: tokens of a tile at most.
        num_keys: of a sequence at most.
        scale: as for `cache_attention`.
        softcap: likewise.
        interpret: likewise.

    Returns:
        [tokens, heads, value_dim] in the query's dtype.
    """
    (tokens, heads, width), (_, kv_heads, _, value_dim) = query.shape, value.shape
    group, num_tiles = heads // kv_heads, tiles[0].shape[0]
    parts = max(1, min(_PROGRAMS // (num_tiles * kv_heads), num_keys // _MIN_KEYS))
    rows = size * power(group)
    is_wide = max(width, value_dim) > 128 or query.dtype == jnp.float32
    if key.dtype == FP8:  # no GPU before compute capability 8.9 converts them
        key, value = (jax.lax.bitcast_convert_type(array, jnp.int8) for array in (key, value))
    sinks = jnp.full((heads,), MASKED, jnp.float32) if sinks is None else sinks.astype(jnp.float32) * LOG2_E
    given = [*(array.astype(jnp.int32) for array in seen), query, key, value]
    if mask is not None:
        given.append(mask.astype(jnp.int8))
    if tables is not None:
        given.append(tables.astype(jnp.int32))
    if parts == 1:
        given.append(sinks)
        results = [((tokens, heads, value_dim), query.dtype)]
    else:
        results = [((parts, tokens, heads, value_dim), jnp.float32), *[((parts, tokens, heads), jnp.float32)] * 2]
    kernel = functools.partial(
        _attend,
        has_mask=mask is not None,
        has_tables=tables is not None,
        rows=rows,
        columns=32 if is_wide else 64,
        parts=parts,
        group=group,
        scale=scale,
        softcap=softcap,
        interpret=interpret,
    )
    out = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results],
        grid=(num_tiles, kv_heads, parts),
        in_specs=[pl.BlockSpec((None,), lambda t, h, p: (t,))] * 3 + [_whole(array.shape) for array in given],
        out_specs=[_whole(shape) for shape, _ in results],
        compiler_params=triton.CompilerParams(num_warps=4 if rows <= _MANY_ROWS else 8, num_stages=2),
        interpret=interpret,
        name=name,
    )(*(array.astype(jnp.int32) for array in tiles), *given)
    if parts == 1:
        return out[0]
    sums, totals, most = out
    return _combined(sums, totals, most, sinks).astype(query.dtype)


def _whole(shape: Sequence[int]) -> pl.BlockSpec:
    return pl.BlockSpec(tuple(shape), lambda t, h, p: (0,) * len(shape))


def _combined(sums: jax.Array, totals: jax.Array, most: jax.Array, sinks: jax.Array) -> jax.Array:
    """The result of parts, whose sums are relative to each part's largest score: [tokens, heads, value_dim] float32."""
    largest = most.max(axis=0)
    kept = jnp.exp2(most - largest)
    return _normalized((sums * kept[..., None]).sum(axis=0), (totals * kept).sum(axis=0), largest, sinks)


def _normalized(sums: jax.Array, total: jax.Array, most: jax.Array, sink: jax.Array) -> jax.Array:
    """Sums over keys as averages, with the sinks' share; 0 where nothing is seen.

    Args:
        sums: [..., value_dim], of the values, relative to `most`.
        total: [...], of the shares, likewise.
        most: [...], the largest score, as a power of two.
        sink: [...], the sink's score likewise; `MASKED`: there is none.
    """
    largest = jnp.maximum(most, sink)
    kept = jnp.exp2(most - largest)
    total = total * kept + jnp.where(sink > MASKED, jnp.exp2(sink - largest), 0)
    return sums * kept[..., None] / jnp.maximum(total, 1e-30)[..., None]


def _attend(
    first_ref: Any,
    count_ref: Any,
    sequence_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    *rest: Any,
    has_mask: bool,
    has_tables: bool,
    rows: int,
    columns: int,
    parts: int,
    group: int,
    scale: float,
    softcap: float | None,
    interpret: bool,
) -> None:
    """A part of the keys of one head, for a tile of tokens."""
    results = list(rest)
    mask_ref = results.pop(0) if has_mask else None
    table_ref = results.pop(0) if has_tables else None
    sinks_ref = results.pop(0) if parts == 1 else None
    kv_head, sequence, dtype = pl.program_id(1), sequence_ref[...], query_ref.dtype
    index = jnp.arange(rows)
    token, head = index // power(group), index % power(group)
    # rows without a token or a head repeat the first one
    is_real, is_used = (token < count_ref[...]) & (head < group), jnp.full((rows,), count_ref[...] > 0)
    token, head = first_ref[...] + jnp.where(is_real, token, 0), kv_head * group + jnp.where(is_real, head, 0)
    begin, end = begin_ref[token], jnp.where(is_used, end_ref[token], 0)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

    lanes, depth = (jnp.arange(power(ref.shape[3], 16)) for ref in (key_ref, value_ref))
    is_column = jnp.broadcast_to((lanes < key_ref.shape[3])[None, :], (rows, lanes.shape[0]))
    query = triton.load(query_ref.at[token[:, None], head[:, None], lanes[None, :]], mask=is_column, other=0)

    def loaded(ref: Any, places: jax.Array, lanes: jax.Array) -> jax.Array:
        is_there = (places < high)[:, None] & (lanes < ref.shape[3])[None, :]
        if table_ref is None:
            at = ref.at[sequence, kv_head, places[:, None], lanes[None, :]]
        else:
            page = triton.load(table_ref.at[sequence, places // ref.shape[2]], mask=places < high, other=0)
            at = ref.at[page[:, None], kv_head, (places % ref.shape[2])[:, None], lanes[None, :]]
        found = triton.load(at, mask=is_there, other=0)
        return numbers(found, 0, "fp8", dtype, interpret=interpret) if found.dtype == jnp.int8 else found

    def add(block: Any, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        sums, total, most = state
        places = block * columns + jnp.arange(columns)
        scores = triton.dot(query, loaded(key_ref, places, lanes), trans_b=True, precision=precision) * scale
        if softcap is not None:
            scores = softcap * tanh(scores / softcap)
        seen = (places[None, :] >= begin[:, None]) & (places[None, :] < end[:, None])
        if mask_ref is not None:
            is_key = jnp.broadcast_to((places < high)[None, :], (rows, columns))
            seen &= triton.load(mask_ref.at[token[:, None], places[None, :]], mask=is_key, other=0) != 0
        scores = jnp.where(seen, scores * LOG2_E, MASKED)
        larger = jnp.maximum(most, scores.max(axis=1))
        shares, kept = jnp.where(seen, jnp.exp2(scores - larger[:, None]), 0), jnp.exp2(most - larger)
        value = loaded(value_ref, places, depth)
        sums = sums * kept[:, None] + triton.dot(shares.astype(dtype), value, precision=precision)
        return sums, total * kept + shares.sum(axis=1), larger

    low, high = begin.min() // columns, end.max()
    blocks = jnp.maximum((high + columns - 1) // columns - low, 0)
    share = (blocks + parts - 1) // parts
    start = low + pl.program_id(2) * share
    stop = jnp.minimum(start + share, low + blocks)
    most = jnp.full((rows,), MASKED, jnp.float32)
    state = (jnp.zeros((rows, depth.shape[0]), jnp.float32), jnp.zeros((rows,), jnp.float32), most)
    sums, total, most = jax.lax.fori_loop(start, stop, add, state)

    of_result = is_used[:, None] & (depth < value_ref.shape[3])[None, :]
    if sinks_ref is not None:
        result = _normalized(sums, total, most, sinks_ref[head]).astype(dtype)
        triton.store(results[0].at[token[:, None], head[:, None], depth[None, :]], result, mask=of_result)
        return
    part = pl.program_id(2)
    triton.store(results[0].at[part, token[:, None], head[:, None], depth[None, :]], sums, mask=of_result)
    triton.store(results[1].at[part, token, head], total, mask=is_used)
    triton.store(results[2].at[part, token, head], most, mask=is_used)
