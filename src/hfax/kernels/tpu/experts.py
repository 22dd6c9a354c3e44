"""Grouped products on TPU by the Pallas kernel (megablox) that ships with JAX: only the matrices of experts with rows are read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import PartitionSpec as P

_TILE_ROWS = 128
_TILE = 512
_LANES = 128


def fits(x: jax.Array, weight: jax.Array, shards: int) -> bool:
    """Whether the kernel takes these shapes, with the inner width split over `shards` devices."""
    return x.shape[1] % (shards * _LANES) == 0 and x.shape[1] == weight.shape[2] and weight.shape[1] % _LANES == 0


def grouped_linear(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    *,
    mesh: jax.sharding.Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Rows of x, in the order of their groups, with the transposed matrices of the groups.

    Args:
        x: [rows, in_features].
        weight: [groups, out_features, in_features].
        sizes: [groups] int32, rows of each group.
        mesh: has an axis "tensor", over which the inputs of the products are split; None: one device.
        interpret: run the kernel by plain JAX, for tests.

    Returns:
        [rows, out_features] float32.
    """
    rows = x.shape[0]
    tile = min(_TILE_ROWS, -(-rows // 16) * 16)

    def local(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -rows % tile), (0, 0)))  # rows beyond the last group are not computed
        tiling = (tile, *(next(t for t in (_TILE, 256, _LANES) if n % t == 0) for n in (x.shape[1], weight.shape[1])))
        is_transposed = True
        out = gmm(padded, weight, sizes, jnp.float32, tiling, None, None, is_transposed, interpret)[:rows]
        return out if mesh is None else jax.lax.psum(out, "tensor")

    if mesh is None:
        return local(x, weight, sizes)
    specs = (P(None, "tensor"), P(None, None, "tensor"), P(None))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, None), check_vma=False)(x, weight, sizes)
