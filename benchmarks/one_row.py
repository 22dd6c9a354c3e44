"""Products of one row with a large weight on CPU, by hfax's kernels for each instruction set that the processor has, in turns.

    python benchmarks/one_row.py

Prints milliseconds (the fifth best of 40 turns) and the rate at which the weight is read. The activations are float32 for a
float32 weight, else bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from hfax.kernels.cpu import calls, library
from hfax.kernels.encodings import Encoding

OUT, WIDTH, GROUP = 16384, 2048, 128
TURNS = 40


def _products() -> dict[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...], float]]:
    """By weight: the product, its arguments and the bytes of a number of the weight."""
    rng = np.random.default_rng(0)
    row = jnp.asarray(rng.standard_normal((1, WIDTH), np.float32))
    floats = jnp.asarray(rng.standard_normal((OUT, WIDTH), np.float32))
    int8 = jnp.asarray(rng.integers(-127, 128, (OUT, WIDTH)), jnp.int8)
    int4 = jnp.asarray(rng.integers(0, 256, (OUT, WIDTH // 2)), jnp.uint8)
    scale = jnp.asarray(rng.random((OUT, WIDTH // GROUP)), jnp.bfloat16)
    half = row.astype(jnp.bfloat16)
    out = jnp.dtype(jnp.float32)

    def packed(encoding: Encoding) -> Callable[..., jax.Array]:
        return lambda x, w, s: calls.linear_packed(x, w, s, None, encoding=encoding, out_dtype=out, any_order=True)

    return {
        "float32": (lambda x, w: calls.linear(x, w, out), (row, floats), 4),
        "bfloat16": (lambda x, w: calls.linear(x, w, out), (half, floats.astype(jnp.bfloat16)), 2),
        "int8": (packed("int8"), (half, int8, scale), 1),
        "fp8": (packed("fp8"), (half, floats.astype(jnp.float8_e4m3fn), scale), 1),
        "int4": (packed("int4"), (half, int4, scale), 0.5),
        "fp4": (packed("fp4"), (half, int4, scale), 0.5),
    }


def main() -> None:
    """Print a row for each instruction set."""
    products = _products()
    programs = {}
    for target in library.available_instruction_sets():
        with library.compiled_for(target.name):
            assert library.problem() is None, library.problem()
            for name, (function, arguments, _) in products.items():
                # a function of its own for each, since JAX keeps traces by function
                program = jax.jit(lambda *args, function=function: function(*args))
                programs[target.name, name] = program.lower(*arguments).compile()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in programs}
    for _ in range(TURNS):
        for key, program in programs.items():
            started = time.perf_counter()
            program(*products[key[1]][1]).block_until_ready()
            seconds[key].append(time.perf_counter() - started)
    print("| instruction set | " + " | ".join(products) + " |\n" + "| --- " * (1 + len(products)) + "|")
    for target in library.available_instruction_sets():
        cells = []
        for name, (_, _, size) in products.items():
            found = sorted(seconds[target.name, name])[4]
            cells.append(f"{found * 1e3:.2f} ms, {OUT * WIDTH * size / found / 1e9:.0f} GB/s")
        print(f"| {target.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
