"""Matrix products of few rows with 8-bit and 4-bit weights on NVIDIA GPUs, by Triton kernels that read only the codes.

XLA alone writes the dequantized weight to memory first, and reads it again. That pays when many rows share it (`_MAX_ROWS`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from hfax.kernels.encodings import BITS, GROUPS, Encoding
from hfax.kernels.gpu.codes import UNIT, Arrangement, drawn, numbers
from hfax.kernels.gpu.one_row import multiply_row, operands
from hfax.kernels.trial import agrees

_MAX_ROWS = {8: 128, 4: 32}
"""By bits: with more, XLA's product of the dequantized weight was faster on an H200."""
_MIN_DOT_ROWS = 16
"""Rows of x of the smallest matrix product of a GPU's tensor cores."""
_TILE = 2048
"""Words of 32 bits of a single row's tile: 16 for each of 128 threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a product is divided into programs.

    Args:
        columns: rows of the weight that a program multiplies.
        parts: programs that share a block of columns, each with a part of the units; their sums are added up.
        step: units of an iteration, of a product of one row.
        warps: of a program.
        stages: of its loop.
    """

    columns: int
    parts: int = 1
    step: int = 1
    warps: int = 4
    stages: int = 4


def fits(rows: int, shape: tuple[int, ...], encoding: Encoding, group: int) -> bool:
    """Whether the kernel supports this number of rows and a weight of this shape, [out, in], on one device."""
    return (
        0 < rows <= _MAX_ROWS[BITS[encoding]]
        and len(shape) == 2
        and group in GROUPS
        and shape[0] % _MIN_DOT_ROWS == 0
        and shape[1] % UNIT == 0
    )


@functools.cache
def works(encoding: Encoding, dtype: Any) -> bool:
    """Whether the kernels give the right values on this process's GPU; tested once, on small weights.

    Args:
        encoding: of the weights.
        dtype: of the activations.
    """
    trial = functools.partial(_trial, encoding, dtype)
    return agrees(f"of {encoding} weights", trial, 1e-3, "packed weights are dequantized for each product")


def _trial(encoding: Encoding, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    rng, group = np.random.default_rng(0), 32
    values, exact = drawn(rng, (64, 256), encoding)
    scale = jnp.asarray(rng.uniform(0.5, 1.0, (64, 256 // group)), dtype)
    exact = exact * np.repeat(np.asarray(scale, np.float64), group, 1)
    got, expected = [], []
    for rows in (1, 3):
        x = jnp.asarray(rng.standard_normal((rows, 256)), dtype)
        got.append(np.asarray(linear(x, values, scale, encoding=encoding, out_dtype=jnp.float32)).ravel())
        expected.append((np.asarray(x, np.float64) @ exact.T).ravel())
    return np.concatenate(got), np.concatenate(expected)


@functools.partial(
    jax.jit, static_argnames=("encoding", "out_dtype", "interpret", "tiling")
)  # a kernel is traced once per shape
def linear(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    *,
    encoding: Encoding,
    out_dtype: Any,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> jax.Array:
    """`x @ weight.T` with float32 accumulation, for shapes supported according to `fits`.

    The codes' numbers are multiplied exactly; each group's sum is scaled in float32. With one row, activations of 2**64 and more,
    whose squares float32 does not have either, give infinities.

    Args:
        x: [rows, in_features] bfloat16 or float16.
        values: as in `hfax.kernels.quantized.QuantizedArray`.
        scale: [out_features, in_features / group] bfloat16, float16 or float32.
        encoding: of `values`.
        out_dtype: dtype of the result.
        interpret: run the kernel in interpret mode, for tests.
        tiling: how it is divided into programs; None: as `tiling_of` says.

    Returns:
        [rows, out_features].
    """
    rows, width = x.shape
    out_features, units, bits = scale.shape[0], width // UNIT, BITS[encoding]
    group = width // scale.shape[1]
    if not fits(rows, (out_features, width), encoding, group):
        raise ValueError(f"no kernel for {rows} rows and a weight [{out_features}, {width}]; ask `fits` first")
    tiling = tiling or tiling_of(rows, out_features, units, bits)
    columns, parts = tiling.columns, tiling.parts

    def rest(array: jax.Array) -> list[int]:
        return [0] * (array.ndim - 2)

    arrangement = Arrangement(encoding=encoding, group=group)
    how: dict[str, Any] = {"arrangement": arrangement, "interpret": interpret}
    if rows == 1:
        count, (given, words, scales) = 1, operands(x, values, scale, arrangement)
        kernel = functools.partial(multiply_row, dtype=x.dtype, step=tiling.step, **how)
    else:
        count = max(_MIN_DOT_ROWS, 1 << (rows - 1).bit_length())
        padded = jnp.pad(x, ((0, count - rows), (0, 0)))
        given, words, scales = arrangement.operands(padded, values, scale)
        kernel = functools.partial(_multiply_rows, **how)
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts, count, out_features), out_dtype if parts == 1 else jnp.float32),
        grid=(out_features // columns, parts),
        in_specs=[
            pl.BlockSpec((given.shape[0], units // parts, *given.shape[2:]), lambda i, part: (0, part, *rest(given))),
            pl.BlockSpec((columns, units // parts, *words.shape[2:]), lambda i, part: (i, part, *rest(words))),
            pl.BlockSpec((columns, units // parts, *scales.shape[2:]), lambda i, part: (i, part, *rest(scales))),
        ],
        out_specs=pl.BlockSpec((None, count, columns), lambda i, part: (part, 0, i)),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name=f"{encoding}_linear",
    )(given, words, scales)
    return (out[0] if parts == 1 else out.sum(axis=0).astype(out_dtype))[:rows]


def tiling_of(rows: int, out_features: int, units: int, bits: int) -> Tiling:
    """How a product is divided into programs.

    Of several rows, what was fastest on an H200, or within 10% of it; of one row, a tile of few instructions a weight
    (docs/performance.md).
    """
    if rows == 1:
        step = math.gcd(units, 8 if bits == 8 else 16)
        words = step * UNIT * bits // 32
        return Tiling(columns=_divisor(out_features, max(4, _TILE // words)), step=step)
    if bits == 4:
        columns = _divisor(out_features, 64)
        parts = min(8, 1024 * columns // out_features)
    else:
        columns = _divisor(out_features, 64 if out_features >= 64 * 192 else 32)
        parts = min(512 * columns // out_features, units // 16) if units >= 64 else 1
    # shared memory of compute capability 8.9 holds two stages of 128 rows
    warps, stages = (8, 2) if rows > 32 else (4, 4)
    return Tiling(columns=columns, parts=_divisor(units, max(1, parts)), warps=warps, stages=stages)


def _divisor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(math.gcd(size, 1 << 30), 1 << (most.bit_length() - 1))


def _multiply_rows(
    x_ref: Any, weight_ref: Any, scale_ref: Any, out_ref: Any, *, arrangement: Arrangement, interpret: bool
) -> None:
    """Rows of x with a block of the weight's rows, a unit at a time on tensor cores."""
    (count, units), columns = x_ref.shape[:2], weight_ref.shape[0]

    def add(unit: Any, sums: jax.Array) -> jax.Array:
        return sums + scaled_products(
            lambda plane, part: x_ref[:, unit, plane, part, :],
            lambda part: weight_ref[:, unit, part, :],
            lambda group: scale_ref[:, unit, group],
            arrangement,
            interpret=interpret,
        )

    sums = jax.lax.fori_loop(0, units, add, jnp.zeros((count, columns), jnp.float32))
    out_ref[...] = sums.astype(out_ref.dtype)


def scaled_products(
    activations: Callable[[int, int], jax.Array],
    words: Callable[[int], jax.Array],
    scale: Callable[[int], jax.Array],
    arrangement: Arrangement,
    *,
    interpret: bool,
) -> jax.Array:
    """The products of a unit on tensor cores, [rows of x, rows of the weight] float32.

    Args:
        activations: [rows of x, lanes] of a plane and part.
        words: [rows of the weight, lanes] of a part.
        scale: [rows of the weight] of a group.
        arrangement: of the unit.
        interpret: whether the kernel is interpreted.
    """
    total: Any = 0.0
    for part in range(arrangement.parts):
        weight = words(part)
        for group, planes in arrangement.planes_of(part).items():
            products: Any = 0.0
            for plane in planes:
                x = activations(plane, part)
                codes = numbers(weight, plane, arrangement.encoding, x.dtype, interpret=interpret)
                products += triton.dot(x, codes, trans_b=True)
            total += products * scale(group).astype(jnp.float32)[None]
    return total
