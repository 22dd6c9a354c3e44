"""The numbers that a KV cache holds: the model's own, or float8_e4m3fn, which takes half the memory of bfloat16.

A number becomes the nearest of float8; beyond the largest, it becomes the largest. Where a checkpoint has scales for a layer's keys
and values, they are divided by them first. Others are not scaled, as in vLLM without calibrated scales: keys and values of common
models are far below the largest number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

FP8 = jnp.dtype(jnp.float8_e4m3fn)
_LARGEST = 448.0


def to_cache(new: jax.Array, dtype: jnp.dtype, scale: float = 1.0) -> jax.Array:
    """Numbers of a model as those of a cache; float8 is divided by `scale`."""
    if dtype == FP8 and new.dtype != FP8:
        scaled = new if scale == 1 else new.astype(jnp.float32) / scale
        new = jnp.clip(scaled, -_LARGEST, _LARGEST)  # XLA makes NaN of what is larger
    return new.astype(dtype)
