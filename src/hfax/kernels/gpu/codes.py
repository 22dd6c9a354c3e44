"""Packed weights as the Triton kernels read them: the arrangement of their columns, and the numbers that codes stand for.

Codes become numbers by integer operations on their bits, which every GPU has: conversions of integers take a GPU several cycles,
and those of 8-bit floats need compute capability 8.9. All numbers of the codes are exact in float32, bfloat16 and float16.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.kernels.encodings import BITS, FP4_VALUES, STORED, Encoding

UNIT = 128
"""Columns of a step of the kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How the columns of a unit are arranged: [planes, parts, lanes], in the order of columns.

    Codes of 4 bits have four planes, see `hfax.kernels.quantized.QuantizedArray`; a plane's columns are parts of lanes where
    several groups share it.

    Args:
        encoding: of the codes.
        group: columns that share a scale.
    """

    encoding: Encoding
    group: int

    @property
    def planes(self) -> int:
        """Codes of a word."""
        return 1 if BITS[self.encoding] == 8 else 4

    @property
    def lanes(self) -> int:
        """Columns of a part."""
        return min(self.group, UNIT // self.planes)

    @property
    def parts(self) -> int:
        """Parts of a plane."""
        return UNIT // self.planes // self.lanes

    def planes_of(self, part: int) -> dict[int, list[int]]:
        """By group that has columns of this part, the planes that it has there."""
        found: dict[int, list[int]] = {}
        for plane in range(self.planes):
            found.setdefault((plane * self.parts + part) * self.lanes // self.group, []).append(plane)
        return found

    def operands(self, x: jax.Array, values: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The arrays as the kernels read them.

        Args:
            x: [rows, columns].
            values: as in `hfax.kernels.quantized.QuantizedArray`, [..., stored columns].
            scale: [..., groups].

        Returns:
            activations, [rows, units, planes, parts, lanes]; words, [..., units, parts, lanes] int8 or uint16; scales, [..., units,
            groups of a unit].
        """
        *lead, stored = values.shape
        if BITS[self.encoding] == 8:
            words = values if self.encoding == "int8" else jax.lax.bitcast_convert_type(values, jnp.int8)
        else:
            words = jax.lax.bitcast_convert_type(values.reshape(*lead, stored // 2, 2), jnp.uint16)
        return (
            x.reshape(x.shape[0], -1, self.planes, self.parts, self.lanes),
            words.reshape(*lead, -1, self.parts, self.lanes),
            scale.reshape(*lead, -1, UNIT // self.group),
        )


_FLOATS: dict[Encoding, tuple[int, int, int]] = {"fp8": (4, 0x87F00000, 120), "fp4": (6, 0x81C00000, 126)}
"""How far a code in the highest bits is shifted, with its sign, to where float32 has sign, exponent and significand; which bits
those are; by how much float32's exponents are too small then."""
_LOWEST = -149
"""The exponent of float32's lowest bit."""
LIFT = 64
"""Products are in units of about two to the power of minus this, so that float32 holds small ones and large ones."""


def numbers(words: jax.Array, plane: int, encoding: Encoding, dtype: Any, *, interpret: bool) -> jax.Array:
    """What the codes of a plane stand for.

    Args:
        words: int8 or uint16, as from `Arrangement.operands`.
        plane: 0 for codes of 8 bits.
        encoding: of the codes.
        dtype: of the result: bfloat16 or float16.
        interpret: whether the kernel is interpreted.
    """
    if encoding == "int8":
        return words.astype(dtype)  # by Triton, four codes at a time
    words, at = words.astype(jnp.int32), 4 * plane
    if encoding == "int4":  # bits of the significand of a float32 whose exponent makes the lowest of them 1
        bits = (words & (15 << at)) | (0x4B000000 - (at << 23))
        return (jax.lax.bitcast_convert_type(bits, jnp.float32) - (2.0 ** (23 - at) + 8)).astype(dtype)
    exponent = exponent_of(encoding, at) - (LIFT if interpret else 0)
    return (as_float32(number_bits(words, at, encoding), interpret=interpret) * 2.0**exponent).astype(dtype)


def number_bits(words: jax.Array, at: int, encoding: Encoding) -> jax.Array:
    """The bits of a float32 which, times two to the power of `exponent_of`, is what a code stands for, plus `bias_of`.

    Args:
        words: int32.
        at: the code's lowest bit.
        encoding: of the codes.
    """
    bits = BITS[encoding]
    if encoding in _FLOATS:
        shift, kept, _ = _FLOATS[encoding]
        return ((words << (32 - bits - at)) >> shift) & _signed(kept)
    if encoding == "int8":
        words = words ^ _signed(0x80808080)
    if at >= 16:  # above the significand
        words, at = jax.lax.shift_right_logical(words, 16), at - 16
    return words & (((1 << bits) - 1) << at)


def exponent_of(encoding: Encoding, at: int) -> int:
    """See `number_bits`."""
    return _FLOATS[encoding][2] if encoding in _FLOATS else -_LOWEST - at % 16


def bias_of(encoding: Encoding) -> int:
    """See `number_bits`."""
    return 0 if encoding in _FLOATS else 1 << (BITS[encoding] - 1)


def as_float32(bits: jax.Array, *, interpret: bool) -> jax.Array:
    """The number that these bits are; of an interpreted kernel times two to the power of `LIFT`, since XLA's CPU code takes numbers
    that are too small to be normalized as 0."""
    if not interpret:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    sign, magnitude = jnp.where(bits < 0, -1.0, 1.0), bits & 0x7FFFFFFF
    normal = jax.lax.bitcast_convert_type(magnitude + (LIFT << 23), jnp.float32)
    return sign * jnp.where(magnitude < 1 << 23, magnitude.astype(jnp.float32) * 2.0 ** (_LOWEST + LIFT), normal)


def _signed(bits: int) -> jax.Array:
    return jnp.int32(bits - (bits >> 31 << 32))


def drawn(rng: np.random.Generator, shape: tuple[int, ...], encoding: Encoding) -> tuple[jax.Array, np.ndarray]:
    """Random codes of a weight, as `hfax.kernels.quantized.QuantizedArray` holds them, and their numbers by table; for trials.

    Args:
        rng: the source of the codes.
        shape: of the weight, [..., in_features].
        encoding: of the codes.
    """
    stored = rng.integers(0, 256, (*shape[:-1], shape[-1] * BITS[encoding] // 8), np.uint8)
    if encoding == "fp8":
        stored[stored & 0x7F == 0x7F] = 0  # not a number
    values = stored.view(jnp.dtype(STORED[encoding]))
    if BITS[encoding] == 8:
        return jnp.asarray(values), values.astype(np.float64)
    pairs = stored.reshape(*shape[:-1], -1, UNIT // 4, 2)
    planes = [pairs[..., plane // 2] >> (4 * (plane % 2)) & 15 for plane in range(4)]
    codes = np.stack(planes, axis=-2).reshape(shape)
    return jnp.asarray(values), (np.asarray(FP4_VALUES)[codes] if encoding == "fp4" else codes.astype(np.float64) - 8)
