"""Writing new keys and values into a fixed-size cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hfax.kernels import target
from hfax.kernels.cache_numbers import FP8, to_cache
from hfax.kernels.cpu import calls, library


def cache_write(buffer: jax.Array, new: jax.Array, start: jax.Array, scale: float = 1.0) -> jax.Array:
    """`buffer` with `new` written from position `start` (a scalar) on axis -2; in place if the buffer is not used again.

    Args:
        buffer: [..., capacity, width].
        new: [..., n, width]; converted to the buffer's dtype, see `cache_numbers`.
        start: scalar; clamped so that `new` fits.
        scale: what numbers in float8 are divided by.
    """
    new = to_cache(new, buffer.dtype, scale)
    if buffer.dtype in (jnp.bfloat16, jnp.float16, FP8) and library.may_be_called():
        # XLA's CPU compiler widens the whole buffer and narrows it again for such an update
        target.choose("cache: written in place by the C++ kernel")
        return calls.cache_write(buffer, new, start)
    return jax.lax.dynamic_update_slice_in_dim(buffer, new, start, axis=buffer.ndim - 2)
