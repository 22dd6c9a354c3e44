"""How the Pallas kernels for packed weights on TPU multiply a block of codes, and in which form they take the activations.

Decoding should read weights as fast as memory gives them, but a TPU's vector unit has only a few cycles for the codes that arrive
in that time. There are three ways; `benchmarks/tpu_kernels.py` compares the compiled schedules.

"digits", for few rows and int4, where the matrix unit multiplies int8: activations become fixed-point numbers of three int8
digits, sums are exact, and codes need no conversion. "numbers", for few rows: codes become bfloat16 by a few operations on 32-bit
words of four bytes, and sums are scaled; int8, too, which still waits for memory. "weights", for many rows: a block of codes
becomes bfloat16 weights, once for all rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from hfax.kernels.encodings import BITS, Encoding
from hfax.kernels.tiles import LANES, SUBLANES

Way = Literal["digits", "numbers", "weights"]

_NUM_DIGITS = 3
_FIRST_BIT = 22
"""Fixed-point activations are below 2 ** 22, a third digit more than the significand of bfloat16 needs."""
_BIAS = {"float8_e4m3b11fnuz": 11, "float8_e4m3fn": 7}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a chip computes with.

    Args:
        has_int8: the matrix unit multiplies int8.
        float8: the type of 8-bit floats that the vector unit converts.
    """

    has_int8: bool
    float8: Literal["float8_e4m3b11fnuz", "float8_e4m3fn"]


def abilities_of(device_kind: str) -> Abilities:
    """The abilities of a chip, by JAX's name of it; of an unknown one those that all have had."""
    if device_kind.startswith("TPU7"):
        return Abilities(has_int8=False, float8="float8_e4m3fn")
    return Abilities(has_int8=device_kind.startswith(("TPU v5", "TPU v6")), float8="float8_e4m3b11fnuz")


def way_of(rows: int, encoding: Encoding, group: int, chip: Abilities) -> Way:
    """The fastest way to multiply so many rows.

    Args:
        rows: rows of activations that share the weights.
        encoding: of the weights.
        group: columns of the weights that share a scale.
        chip: on which they are multiplied.
    """
    sums = rows * LANES // group  # of 128 columns
    if sums > 128:
        return "weights"
    return "digits" if chip.has_int8 and encoding == "int4" and sums <= 16 else "numbers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A product of activations with packed weights.

    Several groups of weights may share a matrix product: the activations then have a copy for each, with zeros in the columns of
    the others, and each copy's sums have their own scale.

    Args:
        way: how codes are multiplied.
        encoding: of the weights.
        group: columns of the weights that share a scale.
        rows: rows of activations.
        depth: columns of the weights in a block.
        chip: on which they are multiplied.
    """

    way: Way
    encoding: Encoding
    group: int
    rows: int
    depth: int
    chip: Abilities

    @property
    def height(self) -> int:
        """Rows of a block of results: of whole tiles, except a single one."""
        tile = 2 * SUBLANES if self.way == "weights" else SUBLANES
        return 1 if self.rows == 1 and self.way != "weights" else _in_tiles(self.rows, tile)

    @property
    def _factor(self) -> float:
        """What a code's number is in units of what `_numbers` makes of it.

        Nibbles stay in the upper halves of their bytes, and floats are read as 8-bit floats with the chip's exponents.
        """
        bias = _BIAS[self.chip.float8]
        return {"int8": 1.0, "int4": 2.0**-4, "fp8": 2.0 ** (bias - 7), "fp4": 2.0 ** (bias - 1)}[self.encoding]

    @property
    def sums_height(self) -> int:
        """Rows of a block of sums, which `finish` makes results."""
        return self.height if self.way == "weights" else _in_tiles(self._parts * self._stride, SUBLANES)

    @property
    def _unit(self) -> int:
        """Columns of a matrix product.

        With more rows 128, so that fewer columns of a group's activations are zeros; otherwise 256, so that a single row's sums
        share a tile, and low and high nibbles need not be brought together.
        """
        if BITS[self.encoding] == 8:
            return LANES
        return 2 * LANES if self.way == "weights" or self.height <= (8 if self.group == LANES else 1) else LANES

    @property
    def _parts(self) -> int:
        """Groups that share a matrix product."""
        return self._unit // self.group

    @property
    def _num_digits(self) -> int:
        return _NUM_DIGITS if self.way == "digits" else 1

    @property
    def _stride(self) -> int:
        """Rows of sums of a part: a power of two or whole tiles."""
        return {1: 1, _NUM_DIGITS: 4}[self._num_digits] if self.height == 1 else self._num_digits * self.height

    def operand(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Activations as the kernels take them.

        Args:
            x: [blocks, height, in_features] bfloat16; for "weights" of any height.

        Returns:
            [blocks, rows, in_features] bfloat16 or, for "digits", int8; and by what the results are to be multiplied,
            [blocks, height, 1] or [1, 1, 1] float32, or None.
        """
        if BITS[self.encoding] == 4:
            x = self._in_order_of_nibbles(x)
        if self.way == "weights":
            return x, None
        factor, tile = jnp.full((1, 1, 1), self._factor, jnp.float32), 2 * SUBLANES
        if self.way == "digits":
            x, unit = _fixed_point(x)
            factor, tile = factor * unit, 4 * SUBLANES
        blocks, rows, width = x.shape
        # one operation over all rows of the result, since each costs about a microsecond: a copy of x for each part and digit
        copy = np.arange(_in_tiles(self._parts * self._stride, tile) // rows)[:, None, None]
        part, digit = np.divmod(copy, self._stride // rows)
        copies = x[:, None]
        if self.way == "digits":
            copies = (((copies >> 8 * np.maximum(_NUM_DIGITS - 1 - digit, 0)) & 255) - 128).astype(jnp.int8)
        is_own = np.tile(self._part_of(np.arange(self._unit)), width // self._unit) == part
        return jnp.where(is_own & (digit < self._num_digits), copies, 0).reshape(blocks, -1, width), factor

    def sums(self, x: Any, weight: Any, scale: Any) -> jax.Array:
        """The scaled sums of a block of activations and a block of codes, within a kernel.

        Args:
            x: [rows, depth], as from `operand`.
            weight: [columns, depth], or two codes a byte.
            scale: [depth / group, columns].

        Returns:
            [sums_height, columns] float32.
        """
        units = self._codes(weight)
        if self.way == "weights":
            return _dot(x[...], self._weights(units, scale), jnp.float32)
        total = 0.0
        for u, codes in enumerate(units):
            own, scales = x[:, u * self._unit : (u + 1) * self._unit], scale[u * self._parts : (u + 1) * self._parts, :]
            if self.way == "digits":
                sums = _dot(own, pltpu.bitcast(codes, jnp.int8), jnp.int32).astype(jnp.float32)
            else:
                sums = _dot(own, self._numbers(codes), jnp.float32)
            total = total + sums[: self.sums_height] * self._scales_of_rows(scales.astype(jnp.float32))
        return jnp.asarray(total)

    def finish(self, sums: jax.Array) -> jax.Array:
        """The results, [height, columns] float32, of all sums, [sums_height, columns], within a kernel."""
        if self.way == "weights":
            return sums
        if self.height == 1:
            row = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 0)
            digit, worth = row & (self._stride - 1), 0.0
            for d in range(self._num_digits):
                worth = jnp.where(digit == d, float(256 ** (self._num_digits - 1 - d)), worth)
            return jnp.sum(jnp.where(row < self._parts * self._stride, sums * worth, 0), axis=0, keepdims=True)
        total = 0.0
        for first in range(0, self._parts * self._stride, self._stride):
            own = sums[first : first + self.height]
            for d in range(1, self._num_digits):
                own = own * 256.0 + sums[first + d * self.height : first + (d + 1) * self.height]
            total = total + own
        return jnp.asarray(total)

    def _part_of(self, column: Any) -> Any:
        """The group, among those of a unit, of a column of its codes; by operations that kernels have for arrays."""
        if BITS[self.encoding] == 4:
            lanes = self._unit // 2
            byte, nibble = column & (lanes - 1), column >> lanes.bit_length() - 1
            column = (byte >> 6 << 7) + 32 * (2 * (byte & 1) + nibble) + ((byte & 63) >> 1)
        return column >> self.group.bit_length() - 1

    def _in_order_of_nibbles(self, x: jax.Array) -> jax.Array:
        """The columns of x, [..., in_features], in the order of `_codes`: of a unit, those of low nibbles, then of high ones."""
        *lead, width = x.shape
        # of a unit the 128 columns, of a 16-bit word the byte, its nibble, and the word
        parts = x.reshape(*lead, width // self._unit, self._unit // LANES, 2, 2, 32)
        return jnp.moveaxis(parts, (-2, -4, -1, -3), (-4, -3, -2, -1)).reshape(*lead, width)

    def _codes(self, weight: Any) -> list[jax.Array]:
        """Each unit's codes as 32-bit words of four rows, [columns / 4, unit]; nibbles in the upper halves of their bytes."""
        lanes = self._unit if BITS[self.encoding] == 8 else LANES
        words = [pltpu.bitcast(weight[:, n : n + lanes], jnp.int32) for n in range(0, weight.shape[1], lanes)]
        is_b11 = self.chip.float8 == "float8_e4m3b11fnuz"
        if BITS[self.encoding] == 8:
            return [_as_b11(each) for each in words] if self.encoding == "fp8" and is_b11 else words
        units = []
        for each in words:
            own = each ^ _bytes(0x88) if self.encoding == "int4" else each
            if self._unit == LANES:  # 128 bytes hold two units, in the halves of the lanes
                is_first = jax.lax.broadcasted_iota(jnp.int32, own.shape, 1) < LANES // 2
                other = pltpu.roll(own, LANES // 2, 1)
                nibbles = [jnp.where(is_first, own << 4, other), jnp.where(is_first, other << 4, own)]
            else:
                nibbles = [own << 4, own]
            found = [n & _bytes(0xF0) if self.encoding == "int4" else _fp4_as_fp8(n, is_b11) for n in nibbles]
            units += found if self._unit == LANES else [jnp.concatenate(found, axis=1)]
        return units

    def _numbers(self, codes: jax.Array) -> jax.Array:
        """[columns, unit] bfloat16."""
        kind = jnp.int8 if self.encoding in ("int8", "int4") else jnp.dtype(self.chip.float8)
        return pltpu.bitcast(codes, kind).astype(jnp.bfloat16)

    def _scales_of_rows(self, scales: jax.Array) -> jax.Array:
        """Scales of a unit's groups, [parts, columns], for the rows of sums, [sums_height, columns]."""
        columns = scales.shape[1]
        if self._stride >= SUBLANES:
            return jnp.concatenate([jnp.broadcast_to(s[None], (self._stride, columns)) for s in scales])
        row = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, columns), 0) >> self._stride.bit_length() - 1
        tiles, together = [], SUBLANES // self._stride
        for first in range(0, self._parts, together):
            tile = jnp.broadcast_to(scales[first : first + 1], (SUBLANES, columns))
            for p in range(1, min(together, self._parts - first)):
                tile = jnp.where(row >= p, scales[first + p : first + p + 1], tile)
            tiles.append(tile)
        return jnp.concatenate(tiles)

    def _weights(self, units: list[jax.Array], scale: Any) -> jax.Array:
        """Codes times their scales, [columns, depth] bfloat16, rounded once."""
        scales = (scale[...].astype(jnp.float32) * self._factor).T
        found = []
        for u, codes in enumerate(units):
            numbers = self._numbers(codes).astype(jnp.float32)
            own = scales[:, u : u + 1] if self._parts == 1 else self._spread(scales, u, scale.dtype)
            found.append((numbers * own).astype(jnp.bfloat16))
        return jnp.concatenate(found, axis=1)

    def _spread(self, scales: jax.Array, unit: int, dtype: Any) -> jax.Array:
        """Scales, [columns, groups], for the columns of a unit, [columns, unit] float32, by a product with zeros and ones.

        It is exact: a scale is a sum of as many bfloat16 numbers as its dtype needs.
        """
        shape = scales.shape[1], self._unit
        column, group = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 0))
        is_own = (self._part_of(column) + unit * self._parts == group).astype(jnp.float32).astype(jnp.bfloat16)
        found = 0.0
        for _ in range({"bfloat16": 1, "float16": 2, "float32": 3}[jnp.dtype(dtype).name]):
            part = scales.astype(jnp.bfloat16)
            found, scales = found + _dot(part, is_own, jnp.float32, axis=0), scales - part.astype(jnp.float32)
        return jnp.asarray(found)


def _in_tiles(rows: int, tile: int) -> int:
    """Rows of whole tiles."""
    return -(-rows // tile) * tile


def _fixed_point(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows as numbers of three digits of 8 bits, relative to the power of two above their largest number.

    Numbers above 2 ** -15 of the largest one of a row are exact; a row with infinities or NaN has the unit NaN.

    Args:
        x: [blocks, rows, in_features] bfloat16.

    Returns:
        [blocks, rows, in_features] int32, of which each byte is a digit plus 128; and the unit of the lowest digit,
        [blocks, rows, 1] float32.
    """
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF  # in the order of the sizes, NaN last
    most = jnp.max(bits, axis=-1, keepdims=True)
    exponent = (most >> 23).clip(_FIRST_BIT, 254)  # 2 ** (exponent - 126) is above all numbers

    def power_of_2(biased: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(biased << 23, jnp.float32)

    unit = jnp.where(most < 0x7F800000, power_of_2(exponent + 1 - _FIRST_BIT), jnp.nan)
    return jnp.round(x * power_of_2(_FIRST_BIT + 253 - exponent)).astype(jnp.int32) + 0x808080, unit


def _as_b11(words: jax.Array) -> jax.Array:
    """Bytes of float8_e4m3fn, without NaN, as float8_e4m3b11fnuz of 1/16 the size; -0, which is NaN there, becomes 0."""
    return words & (((words & _bytes(0x7F)) + _bytes(0x7F)) | _bytes(0x7F))


def _fp4_as_fp8(words: jax.Array, is_b11: bool) -> jax.Array:
    """The upper halves of bytes, of float4_e2m1, as 8-bit floats with the same lowest exponent; of float8_e4m3b11fnuz, -0 as 0."""
    size = (words >> 2) & _bytes(0x1C)
    sign = words & (size + _bytes(0x7F)) if is_b11 else words
    return size | (sign & _bytes(0x80))


def _bytes(value: int) -> jax.Array:
    """A 32-bit word of four equal bytes."""
    return jnp.int32(np.uint32(value * 0x01010101).astype(np.int32))


def _dot(x: jax.Array, weight: jax.Array, dtype: Any, axis: int = 1) -> jax.Array:
    contract = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, weight, contract, jax.lax.Precision.DEFAULT, dtype)
