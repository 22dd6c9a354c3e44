"""Causal attention of prompts on NVIDIA GPUs by cuDNN's flash attention, through `jax.nn.dot_product_attention`.

It is not available to programs for described GPUs, since JAX looks for the library on this machine; they have the Triton kernel of
`hfax.kernels.gpu.flash`, which also takes what cuDNN does not: soft-capping, sinks, and heads wider than 128.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

_MAX_WIDTH = 128
"""cuDNN supports wider heads only on Hopper and later; the GPU is not known while tracing."""


def fits(query: jax.Array, key: jax.Array, value: jax.Array) -> bool:
    """Whether cuDNN supports a prompt of these shapes, [batch, heads, length, head_dim], in this dtype."""
    dtypes = {query.dtype, key.dtype, value.dtype}
    is_half = len(dtypes) == 1 and query.dtype in (jnp.bfloat16, jnp.float16)
    is_prompt = query.shape[2] == key.shape[2] > 1
    width = query.shape[3]
    return is_half and is_prompt and value.shape == key.shape and width <= _MAX_WIDTH and width % 8 == 0


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
