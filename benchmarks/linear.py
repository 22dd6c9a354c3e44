"""Products of bfloat16 rows with a weight on CPU: hfax's kernel beside XLA's product, in turns: `python benchmarks/linear.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.kernels.cpu import calls, library

SHAPES = ((3072, 1024), (1024, 3072), (4096, 4096))
BYTES = 150 << 20
"""Of all weights of a shape together, more than the caches hold."""


def by_kernel(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
    """hfax's C++ kernel."""
    return [calls.linear(x, w, jnp.dtype(jnp.bfloat16))[0, :4] for w in weights]


def by_xla(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
    """XLA's dot with float32 accumulation."""
    dims = (((1,), (1,)), ((), ()))
    return [
        jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32).astype(jnp.bfloat16)[0, :4] for w in weights
    ]


def seconds_of(function: Callable[..., Any], *args: Any) -> float:
    """One run."""
    started = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - started


def main() -> None:
    """Print a table: GFLOP/s, and GB/s of weights, the best of five turns."""
    assert library.problem() is None, library.problem()
    numbers = np.random.default_rng(0)
    print(
        "| out x in | rows | kernel GFLOP/s | XLA GFLOP/s | kernel GB/s of weights |\n| --- | --- | --- | --- | --- |"
    )
    for out, width in SHAPES:
        count = BYTES // (2 * out * width)
        weights = [jnp.asarray(numbers.standard_normal((out, width)), jnp.bfloat16) for _ in range(count)]
        for rows in (1, 2, 8, 16, 32, 128, 512):
            x = jnp.asarray(numbers.standard_normal((rows, width)), jnp.bfloat16)
            functions = [jax.jit(by_kernel), jax.jit(by_xla)]
            for function in functions:
                seconds_of(function, x, weights)
            best = [
                min(times)
                for times in zip(*[[seconds_of(f, x, weights) for f in functions] for _ in range(5)], strict=True)
            ]
            flops, moved = 2 * rows * out * width * count, 2 * out * width * count
            rates = " | ".join(f"{flops / s / 1e9:.0f}" for s in best)
            print(f"| {out} x {width} | {rows} | {rates} | {moved / best[0] / 1e9:.0f} |", flush=True)


if __name__ == "__main__":
    main()
