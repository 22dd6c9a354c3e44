"""Causal attention of prompts on NVIDIA GPUs by a Triton kernel, without materializing the score matrix.

Online softmax over blocks of keys, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691). Blocks of keys that are masked for
all of a program's queries are not read: those after the queries, before the window, or in the padding.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from hfax.kernels.trial import agrees, drawn, expected_by_xla

_MAX_WIDTH = 256
MASKED = -1e30
LOG2_E = 1.4426950408889634


def fits(query: jax.Array, key: jax.Array, value: jax.Array) -> bool:
    """Whether the kernel supports a prompt of these shapes, [batch, heads, length, head_dim], in this dtype."""
    is_half = query.dtype == key.dtype == value.dtype and query.dtype in (jnp.bfloat16, jnp.float16)
    is_prompt = query.shape[2] == key.shape[2] == value.shape[2] > 1
    widths = (query.shape[3], value.shape[3])
    return is_half and is_prompt and query.shape[1] % key.shape[1] == 0 and max(widths) <= _MAX_WIDTH


@functools.cache
def works() -> bool:
    """Whether the kernel gives the right values on this process's GPU; tested once, on a short prompt."""
    return agrees("of prompts", _trial, 2.0**-6, "long prompts' attention is computed in blocks by XLA")


def _trial() -> tuple[np.ndarray, np.ndarray]:
    query, key, value = drawn(100, 100)
    is_real = jnp.arange(100)[None] >= jnp.array([[0], [70]])
    rows, columns = jnp.arange(100)[:, None], jnp.arange(100)
    seen = (columns <= rows) & (columns > rows - 40) & is_real[:, None, None, :]
    got = flash_attention(query, key, value, is_real, scale=0.125, window=40)
    real = np.asarray(is_real)[:, :, None, None]
    return np.asarray(got, np.float32) * real, expected_by_xla(query, key, value, seen) * real


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "interpret"))
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    is_real: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal self-attention of a prompt, for shapes supported according to `fits`.

    Args:
        query: [batch, heads, length, head_dim].
        key: [batch, kv_heads, length, head_dim].
        value: [batch, kv_heads, length, value_dim].
        is_real: [batch, length], 0 at the left padding; None: no padding.
        sinks: [heads], one extra logit per head that takes probability but has no value; None: none.
        scale: multiplies the scores.
        window: number of tokens each token attends to, itself included; None: all before it.
        softcap: scores become `softcap * tanh(scores / softcap)`; None: they do not.
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [batch, length, heads, value_dim]; rows of the padding are undefined.
    """
    batch, heads, length, _ = query.shape
    shared, value_dim = heads // key.shape[1], value.shape[3]
    padding = jnp.zeros((batch,), jnp.int32) if is_real is None else length - (is_real != 0).sum(1, dtype=jnp.int32)
    query, key, value = (_as_powers_of_two(array) for array in (query, key, value))
    width, depth = query.shape[3], value.shape[3]
    rows, columns = (128, 64) if max(width, depth) <= 128 else (64, 32)
    rows, columns = min(rows, power(length, 16)), min(columns, power(length, 16))
    query, key, value = (jnp.pad(a, ((0, 0), (0, 0), (0, -length % rows), (0, 0))) for a in (query, key, value))
    whole = query.shape[2]
    sinks = jnp.full((heads,), MASKED, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    options = {"scale": scale, "window": window, "softcap": softcap, "rows": rows, "columns": columns}
    out = pl.pallas_call(
        functools.partial(_attend, **options),
        out_shape=jax.ShapeDtypeStruct((batch, whole, heads, depth), query.dtype),
        grid=(whole // rows, heads, batch),
        in_specs=[
            pl.BlockSpec((None,), lambda i, h, b: (b,)),
            pl.BlockSpec((None,), lambda i, h, b: (h,)),
            pl.BlockSpec((None, None, rows, width), lambda i, h, b: (b, h, i, 0)),
            pl.BlockSpec((None, None, whole, width), lambda i, h, b: (b, h // shared, 0, 0)),
            pl.BlockSpec((None, None, whole, depth), lambda i, h, b: (b, h // shared, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, rows, None, depth), lambda i, h, b: (b, i, h, 0)),
        compiler_params=triton.CompilerParams(num_warps=4 if rows < 128 else 8, num_stages=2),
        interpret=interpret,
        name="flash_attention",
    )(padding, sinks, query, key, value)
    return out[:, :length, :, :value_dim]


def power(size: int, least: int = 1) -> int:
    """The smallest power of two that is no smaller than `size` and `least`, itself one."""
    return max(least, 1 << (size - 1).bit_length())


def _as_powers_of_two(array: jax.Array) -> jax.Array:
    """The array with its last axis padded with zeros to a power of two, which Triton requires."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, power(array.shape[3], 16) - array.shape[3])))


def _attend(
    padding_ref: Any,
    sinks_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    out_ref: Any,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    rows: int,
    columns: int,
) -> None:
    """A block of queries of one head."""
    begin, padding = pl.program_id(0) * rows, padding_ref[...]
    at = begin + jnp.arange(rows)
    query = query_ref[...]

    def add(block: Any, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        sums, total, most = state
        part, places = pl.ds(block * columns, columns), block * columns + jnp.arange(columns)
        scores = triton.dot(query, key_ref[part, :], trans_b=True) * scale
        if softcap is not None:
            scores = softcap * tanh(scores / softcap)
        seen = (places[None, :] <= at[:, None]) & (places >= padding)[None, :]
        if window is not None:
            seen = seen & (places[None, :] > at[:, None] - window)
        scores = jnp.where(seen, scores * LOG2_E, MASKED)
        larger = jnp.maximum(most, scores.max(axis=1))
        shares, kept = jnp.exp2(scores - larger[:, None]), jnp.exp2(most - larger)
        value = value_ref[part, :]
        sums = sums * kept[:, None] + triton.dot(shares.astype(value.dtype), value)
        return sums, total * kept + shares.sum(axis=1), larger

    sink = jnp.maximum(sinks_ref[...] * LOG2_E, MASKED)
    most = jnp.full((rows,), 0.0) + sink
    state = (jnp.zeros((rows, value_ref.shape[1]), jnp.float32), (most > MASKED).astype(jnp.float32), most)
    first = padding if window is None else jnp.maximum(padding, begin - window + 1)
    last = (begin + rows + columns - 1) // columns
    sums, total, _ = jax.lax.fori_loop(jnp.maximum(first, 0) // columns, last, add, state)
    out_ref[...] = (sums / jnp.maximum(total, 1e-30)[:, None]).astype(out_ref.dtype)


def tanh(x: jax.Array) -> jax.Array:
    """tanh by one exponential; Triton's own needs a library of NVIDIA."""
    small = jnp.exp2(-2 * LOG2_E * jnp.abs(x))
    return jnp.sign(x) * (1 - small) / (1 + small)
