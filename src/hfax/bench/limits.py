"""Measured machine limits: memory read bandwidth and matmul throughput, through XLA on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_LONG_S = 0.6


def read_bandwidth(device: jax.Device) -> float:
    """Memory read bandwidth in bytes per second: the better of a sum and a matrix-vector product.

    The median over half a second, not the best: longer programs see the same fluctuations.
    """
    num_bytes = 1 << (30 if device.platform == "cpu" else 32)
    array = jax.device_put(jnp.ones((num_bytes // 4096, 1024), jnp.float32), device)
    vector = jax.device_put(jnp.ones((1024,), jnp.float32), device)
    total, product = jax.jit(jnp.sum), jax.jit(lambda a, v: v @ a.T)
    calls: list[Callable[[], Any]] = [lambda: total(array), lambda: product(array, vector)]
    return num_bytes / min(statistics.median(_seconds(call, _LONG_S / len(calls))) for call in calls)


def matrix_operations(device: jax.Device, dtype: str) -> float:
    """FLOP/s of a large square matmul of random numbers with float32 accumulation; of zeros or ones a GPU multiplies more."""
    size = 2048 if device.platform == "cpu" else 8192
    a = jax.device_put(jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype)), device)
    # XLA's CPU compiler is fast only with float32 results, its GPU compiler with those that are written once
    dtype_out = jnp.float32 if device.platform == "cpu" else a.dtype
    product = jax.jit(lambda a: jax.lax.dot_general(a, a, (((1,), (1,)), ((), ())), preferred_element_type=dtype_out))
    return 2 * size**3 / min(_seconds(lambda: product(a), _LONG_S))


def _seconds(call: Callable[[], Any], for_s: float) -> list[float]:
    jax.block_until_ready(call())
    seconds: list[float] = []
    while sum(seconds) < for_s:
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return seconds
