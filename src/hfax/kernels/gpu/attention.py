"""Attention on NVIDIA GPUs: cuDNN's flash attention or a Triton kernel for prompts, JAX's Triton kernel for decoding steps.

cuDNN is called through `jax.nn.dot_product_attention`. It is not available to programs for described GPUs, since JAX looks for
the library on this machine; they have the Triton kernel, which also takes what cuDNN does not: soft-capping, sinks, and heads wider
than 128. The kernel of decoding steps reads only the live part of a cache, split into chunks.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from hfax.kernels.gpu.trial import agrees

_MAX_WIDTH = 128
"""cuDNN supports wider heads only on Hopper and later; the GPU is not known while tracing."""


MIN_CACHE_BYTES = 8 << 20
"""In keys: below it, XLA reads the whole cache faster than several kernels can be launched."""
_MAX_PARTS = 128
_PART = 128


def fits(query: jax.Array, key: jax.Array, value: jax.Array) -> bool:
    """Whether cuDNN supports a prompt of these shapes, [batch, heads, length, head_dim], in this dtype."""
    dtypes = {query.dtype, key.dtype, value.dtype}
    is_half = len(dtypes) == 1 and query.dtype in (jnp.bfloat16, jnp.float16)
    is_prompt = query.shape[2] == key.shape[2] > 1
    width = query.shape[3]
    return is_half and is_prompt and value.shape == key.shape and width <= _MAX_WIDTH and width % 8 == 0


def fits_step(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> bool:
    """Whether `step_attention` supports these; below `MIN_CACHE_BYTES` of keys on a device, XLA is faster."""
    is_half = query.dtype == key.dtype == value.dtype and query.dtype in (jnp.bfloat16, jnp.float16)
    width, capacity = query.shape[3], key.shape[2]
    is_step = query.shape[2] == 1 and value.shape == key.shape and mask.shape == (query.shape[0], 1, 1, capacity)
    return is_half and is_step and capacity % _PART == 0 and mask.dtype == jnp.bool_ and width in (64, 128, 256)


@functools.cache
def step_attention_works() -> bool:
    """Whether JAX's Triton kernel gives the right values on this process's GPU; tested once, on a small cache."""
    return agrees("of decoding steps", _trial_of_step, 2.0**-6, "decoding steps read whole caches")


def _trial_of_step() -> tuple[np.ndarray, np.ndarray]:
    query, key, value = drawn(1, 512)
    mask = (jnp.arange(512) >= jnp.array([[3], [130]])) & (jnp.arange(512) < 300)
    got = jax.jit(functools.partial(step_attention, scale=0.125))(query, key, value, mask[:, None, None])
    return np.asarray(got, np.float32), expected_by_xla(query, key, value, mask[:, None, None])


def drawn(queries: int, keys: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    draw = np.random.default_rng(0).standard_normal
    query, key, value = (
        jnp.asarray(draw((2, n, m, 64)), jnp.bfloat16) for n, m in ((4, queries), (2, keys), (2, keys))
    )
    return query, key, value


def expected_by_xla(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> np.ndarray:
    """[batch, queries, heads, head_dim], by XLA in float32; 0 where a row of the mask, [batch, 1, queries, keys], is false."""
    keys, values = (jnp.repeat(array, 2, axis=1).astype(jnp.float32) for array in (key, value))
    scores = jnp.einsum("bhqd,bhkd->bhqk", query.astype(jnp.float32), keys) * 0.125
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e30)) * mask.any(axis=3, keepdims=True)
    return np.asarray(jnp.einsum("bhqk,bhkd->bqhd", shares, values))


def step_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one query per sequence; chunks of the cache without visible keys are not read.

    Args:
        query: [batch, heads, 1, head_dim].
        key: [batch, kv_heads, capacity, head_dim].
        value: as `key`.
        mask: [batch, 1, 1, capacity] bool; visible keys are contiguous.
        sinks: [heads], the score of a key without a value; None: there is none.
        scale: multiplies the scores.
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [batch, 1, heads, head_dim].
    """
    from jax.experimental.pallas.ops.gpu.decode_attention import mqa

    batch, heads, _, width = query.shape
    kv_heads, capacity = key.shape[1:3]
    seen = mask[:, 0, 0]
    begin, end = jnp.argmax(seen, axis=1), capacity - jnp.argmax(seen[:, ::-1], axis=1)
    parts = next(n for n in range(min(_MAX_PARTS, capacity // _PART), 0, -1) if capacity % (n * _PART) == 0)
    out, (sums, largest) = mqa(
        query.reshape(batch * kv_heads, heads // kv_heads, width),
        key.reshape(batch * kv_heads, capacity, width),
        value.reshape(batch * kv_heads, capacity, width),
        jnp.repeat(begin.astype(jnp.int32), kv_heads),
        jnp.repeat(end.astype(jnp.int32), kv_heads),
        sm_scale=scale,
        block_k=_PART,
        k_splits=parts,
        return_residuals=True,
        interpret=interpret,
    )
    out = out.reshape(batch, 1, heads, width)
    if sinks is not None:  # the share of the weights that the keys have
        scores = (largest + jnp.log(sums)).reshape(batch, 1, heads)
        out = out * jax.nn.sigmoid(scores - sinks.astype(jnp.float32))[..., None]
    return out.astype(query.dtype)


def prompt_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    is_real: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Causal self-attention of a prompt, without materializing the score matrix.

    Args:
        query: [batch, heads, length, head_dim].
        key: [batch, kv_heads, length, head_dim].
        value: as `key`.
        is_real: [batch, length], 0 at the left padding; None: no padding.
        scale: multiplies the scores.
        window: number of tokens each token attends to, itself included; None: all before it.
        implementation: "xla" computes the same on any platform, for tests.

    Returns:
        [batch, length, heads, head_dim]; padding rows are undefined.
    """
    length = query.shape[2]
    arrays = [array.swapaxes(1, 2) for array in (query, key, value)]
    lengths, order = None, None
    if is_real is not None:
        # cuDNN supports only right padding: each row is rotated to move its padding there, and back afterwards
        lengths = (is_real != 0).sum(axis=1, dtype=jnp.int32)
        order = (jnp.arange(length) - lengths[:, None]) % length
        arrays = [_turned(array, order) for array in arrays]
    out = jax.nn.dot_product_attention(
        *arrays,
        scale=scale,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    if lengths is None:
        return out
    return _turned(out, (jnp.arange(length) + lengths[:, None]) % length)


def _turned(array: jax.Array, order: jax.Array) -> jax.Array:
    """[batch, length, heads, head_dim] with the tokens of each row reordered by `order`, [batch, length]."""
    return jax.vmap(lambda row, places: row[places])(array, order)
