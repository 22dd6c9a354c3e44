"""The numbers that a KV cache holds: the model's own, or float8_e4m3fn, which takes half the memory of bfloat16.

A number becomes the nearest of float8; beyond the largest, it becomes the largest. Keys and values are not scaled, as in vLLM
without calibrated scales: those of common models are far below the largest number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

FP8 = jnp.dtype(jnp.float8_e4m3fn)
_LARGEST = 448.0


def to_cache(new: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Numbers of a model as those of a cache."""
    if dtype == FP8 and new.dtype != FP8:
        new = jnp.clip(new, -_LARGEST, _LARGEST)  # XLA makes NaN of what is larger
    return new.astype(dtype)
