"""Matrix products of few rows with 8-bit and 4-bit weights on NVIDIA GPUs, by Triton kernels that read only the integers.

XLA alone writes the dequantized weight to memory first, and reads it again. That pays when many rows share it (`_MAX_ROWS`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from hfax.kernels.encodings import BITS, Encoding
from hfax.kernels.gpu.trial import agrees

GROUP = 128
"""Columns of a step: those that share a scale or, of 4-bit weights, words."""
_MAX_ROWS = {8: 128, 4: 32}
"""By bits: with more, XLA's product of the dequantized weight was faster on an H200."""
_MIN_DOT_ROWS = 16
"""Rows of x of the smallest matrix product of a GPU's tensor cores."""
_TILE = 4096
"""Elements of a single row's tile of products: 32 for each of 128 threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a product is divided into programs.

    Args:
        columns: rows of the weight that a program multiplies.
        parts: programs that share a block of columns, each with a part of the groups; their sums are added up.
        step: groups of an iteration, of a product of one row.
        warps: of a program.
        stages: of its loop.
    """

    columns: int
    parts: int = 1
    step: int = 1
    warps: int = 4
    stages: int = 4


def can_read(encoding: Encoding, group: int) -> bool:
    """Whether the kernels multiply with weights in this format."""
    return (encoding == "int8" and group == GROUP) or (encoding == "int4" and group in (GROUP, 64, 32))


def fits(rows: int, shape: tuple[int, ...], encoding: Encoding, group: int) -> bool:
    """Whether the kernel supports this number of rows and a weight of this shape, [out, in], on one device."""
    return (
        0 < rows <= _MAX_ROWS[BITS[encoding]]
        and len(shape) == 2
        and can_read(encoding, group)
        and shape[0] % _MIN_DOT_ROWS == 0
        and shape[1] % GROUP == 0
    )


@functools.cache
def works() -> bool:
    """Whether the kernels give the right values on this process's GPU; tested once, on small weights."""
    return agrees("of packed weights", _trial, 1e-3, "packed weights are dequantized for each product")


def _trial() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    scale = jnp.asarray(rng.uniform(0.5, 1.0, (64, 2)), jnp.bfloat16)
    got, expected = [], []
    for bits, rows in ((8, 1), (8, 3), (4, 1), (4, 3)):
        x = jnp.asarray(rng.standard_normal((rows, 256)), jnp.bfloat16)
        values = jnp.asarray(rng.integers(0, 255, (64, 32 * bits)), jnp.uint8)
        values = values.astype(jnp.int8) if bits == 8 else values
        numbers = np.asarray(unpacked(values, bits), np.float64) * np.repeat(np.asarray(scale, np.float64), 128, 1)
        got.append(
            np.asarray(
                linear(x, values, scale, encoding="int8" if bits == 8 else "int4", out_dtype=jnp.float32)
            ).ravel()
        )
        expected.append((np.asarray(x, np.float64) @ numbers.T).ravel())
    return np.concatenate(got), np.concatenate(expected)


def unpacked(values: jax.Array, bits: int) -> jax.Array:
    """[out, in] int8 from [out, in] int8, or from words as in `as_words`."""
    if bits == 8:
        return values
    words = as_words(values)
    planes = [(words >> (4 * plane)) & 15 for plane in range(4)]
    return (jnp.concatenate(planes, axis=-1).astype(jnp.int8) - 8).reshape(values.shape[0], -1)


def as_words(values: jax.Array) -> jax.Array:
    """[out, groups, 32] uint16 of 4-bit weights: word i of a group holds its columns i, 32 + i, 64 + i and 96 + i."""
    pairs = values.reshape(values.shape[0], -1, 32, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint16)


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

    Integers are multiplied exactly; each group's sum is scaled in float32.

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
    out_features, groups, bits = scale.shape[0], width // GROUP, BITS[encoding]
    if not fits(rows, (out_features, width), encoding, width // scale.shape[1]):
        raise ValueError(f"no kernel for {rows} rows and a weight [{out_features}, {width}]; ask `fits` first")
    planes = 1 if bits == 8 else 4
    weight = values.reshape(out_features, groups, GROUP) if bits == 8 else as_words(values)
    lanes = GROUP // planes
    tiling = tiling or tiling_of(rows, out_features, groups, bits)
    count = 1 if rows == 1 else max(_MIN_DOT_ROWS, 1 << (rows - 1).bit_length())
    multiply = functools.partial(_multiply_row, step=tiling.step) if rows == 1 else _multiply_rows
    x = jnp.pad(x, ((0, count - rows), (0, 0))).reshape(count, groups, planes, lanes)
    scale = scale.reshape(out_features, groups, -1)
    columns, parts = tiling.columns, tiling.parts
    out = pl.pallas_call(
        functools.partial(multiply, planes=planes),
        out_shape=jax.ShapeDtypeStruct((parts, count, out_features), out_dtype if parts == 1 else jnp.float32),
        grid=(out_features // columns, parts),
        in_specs=[
            pl.BlockSpec((count, groups // parts, planes, lanes), lambda i, part: (0, part, 0, 0)),
            pl.BlockSpec((columns, groups // parts, lanes), lambda i, part: (i, part, 0)),
            pl.BlockSpec((columns, groups // parts, scale.shape[2]), lambda i, part: (i, part, 0)),
        ],
        out_specs=pl.BlockSpec((None, count, columns), lambda i, part: (part, 0, i)),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name=f"{encoding}_linear",
    )(x, weight, scale)
    return (out[0] if parts == 1 else out.sum(axis=0).astype(out_dtype))[:rows]


def tiling_of(rows: int, out_features: int, groups: int, bits: int) -> Tiling:
    """How a product is divided into programs: what was fastest on an H200, or within 10% of it (docs/performance.md)."""
    lanes = GROUP if bits == 8 else GROUP // 4
    if rows == 1:
        step = math.gcd(groups, 8 if bits == 8 else 16)
        return Tiling(columns=_divisor(out_features, max(4, _TILE // (step * lanes))), step=step)
    if bits == 4:
        columns = _divisor(out_features, 64)
        parts = min(8, 1024 * columns // out_features)
    else:
        columns = _divisor(out_features, 64 if out_features >= 64 * 192 else 32)
        parts = min(512 * columns // out_features, groups // 16) if groups >= 64 else 1
    # shared memory of compute capability 8.9 holds two stages of 128 rows
    warps, stages = (8, 2) if rows > 32 else (4, 4)
    return Tiling(columns=columns, parts=_divisor(groups, max(1, parts)), warps=warps, stages=stages)


def _divisor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(math.gcd(size, 1 << 30), 1 << (most.bit_length() - 1))


def plane_of(weight: jax.Array, plane: int, planes: int) -> jax.Array:
    """The signed integers of one plane of words; of 8-bit weights, which have one plane, the weights."""
    if planes == 1:
        return weight
    return ((weight >> (4 * plane)) & 15).astype(jnp.int32) - 8


def _multiply_row(x_ref: Any, weight_ref: Any, scale_ref: Any, out_ref: Any, *, planes: int, step: int) -> None:
    """One row of x with a block of the weight's rows, in tiles of [weight rows, groups, lanes]."""
    (columns, groups, _), own = weight_ref.shape, scale_ref.shape[2]

    def add(index: Any, sums: jax.Array) -> jax.Array:
        part = pl.ds(index * step, step)
        weight = weight_ref[:, part, :]
        for scale in range(own):
            products = [
                _as_float32(weight, plane, planes) * x_ref[0, part, plane, :].astype(jnp.float32)[None]
                for plane in range(scale * planes // own, (scale + 1) * planes // own)
            ]
            total = functools.reduce(operator.add, products)
            sums += total.sum(axis=2) * scale_ref[:, part, scale].astype(jnp.float32)
        return sums

    sums = jax.lax.fori_loop(0, groups // step, add, jnp.zeros((columns, step), jnp.float32))
    out_ref[0, :] = sums.sum(axis=1).astype(out_ref.dtype)


def _as_float32(weight: jax.Array, plane: int, planes: int) -> jax.Array:
    """`plane_of` in float32. An 8-bit integer becomes the low bits of a float32 of 2**23, since GPUs convert slowly."""
    if planes > 1:
        return plane_of(weight, plane, planes).astype(jnp.float32)
    unsigned = (weight.astype(jnp.int32) ^ 0x80) & 0xFF
    return jax.lax.bitcast_convert_type(unsigned | 0x4B000000, jnp.float32) - (2.0**23 + 128)


def _multiply_rows(x_ref: Any, weight_ref: Any, scale_ref: Any, out_ref: Any, *, planes: int) -> None:
    """Rows of x with a block of the weight's rows, a group at a time on tensor cores."""
    count, (columns, groups, _) = x_ref.shape[0], weight_ref.shape

    def add(group: Any, sums: jax.Array) -> jax.Array:
        weight, own = weight_ref[:, group, :], scale_ref.shape[2]
        for scale in range(own):
            part = jnp.zeros((count, columns), jnp.float32)
            for plane in range(scale * planes // own, (scale + 1) * planes // own):
                numbers = plane_of(weight, plane, planes).astype(x_ref.dtype)
                part += triton.dot(x_ref[:, group, plane, :], numbers, trans_b=True)
            sums += part * scale_ref[:, group, scale].astype(jnp.float32)[None]
        return sums

    sums = jax.lax.fori_loop(0, groups, add, jnp.zeros((count, columns), jnp.float32))
    out_ref[...] = sums.astype(out_ref.dtype)
