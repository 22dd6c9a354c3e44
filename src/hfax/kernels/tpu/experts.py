"""Grouped matrix products on TPU by JAX's Pallas kernel (megablox), which reads only the matrices of experts with rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from hfax.kernels import precision
from hfax.kernels.tiles import LANES, SUBLANES

_TILE_ROWS = 128
_TILE = 512


def fits(x: jax.Array, weight: jax.Array, *, is_transposed: bool) -> bool:
    """Whether the kernel supports these per-device shapes, as in `grouped_linear`."""
    in_features, out_features = weight.shape[1:] if is_transposed else weight.shape[:0:-1]
    return x.shape[1] == in_features and min(in_features, out_features) >= LANES and in_features % SUBLANES == 0


def grouped_linear(
    x: jax.Array, weight: jax.Array, sizes: jax.Array, *, is_transposed: bool = False, interpret: bool = False
) -> jax.Array:
    """Multiply the rows of x, ordered by group, by the matrix of their group.

    Args:
        x: [rows, in_features].
        weight: [groups, out_features, in_features].
        sizes: [groups] int32, rows of each group.
        is_transposed: weight is [groups, in_features, out_features].
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [rows, out_features] float32; rows beyond the last group are undefined.
    """
    rows = x.shape[0]
    tile = min(_TILE_ROWS, -(-rows // 16) * 16)
    padded = jnp.pad(x, ((0, -rows % tile), (0, 0)))
    sizes_of_product = x.shape[1], weight.shape[2 if is_transposed else 1]
    tiling = (tile, *map(_tile, sizes_of_product))
    with precision.of_kernel(x):
        return gmm(padded, weight, sizes, jnp.float32, tiling, None, None, not is_transposed, interpret)[:rows]


def _tile(size: int) -> int:
    """The largest tile that divides a size; if none does, the largest of which at most a tenth of the tiles is empty."""
    tiles = _TILE, 256, LANES
    return next((t for t in tiles if size % t == 0), next((t for t in tiles if -size % t <= 0.1 * size), LANES))
