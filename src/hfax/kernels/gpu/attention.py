"""Attention of prompts on NVIDIA GPUs by cuDNN's flash attention, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

_MAX_WIDTH = 128
"""cuDNN takes wider heads on Hopper and later alone; which GPU it will be is not known while tracing."""


def fits(query: jax.Array, key: jax.Array, value: jax.Array) -> bool:
    """Whether cuDNN takes a prompt of these shapes, [batch, heads, length, head_dim], in this dtype."""
    dtypes = {query.dtype, key.dtype, value.dtype}
    is_half = len(dtypes) == 1 and query.dtype in (jnp.bfloat16, jnp.float16)
    is_prompt = query.shape[2] == key.shape[2] > 1
    width = query.shape[3]
    return is_half and is_prompt and value.shape == key.shape and width <= _MAX_WIDTH and width % 8 == 0


def is_there() -> bool:
    """Whether this process has an NVIDIA GPU with cuDNN."""
    device = jax.devices()[0]
    return device.platform == "gpu" and "cuda" in device.client.platform_version.lower()


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
    """Causal attention of a prompt with itself; no matrix of scores is ever in memory.

    Args:
        query: [batch, heads, length, head_dim].
        key: [batch, kv_heads, length, head_dim].
        value: as `key`.
        is_real: [batch, length], 0 at the padding, which is on the left; None: there is none.
        scale: multiplies the scores.
        window: how many tokens each sees, itself included; None: all before it.
        implementation: "xla" computes the same anywhere, for tests.

    Returns:
        [batch, length, heads, head_dim]; the rows of padding mean nothing.
    """
    length = query.shape[2]
    arrays = [array.swapaxes(1, 2) for array in (query, key, value)]
    lengths, order = None, None
    if is_real is not None:
        # cuDNN knows padding behind a text: each row is turned until its padding is there, and back afterwards
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
    """[batch, length, heads, head_dim] with each row's tokens in its order, [batch, length]."""
    return jax.vmap(lambda row, places: row[places])(array, order)
