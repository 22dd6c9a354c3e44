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
    """Memory read bandwidth in bytes per second, from a sum; on CPU, the better of a sum and a matrix-vector product.

    The median over half a second, not the best: longer programs see the same fluctuations.
    """
    num_bytes = 1 << 30 if device.platform == "cpu" else 1 << 31
    array = jax.device_put(jnp.ones((num_bytes // 4096, 1024), jnp.float32), device)
    vector = jax.device_put(jnp.ones((1024,), jnp.float32), device)
    calls: list[Callable[[], Any]] = [lambda: total(array)]
    total, product = jax.jit(jnp.sum), jax.jit(lambda a, v: v @ a.T)
    if device.platform == "cpu":
        calls.append(lambda: product(array, vector))
    return num_bytes / min(statistics.median(_seconds(call, _LONG_S / len(calls))) for call in calls)


def matrix_operations(device: jax.Device, dtype: str) -> float:
    """FLOP/s of a large square matmul with float32 accumulation."""
    size = 2048 if device.platform == "cpu" else 8192
    a = jax.device_put(jnp.ones((size, size), jnp.dtype(dtype)), device)
    product = jax.jit(lambda a: jax.lax.dot_general(a, a, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32))
    return 2 * size**3 / min(_seconds(lambda: product(a), _LONG_S))


def _seconds(call: Callable[[], Any], for_s: float) -> list[float]:
    jax.block_until_ready(call())
    seconds: list[float] = []
    while sum(seconds) < for_s:
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return seconds
