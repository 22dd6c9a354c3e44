"""Grouped matrix products of mixtures of experts on NVIDIA GPUs, by Triton kernels that read only matrices of experts with rows.

XLA expands its ragged product on GPU to one product for each expert with all rows (docs/performance.md). Here the rows of each
expert are gathered into tiles, and a program multiplies one tile with a block of its expert's matrix, packed or not.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from hfax.kernels.encodings import BITS, GROUPS, Encoding
from hfax.kernels.expert_tiles import in_tiles
from hfax.kernels.gpu.codes import UNIT, Arrangement, drawn
from hfax.kernels.gpu.quantized import scaled_products
from hfax.kernels.trial import agrees

_FEW, _MANY = 16, 64
"""Rows of a tile, by the average number of rows of an expert."""
_DEPTH, _COLUMNS = 64, 64
_MAX_ELEMENTS = 1 << 31
"""Triton computes addresses within an array from 32-bit integers."""


def fits(x: jax.Array, weight: jax.Array, *, is_transposed: bool = False) -> bool:
    """Whether `grouped_linear` supports these per-device shapes and dtypes."""
    out_features, width = weight.shape[1:] if not is_transposed else weight.shape[:0:-1]
    is_half = x.dtype == weight.dtype and x.dtype in (jnp.bfloat16, jnp.float16)
    return is_half and width % _FEW == 0 and out_features % _FEW == 0 and weight.size < _MAX_ELEMENTS


def fits_packed(x: jax.Array, shape: tuple[int, ...], encoding: Encoding, group: int) -> bool:
    """Whether `grouped_linear_packed` supports rows of this dtype and weights of this shape, [experts, out, in]."""
    is_half = x.dtype in (jnp.bfloat16, jnp.float16)
    is_whole = shape[1] % _FEW == 0 and shape[2] % UNIT == 0
    words = math.prod(shape) // (1 if BITS[encoding] == 8 else 4)
    return is_half and group in GROUPS and is_whole and words < _MAX_ELEMENTS


@functools.cache
def works(encoding: Encoding | None, dtype: Any) -> bool:
    """Whether the kernels give the right values on this process's GPU; tested once, on small matrices.

    Args:
        encoding: of the weights; None: they are not packed.
        dtype: of the activations.
    """
    trial = functools.partial(_trial, encoding, dtype)
    return agrees(
        f"of experts' {encoding or dtype.name} weights", trial, 1e-2, "experts are multiplied by XLA's ragged product"
    )


def _trial(encoding: Encoding | None, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    rng, shape, group = np.random.default_rng(0), (3, 64, 256), 32
    x = jnp.asarray(rng.standard_normal((40, 256)), dtype)
    chosen = jnp.asarray(rng.integers(0, 3, 40), jnp.int32)
    if encoding is None:
        weight = jnp.asarray(rng.standard_normal(shape), dtype)
        got, exact = grouped_linear(x, weight, chosen), np.asarray(weight, np.float64)
    else:
        values, exact = drawn(rng, shape, encoding)
        scale = jnp.asarray(rng.uniform(0.5, 1.0, (3, 64, 256 // group)), dtype)
        got = grouped_linear_packed(x, values, scale, chosen, encoding=encoding)
        exact = exact * np.repeat(np.asarray(scale, np.float64), group, axis=2)
    return np.asarray(got), np.einsum("ri,roi->ro", np.asarray(x, np.float64), exact[np.asarray(chosen)])


@functools.partial(jax.jit, static_argnames=("is_transposed", "interpret"))  # a kernel is traced once per shape
def grouped_linear(
    x: jax.Array, weight: jax.Array, experts: jax.Array, *, is_transposed: bool = False, interpret: bool = False
) -> jax.Array:
    """Multiply each row by the transposed matrix of its expert, for arrays supported according to `fits`.

    Args:
        x: [rows, in_features].
        weight: [experts, out_features, in_features], or [experts, in_features, out_features] if `is_transposed`.
        experts: [rows] int32; rows with an index past the last expert are undefined.
        is_transposed: layout of the weight.
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [rows, out_features] float32.
    """
    width = x.shape[1]
    out_features = weight.shape[2 if is_transposed else 1]
    columns, depth = math.gcd(out_features, _COLUMNS), math.gcd(width, _DEPTH)
    whole = (weight.shape[0], width, columns) if is_transposed else (weight.shape[0], columns, width)
    place = (lambda n, t: (0, 0, n)) if is_transposed else (lambda n, t: (0, n, 0))
    kernel = functools.partial(_multiply_tile, depth=depth, is_transposed=is_transposed)
    return _by_tiles(kernel, x, experts, [weight], [pl.BlockSpec(whole, place)], out_features, columns, interpret)


@functools.partial(jax.jit, static_argnames=("encoding", "interpret"))
def grouped_linear_packed(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    experts: jax.Array,
    *,
    encoding: Encoding,
    interpret: bool = False,
) -> jax.Array:
    """`grouped_linear` with packed weights, for arrays supported according to `fits_packed`.

    Args:
        x: as in `grouped_linear`.
        values: as in `hfax.kernels.quantized.QuantizedArray`, with a leading experts axis.
        scale: [experts, out_features, in_features / group] bfloat16, float16 or float32.
        experts: as in `grouped_linear`.
        encoding: of `values`.
        interpret: run the kernel in interpret mode, for tests.

    Returns:
        [rows, out_features] float32.
    """
    out_features, num_groups = scale.shape[1:]
    arrangement = Arrangement(encoding=encoding, group=x.shape[1] // num_groups)
    columns = math.gcd(out_features, _COLUMNS)
    arranged, *arrays = arrangement.operands(x, values, scale)
    specs = [
        pl.BlockSpec((a.shape[0], columns, *a.shape[2:]), lambda n, t, rest=a.ndim - 2: (0, n, *[0] * rest))
        for a in arrays
    ]
    kernel = functools.partial(_multiply_packed_tile, arrangement=arrangement, interpret=interpret)
    name = f"{encoding}_experts"
    return _by_tiles(kernel, arranged, experts, arrays, specs, out_features, columns, interpret, name)


def _by_tiles(
    kernel: Any,
    x: jax.Array,
    experts: jax.Array,
    weights: list[jax.Array],
    specs: list[pl.BlockSpec],
    out_features: int,
    columns: int,
    interpret: bool,
    name: str = "grouped_linear",
) -> jax.Array:
    """Gather rows into tiles, run the kernel for each tile and block of columns, and put the rows back."""
    rows, num_experts = x.shape[0], weights[0].shape[0]
    height = _FEW if rows <= _FEW * num_experts else _MANY
    count = rows // height + min(rows, num_experts)
    of_tile, used, source, place = in_tiles(experts.astype(jnp.int32), num_experts, height, count)
    rest = x.shape[1:]
    result = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((count * height, out_features), jnp.float32),
        grid=(out_features // columns, count),
        in_specs=[
            pl.BlockSpec((None,), lambda n, t: (t,)),
            pl.BlockSpec((None,), lambda n, t: (0,)),
            pl.BlockSpec((height, *rest), lambda n, t: (t, *[0] * len(rest))),
            *specs,
        ],
        out_specs=pl.BlockSpec((height, columns), lambda n, t: (t, n)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name=name,
    )(of_tile, used, x[source], *weights)
    return result[place]


def _steps(used_ref: Any, steps: int) -> jax.Array:
    """How often to multiply: never for a tile without rows."""
    return (pl.program_id(1) < used_ref[...]).astype(jnp.int32) * steps


def _multiply_tile(
    expert_ref: Any, used_ref: Any, x_ref: Any, weight_ref: Any, out_ref: Any, *, depth: int, is_transposed: bool
) -> None:
    """A tile of rows with a block of its expert's matrix."""
    expert, width = expert_ref[...], x_ref.shape[1]

    def add(step: Any, sums: jax.Array) -> jax.Array:
        part = pl.ds(step * depth, depth)
        if is_transposed:
            return sums + triton.dot(x_ref[:, part], weight_ref[expert, part, :])
        return sums + triton.dot(x_ref[:, part], weight_ref[expert, :, part], trans_b=True)

    out_ref[...] = jax.lax.fori_loop(0, _steps(used_ref, width // depth), add, jnp.zeros(out_ref.shape, jnp.float32))


def _multiply_packed_tile(
    expert_ref: Any,
    used_ref: Any,
    x_ref: Any,
    weight_ref: Any,
    scale_ref: Any,
    out_ref: Any,
    *,
    arrangement: Arrangement,
    interpret: bool,
) -> None:
    """A tile of rows with a block of its expert's packed matrix, a unit at a time."""
    expert, units = expert_ref[...], x_ref.shape[1]

    def add(unit: Any, sums: jax.Array) -> jax.Array:
        return sums + scaled_products(
            lambda plane, part: x_ref[:, unit, plane, part, :],
            lambda part: weight_ref[expert, :, unit, part, :],
            lambda group: scale_ref[expert, :, unit, group],
            arrangement,
            interpret=interpret,
        )

    out_ref[...] = jax.lax.fori_loop(0, _steps(used_ref, units), add, jnp.zeros(out_ref.shape, jnp.float32))
