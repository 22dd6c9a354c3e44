"""Norms and rotary embeddings on CPU: hfax's kernels beside the operations of Llama's own code, compiled by XLA, in turns.

    python benchmarks/norms.py

Prints microseconds for each shape (the 20th percentile of 60 turns) and the ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.kernels import norms
from hfax.kernels.target import compiling_for

TURNS = 60


def _llamas_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return weight * wide.astype(x.dtype)


def _llamas_rotation(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    low, high = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate((-high, low), -1) * sin


def _compare(name: str, kernel: Callable[..., Any], plain: Callable[..., Any], *args: jax.Array) -> None:
    with compiling_for("cpu"):
        subjects = [jax.jit(f).lower(*args).compile() for f in (kernel, plain)]
    seconds: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for times, subject in zip(seconds, subjects, strict=True):
            started = time.perf_counter()
            subject(*args).block_until_ready()
            times.append(time.perf_counter() - started)
    own, theirs = (np.percentile(times, 20) * 1e6 for times in seconds)
    print(f"{name:40} {own:6.0f} us, XLA {theirs:6.0f} us, {theirs / own:.2f} times", flush=True)


def main() -> None:
    """Compare every shape."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    for dtype in ("bfloat16", "float32"):
        for shape in ((1, 1024), (64, 1024), (128, 1024), (512, 1024), (512, 2048), (2048, 1024)):
            args = normal(*shape, dtype=dtype), normal(shape[1], dtype=dtype)
            _compare(f"norm {dtype} {shape}", lambda x, w: norms.rms_norm(x, w, 1e-6), _llamas_norm, *args)
        for heads, length, dim in ((16, 1, 128), (16, 128, 128), (16, 512, 128), (8, 512, 128)):
            x, angle = normal(1, heads, length, dim, dtype=dtype), normal(1, 1, length, dim, dtype=dtype)
            _compare(f"rotation {dtype} {(heads, length, dim)}", norms.rotate, _llamas_rotation, x, angle, angle)


if __name__ == "__main__":
    main()
