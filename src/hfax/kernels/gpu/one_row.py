"""The product of one row of activations with packed weights, without tensor cores.

The instructions for each weight decide whether the product waits for memory, so that codes are taken from words of 32 bits and
multiplied where they are: a word's sum first, then the word's scale (`benchmarks/gpu_schedules.py` counts).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from hfax.kernels.gpu.codes import LIFT, UNIT, Arrangement, as_float32, bias_of, exponent_of, number_bits


def operands(
    x: jax.Array, values: jax.Array, scale: jax.Array, arrangement: Arrangement
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The arrays as the kernel reads them.

    Args:
        x: [1, columns] bfloat16 or float16.
        values: as in `hfax.kernels.quantized.QuantizedArray`, [out_features, stored columns].
        scale: [out_features, groups].
        arrangement: of the codes.

    Returns:
        pairs of activations, int32, [1, units, planes, parts, lanes], or of codes of 8 bits [1, units, parts, lanes, 2]; words of
        four codes of 8 bits or of two neighbours of each plane, [out_features, units, parts, lanes] int32; scales,
        [out_features, units, groups of a unit].
    """
    out_features, units, parts = values.shape[0], x.shape[1] // UNIT, arrangement.parts
    pairs = _bits(x.reshape(-1, 2))
    if arrangement.planes == 1:
        pairs = pairs.reshape(1, units, parts, -1, 2)
    else:
        pairs = pairs.reshape(1, units, arrangement.planes, parts, -1)
    words = _bits(values.reshape(out_features, -1, 4))
    return pairs, words.reshape(out_features, units, parts, -1), scale.reshape(out_features, units, -1)


def _bits(array: jax.Array) -> jax.Array:
    """[..., n], 32 bits together, as [...] int32."""
    return jax.lax.bitcast_convert_type(array, jnp.int32)


def multiply_row(
    x_ref: Any,
    words_ref: Any,
    scale_ref: Any,
    out_ref: Any,
    *,
    arrangement: Arrangement,
    dtype: Any,
    step: int,
    interpret: bool,
) -> None:
    """One row of x with a block of the weight's rows, in tiles of [weight rows, units, lanes].

    Args:
        x_ref: pairs of activations, see `operands`.
        words_ref: of the weight.
        scale_ref: of the weight.
        out_ref: [1, weight rows].
        arrangement: of the codes.
        dtype: of the activations.
        step: units of a tile.
        interpret: whether the kernel is interpreted.
    """
    columns, units, parts, lanes = words_ref.shape
    shape, encoding, is_wide = (columns, step, lanes), arrangement.encoding, arrangement.planes == 1
    add_product = functools.partial(_add_product, interpret=interpret)
    # sums are in units of two to the power of this, and activations make up for where a code is
    exponent = exponent_of(encoding, 0) - LIFT
    bias = -bias_of(encoding) * 2.0**-exponent

    def load(index: Any) -> list[jax.Array]:
        return [words_ref[:, pl.ds(index * step, step), part, :] for part in range(parts)]

    def sum_of(words: jax.Array, part: int, pairs: Sequence[int], of_step: Any) -> jax.Array:
        places: list[tuple[int, jax.Array]] = []
        for pair in pairs:
            x = x_ref[0, of_step, part, :, pair] if is_wide else x_ref[0, of_step, pair, part, :]
            lowest = (16 * pair, 16 * pair + 8) if is_wide else (4 * pair, 4 * pair + 16)
            places += zip(lowest, _halves(x, dtype), strict=True)
        total = None if bias == 0 else bias * functools.reduce(operator.add, [x for _, x in places])
        for at, x in places:
            lift = 2.0 ** (exponent_of(encoding, at) - exponent - (LIFT if interpret else 0))
            code = as_float32(number_bits(words, at, encoding), interpret=interpret)
            x = jnp.broadcast_to(x * lift, shape)
            total = code * x if total is None else add_product(jnp.broadcast_to(total, shape), code, x)
        assert total is not None
        return total

    def add(index: Any, carried: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        sums, loaded = carried
        following = load(jnp.minimum(index + 1, units // step - 1))  # on its way while these are multiplied
        of_step = pl.ds(index * step, step)
        for part, words in enumerate(loaded):
            for group, planes in arrangement.planes_of(part).items():
                scale = scale_ref[:, of_step, group].astype(jnp.float32) * 2.0**exponent
                scale = jnp.broadcast_to(scale[:, :, None], shape)
                sums = add_product(sums, sum_of(words, part, (0, 1) if is_wide else planes, of_step), scale)
        return sums, following

    sums, _ = jax.lax.fori_loop(0, units // step, add, (jnp.zeros(shape, jnp.float32), load(0)))
    out_ref[0, :] = sums.sum(axis=(1, 2)).astype(out_ref.dtype)


def _halves(pair: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Two 16-bit floats in an int32, the first in its lower half, as float32."""
    if dtype == jnp.bfloat16:
        low, high = pair << 16, pair & jnp.int32(-0x10000)
        return jax.lax.bitcast_convert_type(low, jnp.float32), jax.lax.bitcast_convert_type(high, jnp.float32)
    low, high = (jax.lax.bitcast_convert_type(half.astype(jnp.uint16), dtype) for half in (pair, pair >> 16))
    return low.astype(jnp.float32), high.astype(jnp.float32)


def _add_product(total: jax.Array, a: jax.Array, b: jax.Array, *, interpret: bool) -> jax.Array:
    """`total + a * b`, rounded once; of a product and a sum Triton makes two instructions."""
    if interpret:
        return total + a * b
    (out,) = triton.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, total],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, jnp.float32)],
    )
    return out
