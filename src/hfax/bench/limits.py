"""What a machine can do at best, measured: reading memory and multiplying matrices, by XLA on the device itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_REPEATS = 5


def read_bandwidth(device: jax.Device) -> float:
    """Bytes a second that the device reads from its memory at best: of a sum, and on CPU of a product with a vector, too."""
    num_bytes = 1 << 28 if device.platform == "cpu" else 1 << 31
    array = jax.device_put(jnp.ones((num_bytes // 4096, 1024), jnp.float32), device)
    vector = jax.device_put(jnp.ones((1024,), jnp.float32), device)
    calls: list[Callable[[], Any]] = [lambda: total(array)]
    total, product = jax.jit(jnp.sum), jax.jit(lambda a, v: v @ a.T)
    if device.platform == "cpu":
        calls.append(lambda: product(array, vector))
    return num_bytes / min(_best(call) for call in calls)


def matrix_operations(device: jax.Device, dtype: str) -> float:
    """Multiplications and additions a second of a large square matrix product, float32 accumulation."""
    size = 2048 if device.platform == "cpu" else 8192
    a = jax.device_put(jnp.ones((size, size), jnp.dtype(dtype)), device)
    product = jax.jit(lambda a: jax.lax.dot_general(a, a, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32))
    return 2 * size**3 / _best(lambda: product(a))


def _best(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)
