"""Explicit sharding constraints in a trace, where the compiler should not infer them."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hfax.kernels import paged, target
from hfax.sharding.mesh import TENSOR, batch_axes, size_of

_HEADS_SECOND = ("keys", "values")


def cache_spec(mesh: jax.sharding.Mesh, name: str, shape: tuple[int, ...]) -> P:
    """Sharding of a cache array: by heads, if there are heads and they divide, and by batch rows.

    Args:
        mesh: a mesh with the axes of `hfax.sharding.mesh`.
        name: name of the array, such as "layers.0.keys".
        shape: shape of the array.
    """
    kind = name.rpartition(".")[2]
    parts: list[tuple[str, ...] | None] = [None] * len(shape)
    heads = {"pages": paged.HEADS}.get(kind, 1 if kind in _HEADS_SECOND and len(shape) == 4 else None)
    if heads is not None and shape[heads] % size_of(mesh, TENSOR) == 0:
        parts[heads] = (TENSOR,)
    if shape:
        parts[0] = batch_axes(mesh, shape[0])
    return P(*parts)


def constrain_cache(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The cache arrays constrained to `cache_spec`; unchanged in a single-device program."""
    if (mesh := target.mesh()) is None:
        return arrays
    return {
        name: jax.lax.with_sharding_constraint(array, NamedSharding(mesh, cache_spec(mesh, name, array.shape)))
        for name, array in arrays.items()
    }


def split_by_rows(array: jax.Array) -> jax.Array:
    """The array sharded only over the batch axes; unchanged in a single-device program."""
    if (mesh := target.mesh()) is None:
        return array
    rows = batch_axes(mesh, array.shape[0])
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(rows, *[None] * (array.ndim - 1))))
