"""Rows of a mixture of experts in tiles of one expert each, as the Pallas kernels multiply them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def in_tiles(
    experts: jax.Array, num_experts: int, height: int, count: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sort rows into tiles of one expert each.

    Args:
        experts: [rows] int32; rows with an index past the last expert are left out.
        num_experts: number of experts.
        height: rows of a tile.
        count: number of tiles, at least `rows // height + min(rows, num_experts)`.

    Returns:
        The expert of each tile, [count]; the number of tiles with rows, [1]; the row at each tile position, [count · height],
        undefined for empty positions; and the position of each row, [rows].
    """
    rows = experts.shape[0]
    sizes = jnp.bincount(experts, length=num_experts).astype(jnp.int32)
    tiles = -(-sizes // height)
    ends = jnp.cumsum(tiles)
    used = ends[-1:]
    # empty tiles use the last expert's matrix, which is loaded already
    tile = jnp.clip(jnp.arange(count), max=jnp.maximum(used - 1, 0))
    of_tile = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), num_experts - 1).astype(jnp.int32)
    order = jnp.argsort(experts, stable=True)
    own = experts[order]
    first_tile, first_row = ends - tiles, jnp.cumsum(sizes) - sizes
    at = jnp.where(own < num_experts, first_tile[own] * height + jnp.arange(rows) - first_row[own], count * height)
    source = jnp.zeros((count * height,), jnp.int32).at[at].set(order.astype(jnp.int32), mode="drop")
    return of_tile, used, source, jnp.zeros_like(experts).at[order].set(at)
