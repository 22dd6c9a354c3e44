"""Rows written where a mask is set, in their order, as torch's `masked_scatter` and `x[mask] = rows` do."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def masked_rows(array: jax.Array, mask: jax.Array, rows: jax.Array) -> jax.Array:
    """`array` with the entries where a mask over its first axes is set replaced by rows, in their order.

    Args:
        array: [*mask, *rest].
        mask: bool.
        rows: [n, *rest], n at least 1. Rows after the last place are left over; places after the last row get that one.
    """
    found = jnp.take(rows, _number_before(mask), axis=0, mode="clip").astype(array.dtype)
    return jnp.where(mask.reshape(*mask.shape, *(1 for _ in rows.shape[1:])), found, array)


def _number_before(mask: jax.Array) -> jax.Array:
    """For each place, how many before it are set, int32.

    Counted axis by axis, and not over all places in one row: padding at the end of an axis then changes no number before it, which
    `hfax.tracing.padding_proof` can see.
    """
    found, counts = jnp.zeros(mask.shape, jnp.int32), mask.astype(jnp.int32)
    for axis in reversed(range(mask.ndim)):
        before = jnp.cumsum(counts, axis=axis) - counts
        found += before.reshape(*before.shape, *(1 for _ in range(mask.ndim - before.ndim)))
        counts = counts.sum(axis=axis)
    return found
