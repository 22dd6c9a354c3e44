"""A bfloat16 layer's product and its two gradients on CPU, and a prompt's attention and its: `python benchmarks/gradients.py`.

hfax's kernels beside what XLA makes of the same lines of JAX, in turns. The limit is the processor's products of bfloat16 pairs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.kernels.attention import attention, causal_positions
from hfax.kernels.cpu import library
from hfax.kernels.linear import linear
from hfax.kernels.target import compiling_for

SHAPES = ((1024, 640, 1728), (1024, 1728, 640), (1024, 2048, 8192), (1024, 640, 32000))
"""Rows, in and out."""
HEADS = ((4, 10, 256, 64), (1, 16, 2048, 128))
"""Batch, heads, tokens, head_dim."""


def for_x(x: Any, weight: Any, gradient: Any) -> Any:
    """The gradient of a product for its input."""
    return jax.vjp(lambda x: linear(x, weight), x)[1](gradient)


def for_weight(x: Any, weight: Any, gradient: Any) -> Any:
    """The gradient of a product for its weight."""
    return jax.vjp(lambda weight: linear(x, weight), weight)[1](gradient)


def attend(query: Any, key: Any, value: Any) -> Any:
    """A causal text."""
    return attention(query, key, value, causal_positions(query.shape[2], key.shape[2]), scale=0.1)[0]


def all_of_attention(query: Any, key: Any, value: Any, gradient: Any) -> Any:
    """The gradients, for which attention itself is computed first."""
    return jax.vjp(attend, query, key, value)[1](gradient)


def compiled(function: Callable[..., Any], *args: Any, kernels: bool) -> Any:
    """For CPU, with hfax's kernels or as JAX says it."""
    own = jax.jit(lambda *args: function(*args))  # jit keeps traces by the function, and does not know of the target
    with compiling_for("cpu", is_differentiated=True) if kernels else contextlib.nullcontext():
        return own.lower(*args).compile()


def compare(function: Callable[..., Any], args: tuple[Any, ...], operations: float) -> str:
    """GFLOP/s with kernels and without, the best of seven turns."""
    programs = [compiled(function, *args, kernels=kernels) for kernels in (True, False)]
    best = [float("inf")] * 2
    for turn in range(8):
        for i, program in enumerate(programs):
            started = time.perf_counter()
            jax.block_until_ready(program(*args))
            if turn:
                best[i] = min(best[i], time.perf_counter() - started)
    return " | ".join(f"{operations / seconds / 1e9:.0f}" for seconds in best)


def main() -> None:
    """Print a table."""
    assert library.problem() is None, library.problem()
    numbers = np.random.default_rng(0)

    def make(*shape: int) -> jax.Array:
        return jnp.asarray(numbers.standard_normal(shape), jnp.bfloat16)

    print("| | hfax, GFLOP/s | XLA, GFLOP/s |\n| --- | --- | --- |")
    for rows, width, out in SHAPES:
        x, weight, gradient = make(rows, width), make(out, width), make(rows, out)
        operations = 2.0 * rows * width * out
        for name, function, args in (
            ("product", linear, (x, weight)),
            ("gradient for x", for_x, (x, weight, gradient)),
            ("gradient for the weight", for_weight, (x, weight, gradient)),
        ):
            print(f"| {rows} rows, {out} x {width}: {name} | {compare(function, args, operations)} |", flush=True)
    for batch, heads, tokens, width in HEADS:
        args = tuple(make(batch, heads, tokens, width) for _ in range(3))
        operations = 2.0 * batch * heads * tokens * tokens * width  # two products of which half is masked
        name = f"attention, {batch} x {heads} heads x {tokens} tokens x {width}"
        print(f"| {name} | {compare(attend, args, operations)} |", flush=True)
        args = (*args, make(batch, tokens, heads, width))
        print(f"| {name}, and its gradients | {compare(all_of_attention, args, 3.5 * operations)} |", flush=True)


if __name__ == "__main__":
    main()
