"""Grouped matrix products on TPU by JAX's Pallas kernel (megablox), which reads only the matrices of experts with rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from hfax.kernels import precision

_TILE_ROWS = 128
_TILE = 512
_LANES = 128


def fits(x: jax.Array, weight: jax.Array) -> bool:
    """Whether the kernel supports these per-device shapes."""
    return x.shape[1] % _LANES == 0 and x.shape[1] == weight.shape[2] and weight.shape[1] % _LANES == 0


def grouped_linear(x: jax.Array, weight: jax.Array, sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Multiply the rows of x, ordered by group, by the transposed matrix of their group.

    Args:
        x: [rows, in_features].
        weight: [groups, out_features, in_features].
        sizes: [groups] int32, rows of each group.
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [rows, out_features] float32; rows beyond the last group are undefined.
    """
    rows = x.shape[0]
    tile = min(_TILE_ROWS, -(-rows // 16) * 16)
    padded = jnp.pad(x, ((0, -rows % tile), (0, 0)))
    tiling = (tile, *(next(t for t in (_TILE, 256, _LANES) if n % t == 0) for n in (x.shape[1], weight.shape[1])))
    is_transposed = True
    with precision.of_kernel(x):
        return gmm(padded, weight, sizes, jnp.float32, tiling, None, None, is_transposed, interpret)[:rows]
