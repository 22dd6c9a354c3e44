"""Matrix products with 8-bit and 4-bit weights on TPU, by a Pallas kernel that reads only the integers from HBM.

XLA alone would first write the dequantized weight to memory as float32, and again in another layout (docs/log/tpu-programs.md).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hfax.kernels.encodings import BITS, Encoding
from hfax.kernels.expert_tiles import in_tiles

_LANES = 128
_ROWS = 16
"""Rows of a bfloat16 tile."""
_MAX_ROWS = 1024
_COLUMNS = (512, 256, 128)
"""Weight rows per kernel step: the first that divides the rows, else the first that is smaller; the last step then has fewer
rows."""
_DEPTHS = (2048, 1792, 1536, 1280, 1024, 896, 768, 640, 512, 384, 256)
"""Weight columns per kernel step; with many rows of x at most `_DEPTH_OF_MANY`."""
_MANY, _DEPTH_OF_MANY = 128, 1024


def can_read(encoding: Encoding, group: int) -> bool:
    """Whether the kernels multiply with weights in this format."""
    return group in ((_LANES,) if BITS[encoding] == 8 else (_LANES, 64, 32))


def fits(rows: int, shape: tuple[int, ...], encoding: Encoding, group: int) -> bool:
    """Whether the kernel supports this number of rows and a weight of this shape, [out, in], on one device."""
    can = len(shape) == 2 and rows <= _MAX_ROWS and can_read(encoding, group)
    return can and _tiles(rows, shape, BITS[encoding]) is not None


@functools.partial(jax.jit, static_argnames=("encoding", "out_dtype", "interpret"))  # a kernel is traced once per shape
def linear(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    *,
    encoding: Encoding,
    out_dtype: Any,
    interpret: bool = False,
) -> jax.Array:
    """`x @ weight.T` with float32 accumulation, for shapes supported according to `fits`.

    Args:
        x: [rows, in_features]; multiplied as bfloat16.
        values: as in `hfax.kernels.quantized.QuantizedArray`.
        scale: [out_features, in_features / group] bfloat16 or float32.
        encoding: of `values`.
        out_dtype: dtype of the result.
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [rows, out_features].
    """
    rows, width = x.shape
    out_features, groups = scale.shape
    group, bits = width // groups, BITS[encoding]
    if (tiles := _tiles(rows, (out_features, width), bits)) is None:
        raise ValueError(f"no kernel for {rows} rows and a weight [{out_features}, {width}]; ask `fits` first")
    columns, depth = tiles
    padded = jnp.pad(x.astype(jnp.bfloat16), ((0, -rows % _ROWS), (0, 0)))
    count = padded.shape[0]
    inputs = [padded] if bits == 8 else list(_by_nibbles(padded))
    # one matrix per block of columns, with groups as rows
    scales = scale.T.reshape(width // depth, depth // group, out_features)
    stored = depth * bits // 8
    multiply = _multiplication(encoding, group)
    result = pl.pallas_call(
        functools.partial(_kernel, multiply=multiply),
        grid=(pl.cdiv(out_features, columns), width // depth),
        in_specs=[
            *(pl.BlockSpec((count, each.shape[1] * depth // width), lambda n, k: (0, k)) for each in inputs),
            pl.BlockSpec((columns, stored), lambda n, k: (n, k)),
            pl.BlockSpec((None, depth // group, columns), lambda n, k: (k, 0, n)),
        ],
        out_specs=pl.BlockSpec((count, columns), lambda n, k: (0, n)),
        out_shape=jax.ShapeDtypeStruct((count, out_features), out_dtype),
        scratch_shapes=[pltpu.VMEM((count, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name=f"{encoding}_linear",
    )(*inputs, values, scales)
    return result[:rows]


def fits_experts(shape: tuple[int, ...], encoding: Encoding, group: int) -> bool:
    """Whether `experts_linear` supports matrices of this shape, [experts, out, in]."""
    return len(shape) == 3 and can_read(encoding, group) and _tiles(1, shape[1:], BITS[encoding]) is not None


@functools.partial(jax.jit, static_argnames=("encoding", "interpret"))
def experts_linear(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    experts: jax.Array,
    *,
    encoding: Encoding,
    interpret: bool = False,
) -> jax.Array:
    """Multiply each row by the transposed matrix of its expert; unused matrices are not read.

    The rows of each expert are grouped into tiles, and each tile is multiplied as in `linear`.

    Args:
        x: [rows, in_features]; multiplied as bfloat16.
        values: as in `linear`, with a leading experts axis.
        scale: as in `linear`, with a leading experts axis.
        experts: [rows] int32; rows with an index past the last expert are undefined.
        encoding: of `values`.
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [rows, out_features] float32.
    """
    rows, width = x.shape
    num_experts, out_features, groups = scale.shape
    group, bits = width // groups, BITS[encoding]
    if (tiles := _tiles(1, (out_features, width), bits)) is None:
        raise ValueError(f"no kernel for matrices [{out_features}, {width}]; ask `fits_experts` first")
    columns, depth = tiles
    height = _ROWS if rows <= _ROWS * num_experts else _MANY
    count = rows // height + min(rows, num_experts)
    of_tile, used, source, place = in_tiles(experts.astype(jnp.int32), num_experts, height, count)
    padded = x.astype(jnp.bfloat16)[source]
    inputs = [padded] if bits == 8 else list(_by_nibbles(padded))
    scales = scale.swapaxes(1, 2).reshape(num_experts, width // depth, depth // group, out_features)
    multiply = _multiplication(encoding, group)
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        # tiles before weight columns: if the columns fit a step, data shared by the tiles of an expert is read once
        grid=(pl.cdiv(out_features, columns), count, width // depth),
        in_specs=[
            *(pl.BlockSpec((height, a.shape[1] * depth // width), lambda n, t, k, e, u: (t, k)) for a in inputs),
            pl.BlockSpec((None, columns, depth * bits // 8), lambda n, t, k, e, u: (e[t], n, k)),
            pl.BlockSpec((None, None, depth // group, columns), lambda n, t, k, e, u: (e[t], k, 0, n)),
        ],
        out_specs=pl.BlockSpec((height, columns), lambda n, t, k, e, u: (t, n)),
        scratch_shapes=[pltpu.VMEM((height, columns), jnp.float32)],
    )
    result = pl.pallas_call(
        functools.partial(_experts_kernel, multiply=multiply),
        grid_spec=specs,
        out_shape=jax.ShapeDtypeStruct((count * height, out_features), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name=f"{encoding}_experts",
    )(of_tile, used, *inputs, values, scales)
    return result[place]


def _tiles(rows: int, shape: tuple[int, ...], bits: int) -> tuple[int, int] | None:
    """Weight rows and columns per step; the columns fill whole lanes with bytes, and therefore whole groups."""
    out_features, width = shape
    fewer = (n for n in _COLUMNS if n < out_features)
    columns = next((n for n in _COLUMNS if out_features % n == 0), next(fewer, None))
    most = _DEPTH_OF_MANY if rows > _MANY else width
    depth = next((n for n in _DEPTHS if n <= most and width % n == 0 and n * bits % (8 * _LANES) == 0), None)
    return None if columns is None or depth is None else (columns, depth)


def _by_nibbles(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The columns of x in the byte order of a 4-bit weight: for the low and the high nibbles, [rows, in / 2] each."""
    parts = x.reshape(x.shape[0], -1, 4, 32)
    lower = jnp.stack([parts[:, :, 0], parts[:, :, 2]], axis=-1)
    upper = jnp.stack([parts[:, :, 1], parts[:, :, 3]], axis=-1)
    return lower.reshape(x.shape[0], -1), upper.reshape(x.shape[0], -1)


def _kernel(*refs: Any, multiply: Any) -> None:
    *inputs, weight, scale, out, total = refs

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += multiply(*inputs, weight, scale)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def _experts_kernel(of_tile: Any, used: Any, *refs: Any, multiply: Any) -> None:
    *inputs, weight, scale, out, total = refs
    is_first = pl.program_id(2) == 0

    @pl.when(pl.program_id(1) < used[0])
    def _() -> None:
        sums = multiply(*inputs, weight, scale)
        total[...] = jnp.where(is_first, sums, total[...] + sums)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def _multiplication(encoding: Encoding, group: int) -> Any:
    if BITS[encoding] == 8:
        return functools.partial(_multiply_bytes, group=group)
    return functools.partial(
        _multiply_nibbles, group=group, number=_number_of_fp4 if encoding == "fp4" else _number_of_int4
    )


def _multiply_bytes(x: Any, weight: Any, scale: Any, *, group: int) -> jax.Array:
    total = 0.0
    for g in range(scale.shape[0]):
        here = slice(g * group, (g + 1) * group)
        numbers = weight[:, here].astype(jnp.bfloat16)
        total = total + _dot(x[:, here], numbers) * scale[g : g + 1, :].astype(jnp.float32)
    return jnp.asarray(total)


def _multiply_nibbles(lower: Any, upper: Any, weight: Any, scale: Any, *, group: int, number: Any) -> jax.Array:
    """128 bytes hold two words' columns, one in each half of the lanes; even bytes have planes 0 and 1, odd ones 2 and 3.

    Lanes that belong to different groups are multiplied apart, each with its group's scale.
    """
    rows, groups, total = lower.shape[0], 2 * _LANES // group, 0.0
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    half, count = (lane >= _LANES // 2).astype(jnp.int32), 2 if group == _LANES else 4
    part = half if count == 2 else 2 * half + (lane & 1)
    for pair in range(scale.shape[0] // groups):
        here = slice(pair * _LANES, (pair + 1) * _LANES)
        stored = weight[:, here].astype(jnp.int32)
        sums = []
        for x, nibbles in ((lower, stored & 15), (upper, stored >> 4)):
            each = x[:, here].astype(jnp.float32)
            parts = jnp.concatenate([jnp.where(part == p, each, 0.0) for p in range(count)])
            sums.append(_dot(parts.astype(jnp.bfloat16), number(nibbles).astype(jnp.float32).astype(jnp.bfloat16)))
        scales = scale[groups * pair : groups * (pair + 1), :].astype(jnp.float32)
        for p in range(count):
            own = slice(p * rows, (p + 1) * rows)
            if group == 32:  # a plane each
                first = 4 * (p // 2) + 2 * (p % 2)
                total = total + sums[0][own] * scales[first : first + 1] + sums[1][own] * scales[first + 1 : first + 2]
            else:
                total = total + (sums[0][own] + sums[1][own]) * scales[p : p + 1]
    return jnp.asarray(total)


def _number_of_int4(nibbles: jax.Array) -> jax.Array:
    return nibbles - 8


def _number_of_fp4(nibbles: jax.Array) -> jax.Array:
    """By arithmetic, since a kernel has no tables: twice the sizes are 0, 1, 2, 3, 4, 6, 8 and 12."""
    size = nibbles & 7
    twice = size + jnp.maximum(size - 4, 0) + 2 * jnp.maximum(size - 6, 0)
    return jnp.where(nibbles < 8, twice, -twice).astype(jnp.float32) * 0.5


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    contract = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, jax.lax.Precision.DEFAULT, jnp.float32)
