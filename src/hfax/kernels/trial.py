"""Trial runs of Pallas kernels on the GPU or TPU at hand, before programs rely on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

logger = logging.getLogger(__name__)


def agrees(kernel: str, run: Callable[[], tuple[np.ndarray, np.ndarray]], tolerance: float, fallback: str) -> bool:
    """Whether a kernel gives the expected values on this process's device; otherwise logs a warning.

    Args:
        kernel: its name, for the warning.
        run: runs it on small arrays; returns the result and the expected one. May be called while tracing.
        tolerance: of the difference, relative to the largest expected value.
        fallback: what is done without the kernel, for the warning.
    """
    with ThreadPoolExecutor(1) as other:  # a trace's own thread does not execute
        problem = other.submit(_problem, run, tolerance).result()
    if problem is not None:
        logger.warning("%s: the Pallas kernel %s %s", fallback, kernel, problem)
    return problem is None


def _problem(run: Callable[[], tuple[np.ndarray, np.ndarray]], tolerance: float) -> str | None:
    try:
        got, expected = run()
    except Exception as error:  # compiler errors have no common class
        return f"does not work here ({str(error).partition(chr(10))[0]})"
    is_right = bool(np.abs(got.astype(np.float64) - expected).max() <= tolerance * np.abs(expected).max())
    return None if is_right else "gives different values than XLA here"


def drawn(queries: int, keys: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random queries, [2, 4, queries, 64], keys and values, [2, 2, keys, 64], for trials of attention."""
    draw = np.random.default_rng(0).standard_normal
    query, key, value = (jnp.asarray(draw((2, n, m, 64)), dtype) for n, m in ((4, queries), (2, keys), (2, keys)))
    return query, key, value


def expected_by_xla(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> np.ndarray:
    """[batch, queries, heads, head_dim], by XLA in float32; 0 where a row of the mask, [batch, 1, queries, keys], is false."""
    keys, values = (jnp.repeat(array, 2, axis=1).astype(jnp.float32) for array in (key, value))
    scores = jnp.einsum("bhqd,bhkd->bhqk", query.astype(jnp.float32), keys) * 0.125
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e30)) * mask.any(axis=3, keepdims=True)
    return np.asarray(jnp.einsum("bhqk,bhkd->bqhd", shares, values))
