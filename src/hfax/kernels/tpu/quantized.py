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

from hfax.kernels import target
from hfax.kernels.encodings import BITS, GROUPS, Encoding
from hfax.kernels.expert_tiles import in_tiles
from hfax.kernels.tpu.products import LANES, Abilities, Product, Way, abilities_of, way_of

_MAX_ROWS = 1024
"""Rows of x that are multiplied at once."""
_COLUMNS = (512, 256, 128)
"""Weight rows per kernel step: the first that divides the rows, else the first that is smaller; the last step then has fewer
rows."""
_DEPTHS = (2048, 1792, 1536, 1280, 1024, 896, 768, 640, 512, 384, 256)
"""Weight columns per kernel step; with many rows of x at most `_DEPTH_OF_MANY`."""
_FEW, _MANY = 8, 128
"""Rows of a tile of an expert's rows."""
_DEPTH_OF_MANY = 1024


def fits(rows: int, shape: tuple[int, ...], encoding: Encoding, group: int) -> bool:
    """Whether the kernel supports this number of rows and a weight of this shape, [out, in], on one device."""
    can = len(shape) == 2 and group in GROUPS
    return can and _tiles(rows, shape, BITS[encoding]) is not None


def linear(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    *,
    encoding: Encoding,
    out_dtype: Any,
    way: Way | None = None,
    chip: Abilities | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`x @ weight.T` with float32 accumulation, for shapes supported according to `fits`.

    Args:
        x: [rows, in_features]; multiplied as bfloat16.
        values: as in `hfax.kernels.quantized.QuantizedArray`.
        scale: [out_features, in_features / group] bfloat16 or float32.
        encoding: of `values`.
        out_dtype: dtype of the result.
        way: how codes are multiplied; None: the fastest on the chip.
        chip: None: the target's.
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [rows, out_features].
    """
    chip = chip or _chip()
    way = way or way_of(x.shape[0], encoding, x.shape[1] // scale.shape[1], chip)
    how: dict[str, Any] = {"encoding": encoding, "way": way, "chip": chip, "interpret": interpret}
    return _linear(x, values, scale, out_dtype=out_dtype, **how)


@functools.partial(
    jax.jit, static_argnames=("out_dtype", "encoding", "way", "chip", "interpret")
)  # traced once per shape
def _linear(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    *,
    out_dtype: Any,
    encoding: Encoding,
    way: Way,
    chip: Abilities,
    interpret: bool,
) -> jax.Array:
    rows, width = x.shape
    out_features, groups = scale.shape
    group, bits = width // groups, BITS[encoding]
    if (tiles := _tiles(rows, (out_features, width), bits)) is None:
        raise ValueError(f"no kernel for {rows} rows and a weight [{out_features}, {width}]; ask `fits` first")
    columns, depth = tiles
    blocks = pl.cdiv(rows, _MAX_ROWS)
    product = Product(way=way, encoding=encoding, group=group, rows=pl.cdiv(rows, blocks), depth=depth, chip=chip)
    count = product.height
    given = jnp.pad(x.astype(jnp.bfloat16), ((0, blocks * count - rows), (0, 0)))
    (given,), factor = product.operand(given[None])
    # one matrix per block of columns, with groups as rows
    scales = scale.T.reshape(width // depth, depth // group, out_features)
    result = pl.pallas_call(
        functools.partial(_kernel, product=product),
        grid=(blocks, pl.cdiv(out_features, columns), width // depth),
        in_specs=[
            pl.BlockSpec((given.shape[0] // blocks, depth), lambda m, n, k: (m, k)),
            pl.BlockSpec((columns, depth * bits // 8), lambda m, n, k: (n, k)),
            pl.BlockSpec((None, depth // group, columns), lambda m, n, k: (k, 0, n)),
        ],
        out_specs=pl.BlockSpec((count, columns), lambda m, n, k: (m, n)),
        out_shape=jax.ShapeDtypeStruct((blocks * count, out_features), out_dtype if factor is None else jnp.float32),
        scratch_shapes=[pltpu.VMEM((product.sums_height, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "parallel", "arbitrary")),
        interpret=interpret,
        name=f"{encoding}_linear",
    )(given, values, scales)
    return (result if factor is None else result * factor[0])[:rows].astype(out_dtype)


def fits_experts(shape: tuple[int, ...], encoding: Encoding, group: int) -> bool:
    """Whether `experts_linear` supports matrices of this shape, [experts, out, in]."""
    return len(shape) == 3 and group in GROUPS and _tiles(1, shape[1:], BITS[encoding]) is not None


def experts_linear(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    experts: jax.Array,
    *,
    encoding: Encoding,
    way: Way | None = None,
    chip: Abilities | None = None,
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
        way: as in `linear`.
        chip: as in `linear`.
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [rows, out_features] float32.
    """
    height = _height(x.shape[0], scale.shape[0])
    chip = chip or _chip()
    way = way or way_of(height, encoding, x.shape[1] // scale.shape[2], chip)
    how: dict[str, Any] = {"encoding": encoding, "way": way, "chip": chip, "interpret": interpret}
    return _experts_linear(x, values, scale, experts, height=height, **how)


@functools.partial(jax.jit, static_argnames=("height", "encoding", "way", "chip", "interpret"))
def _experts_linear(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    experts: jax.Array,
    *,
    height: int,
    encoding: Encoding,
    way: Way,
    chip: Abilities,
    interpret: bool,
) -> jax.Array:
    rows, width = x.shape
    num_experts, out_features, groups = scale.shape
    group, bits = width // groups, BITS[encoding]
    if (tiles := _tiles(1, (out_features, width), bits)) is None:
        raise ValueError(f"no kernel for matrices [{out_features}, {width}]; ask `fits_experts` first")
    columns, depth = tiles
    product = Product(way=way, encoding=encoding, group=group, rows=height, depth=depth, chip=chip)
    height = product.height
    count = rows // height + min(rows, num_experts)
    of_tile, used, source, place = in_tiles(experts.astype(jnp.int32), num_experts, height, count)
    given, factor = product.operand(x.astype(jnp.bfloat16)[source].reshape(count, height, width))
    scales = scale.swapaxes(1, 2).reshape(num_experts, width // depth, depth // group, out_features)
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        # tiles before weight columns: if the columns fit a step, data shared by the tiles of an expert is read once
        grid=(pl.cdiv(out_features, columns), count, width // depth),
        in_specs=[
            pl.BlockSpec((None, given.shape[1], depth), lambda n, t, k, e, u: (t, 0, k)),
            pl.BlockSpec((None, columns, depth * bits // 8), lambda n, t, k, e, u: (e[t], n, k)),
            pl.BlockSpec((None, None, depth // group, columns), lambda n, t, k, e, u: (e[t], k, 0, n)),
        ],
        out_specs=pl.BlockSpec((None, height, columns), lambda n, t, k, e, u: (t, 0, n)),
        scratch_shapes=[pltpu.VMEM((product.sums_height, columns), jnp.float32)],
    )
    result = pl.pallas_call(
        functools.partial(_experts_kernel, product=product),
        grid_spec=specs,
        out_shape=jax.ShapeDtypeStruct((count, height, out_features), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name=f"{encoding}_experts",
    )(of_tile, used, given, values, scales)
    return (result if factor is None else result * factor).reshape(-1, out_features)[place]


def _height(rows: int, num_experts: int) -> int:
    """Rows of a tile of an expert's rows."""
    return _FEW if rows <= 2 * _FEW * num_experts else _MANY


def _chip() -> Abilities:
    """The chip that the current trace's program is for."""
    aim = target.current()
    return abilities_of("" if aim is None or aim.device is None else aim.device.device_kind)


def _tiles(rows: int, shape: tuple[int, ...], bits: int) -> tuple[int, int] | None:
    """Weight rows and columns per step; the columns fill whole lanes with bytes, and therefore whole groups."""
    out_features, width = shape
    fewer = (n for n in _COLUMNS if n < out_features)
    columns = next((n for n in _COLUMNS if out_features % n == 0), next(fewer, None))
    most = _DEPTH_OF_MANY if rows > _MANY else width
    depth = next((n for n in _DEPTHS if n <= most and width % n == 0 and n * bits % (8 * LANES) == 0), None)
    return None if columns is None or depth is None else (columns, depth)


def _kernel(x: Any, weight: Any, scale: Any, out: Any, total: Any, *, product: Product) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += product.sums(x, weight, scale)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        out[...] = product.finish(total[...]).astype(out.dtype)


def _experts_kernel(
    of_tile: Any, used: Any, x: Any, weight: Any, scale: Any, out: Any, total: Any, *, product: Product
) -> None:
    is_first = pl.program_id(2) == 0

    @pl.when(pl.program_id(1) < used[0])
    def _() -> None:
        sums = product.sums(x, weight, scale)
        total[...] = jnp.where(is_first, sums, total[...] + sums)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        out[...] = product.finish(total[...]).astype(out.dtype)
