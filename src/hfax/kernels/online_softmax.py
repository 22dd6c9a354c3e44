"""Softmax-weighted sums of values in one pass over blocks of keys (Milakov and Gimelshein, arXiv:1805.02867)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

_MASKED = -1e30


class OnlineSoftmax(NamedTuple):
    """The state of the pass, float32.

    Args:
        total: [..., rows, width], the weighted sum of values so far, scaled by exp(-top).
        weight: [..., rows, 1], the sum of weights so far, scaled likewise.
        top: [..., rows, 1], the largest score so far.
    """

    total: jax.Array
    weight: jax.Array
    top: jax.Array


def start(shape: tuple[int, ...], width: int, sinks: jax.Array | None = None) -> OnlineSoftmax:
    """The state before the first block.

    Args:
        shape: [..., rows] of the scores.
        width: of the values.
        sinks: a logit per row that takes probability and has no value, broadcast to [..., rows, 1]; None: there is none.
    """
    top = jnp.full((*shape, 1), _MASKED, jnp.float32)
    weight = jnp.zeros((*shape, 1), jnp.float32)
    if sinks is not None:
        top, weight = jnp.broadcast_to(sinks.astype(jnp.float32), top.shape), weight + 1.0
    return OnlineSoftmax(jnp.zeros((*shape, width), jnp.float32), weight, top)


def add(
    state: OnlineSoftmax, scores: jax.Array, seen: jax.Array, weighted: Callable[[jax.Array], jax.Array]
) -> OnlineSoftmax:
    """The state after another block of keys.

    Args:
        state: before it.
        scores: [..., rows, keys] float32.
        seen: bool, broadcast to the scores; keys that are not seen have no weight.
        weighted: from weights, [..., rows, keys], to the weighted sum of the block's values, [..., rows, width] float32.
    """
    scores = jnp.where(seen, scores, _MASKED)
    highest = jnp.maximum(state.top, scores.max(axis=-1, keepdims=True))
    shrink = jnp.exp(state.top - highest)
    share = jnp.where(seen, jnp.exp(scores - highest), 0.0)
    total = state.total * shrink + weighted(share)
    return OnlineSoftmax(total, state.weight * shrink + share.sum(axis=-1, keepdims=True), highest)


def finish(state: OnlineSoftmax) -> jax.Array:
    """[..., rows, width] float32: the weighted means; 0 for rows that have seen nothing."""
    return state.total / jnp.where(state.weight == 0, 1.0, state.weight)
