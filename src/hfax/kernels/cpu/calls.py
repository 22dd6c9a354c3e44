"""The C++ kernels as JAX functions. They do not support vmap, and only one supports gradients: they are for programs that are
compiled next."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.kernels.cache_numbers import FP8
from hfax.kernels.cpu import library
from hfax.kernels.encodings import BITS, Encoding


def linear(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """`x @ weight.T` with float32 accumulation.

    Args:
        x: [rows, in_features] float32 or bfloat16.
        weight: [out_features, in_features] float32 or bfloat16.
        out_dtype: float32 or bfloat16.

    Returns:
        [rows, out_features].
    """
    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), out_dtype)
    return _ffi_call("hfax_linear", shape)(x, weight)


def matmul(a: jax.Array, b: jax.Array, *, turn_a: bool, turn_b: bool, out_dtype: jnp.dtype) -> jax.Array:
    """`a @ b.T` of large bfloat16 matrices with float32 accumulation; requires `library.has_matmul`.

    Args:
        a: [rows, summed], or [summed, rows] with `turn_a`.
        b: [columns, summed], or [summed, columns] with `turn_b`.
        turn_a: sum over the first axis of `a`.
        turn_b: sum over the first axis of `b`.
        out_dtype: float32 or bfloat16.

    Returns:
        [rows, columns].
    """
    shape = jax.ShapeDtypeStruct((a.shape[1 if turn_a else 0], b.shape[1 if turn_b else 0]), out_dtype)
    return _ffi_call("hfax_matmul", shape)(a, b, turn_a=turn_a, turn_b=turn_b)


def linear_packed(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    *,
    encoding: Encoding,
    out_dtype: jnp.dtype,
    any_order: bool,
) -> jax.Array:
    """`x @ weight.T` with float32 accumulation, where a weight is a code times its group's scale plus its offset.

    Args:
        x: [rows, in_features] float32 or bfloat16.
        values: [out_features, in_features] int8 or float8_e4m3fn; of 4 bits [out_features, in_features / 2] uint8, in the order of
            `hfax.kernels.quantized`.
        scale: [out_features, groups] bfloat16, float16 or float32; groups of 16 to 512 columns, a multiple of 16, that share no
            words of 4-bit weights with half of another.
        offset: like `scale`; None: 0.
        encoding: of `values`.
        out_dtype: float32 or bfloat16.
        any_order: sums of many rows may have another order than those of few: of float8, which is much faster.

    Returns:
        [rows, out_features].
    """
    shape = jax.ShapeDtypeStruct((x.shape[0], values.shape[0]), out_dtype)
    how: dict[str, Any] = {"encoding": _number_of(encoding), "any_order": any_order}
    return _ffi_call("hfax_linear_packed", shape)(x, values, scale, _or_none(offset), **how)


def linear_experts(x: jax.Array, weight: jax.Array, experts: jax.Array) -> jax.Array:
    """Multiply each row of x by the matrix of its expert, with float32 accumulation.

    Args:
        x: [rows, in_features] float32 or bfloat16.
        weight: [experts, out_features, in_features] of the same dtype.
        experts: [rows] int32.

    Returns:
        [rows, out_features] in the dtype of `x`.
    """
    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), x.dtype)
    return _ffi_call("hfax_linear_experts", shape)(x, weight, experts.astype(jnp.int32))


def linear_experts_packed(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    experts: jax.Array,
    *,
    encoding: Encoding,
    any_order: bool,
) -> jax.Array:
    """Like `linear_experts` for weights in the format of `linear_packed`, with an experts axis."""
    shape = jax.ShapeDtypeStruct((x.shape[0], values.shape[1]), x.dtype)
    call = _ffi_call("hfax_linear_experts_packed", shape)
    how: dict[str, Any] = {"encoding": _number_of(encoding), "any_order": any_order}
    return call(x, values, scale, _or_none(offset), experts.astype(jnp.int32), **how)


def _or_none(offset: jax.Array | None) -> jax.Array:
    return jnp.zeros((0,), jnp.float32) if offset is None else offset


def _number_of(encoding: Encoding) -> np.int64:
    """Its number in packed.h."""
    return np.int64(list(BITS).index(encoding))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMS norm of each row, times `weight`.

    Args:
        x: [rows, width] float32 or bfloat16; the width is a multiple of 16.
        weight: [width] float32 or bfloat16.
        eps: added to the mean square.

    Returns:
        [rows, width] in the dtype of `x`.
    """
    return _ffi_call("hfax_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, weight, eps=np.float32(eps))


def exp(x: jax.Array) -> jax.Array:
    """The exponential of each number, by the same instructions wherever it stands.

    Args:
        x: [numbers] float32.
    """
    return _ffi_call("hfax_exp", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def row_sums(x: jax.Array) -> jax.Array:
    """The sum of each row, added in the same order for any number of rows.

    Args:
        x: [rows, width] float32.

    Returns:
        [rows] float32.
    """
    return _ffi_call("hfax_row_sums", jax.ShapeDtypeStruct(x.shape[:1], x.dtype))(x)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding.

    Args:
        x: [batch, heads, length, head_dim] float32 or bfloat16, with even head_dim.
        cos: [batch | 1, length, head_dim], in the dtype of `x`.
        sin: shaped like `cos`.

    Returns:
        The rotated array, shaped like `x`.
    """
    return _ffi_call("hfax_rotate", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, cos, sin)


def can_attend(queries: jnp.dtype, held: jnp.dtype) -> bool:
    """Whether `decode_attention` and `pages_attention` take queries beside keys and values of these dtypes."""
    return queries in (jnp.bfloat16, jnp.float32) and held in (queries, FP8)


def decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention of few queries that reads only the keys visible to some query.

    Args:
        query: [batch, heads, queries, head_dim] float32 or bfloat16.
        key: [batch, kv_heads, capacity, head_dim] in the dtype of the query, or float8_e4m3fn, as the value.
        value: [batch, kv_heads, capacity, value_dim].
        mask: [batch | 1, heads | 1, queries, capacity] bool.
        scale: multiplies the scores.
        softcap: bounds the scores, as in `hfax.kernels.attention`.
        sinks: [heads], as in `hfax.kernels.attention`.

    Returns:
        [batch, queries, heads, value_dim]; 0 for fully masked queries.
    """
    batch, heads, queries, _ = query.shape
    shape = jax.ShapeDtypeStruct((batch, queries, heads, value.shape[-1]), query.dtype)
    extra = jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    return _ffi_call("hfax_decode_attention", shape)(query, key, value, mask, extra, **_of_scores(scale, softcap))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def prompt_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    scale: float,
    softcap: float | None,
    by_token: bool,
) -> jax.Array:
    """Attention of many bfloat16 queries, without materializing scores; requires `library.has_matmul`. Supports gradients.

    Args:
        query: [batch, heads, queries, head_dim] bfloat16, like key and value.
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, value_dim].
        mask: [batch | 1, heads | 1, queries, keys] bool.
        scale: multiplies the scores.
        softcap: bounds the scores, as in `hfax.kernels.attention`.
        by_token: pass the arrays to the kernel as [batch, tokens, heads, dim], the layout of layers rather than caches.

    Returns:
        [batch, queries, heads, value_dim]; 0 for fully masked queries.
    """
    return _prompt_attention(query, key, value, mask, scale, softcap, by_token)[0]


def _prompt_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    scale: float,
    softcap: float | None,
    by_token: bool,
) -> tuple[jax.Array, Any]:
    batch, heads, queries, _ = query.shape
    out = jax.ShapeDtypeStruct((batch, queries, heads, value.shape[-1]), query.dtype)
    call = _ffi_call("hfax_prompt_attention", (out, jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)))
    arrays = [x.swapaxes(1, 2) if by_token else x for x in (query, key, value)]
    found, sums = call(*arrays, mask, **_of_scores(scale, softcap), by_token=by_token)
    return found, (arrays, mask, found, sums)


def _prompt_attention_gradients(
    scale: float, softcap: float | None, by_token: bool, kept: Any, gradient: jax.Array
) -> Any:
    arrays, *others = kept
    call = _ffi_call("hfax_prompt_attention_gradients", [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
    found = call(*arrays, *others, gradient, **_of_scores(scale, softcap), by_token=by_token)
    return (*(x.swapaxes(1, 2) if by_token else x for x in found), None)


prompt_attention.defvjp(_prompt_attention, _prompt_attention_gradients)


def cache_write(buffer: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """`buffer` with `new`, of the same dtype, written in place from position `start` on axis -2."""
    shape = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
    call = _ffi_call("hfax_cache_write", shape, input_output_aliases={0: 0})
    return call(buffer, new, start.astype(jnp.int32).reshape(1))


def pages_write(
    pages: jax.Array, new: jax.Array, starts: jax.Array, lengths: jax.Array, tables: jax.Array
) -> jax.Array:
    """`pages`, [pages, kv_heads, page_size, width], with `new`, [kv_heads, tokens, width], written in place; the other arguments
    are those of `hfax.kernels.pool.Rows`."""
    shape = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    call = _ffi_call("hfax_pages_write", shape, input_output_aliases={0: 0})
    return call(pages, new, starts, lengths, tables)


def pages_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    tables: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention of the tokens of a step to the pages of their own sequences; see `hfax.kernels.pool`.

    Args:
        query: [heads, tokens, head_dim] float32 or bfloat16.
        key_pages: [pages, kv_heads, page_size, head_dim] in the dtype of the query, or float8_e4m3fn, as the value, with a page
            size of at most 64 tokens.
        value_pages: [pages, kv_heads, page_size, value_dim].
        starts: as in `Rows`.
        lengths: as in `Rows`.
        tables: as in `Rows`.
        scale: multiplies the scores.
        softcap: bounds the scores.
        window: number of tokens each token attends to; None: all.
        sinks: [heads], as in `hfax.kernels.attention`.

    Returns:
        [tokens, heads, value_dim]; 0 for padding.
    """
    shape = jax.ShapeDtypeStruct((query.shape[1], query.shape[0], value_pages.shape[3]), query.dtype)
    extra = jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    return _ffi_call("hfax_pages_attention", shape)(
        query,
        key_pages,
        value_pages,
        starts,
        lengths,
        tables,
        extra,
        **_of_scores(scale, softcap),
        window=np.int64(window or 0),
    )


def _of_scores(scale: float, softcap: float | None) -> dict[str, np.float32]:
    """The attributes shared by all attention kernels."""
    return {"scale": np.float32(scale), "softcap": np.float32(softcap or 0.0)}


def _ffi_call(name: str, *args: Any, **kwargs: Any) -> Any:
    """The kernel of that name as a function of arrays, compiled for the current instruction set."""
    return jax.ffi.ffi_call(library.ffi_name(name), *args, **kwargs)
