"""Rounds weights to integers of 8 or 4 bits, with a scale for each group of columns. Takes and gives numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import ml_dtypes
import numpy as np

from hfax.kernels.encodings import Encoding, columns_of, pays
from hfax.load.host_arrays import aligned_empty

Quantization = Literal["int8", "int4"]

_GROUPS = (128, 64, 32)
"""Group sizes (columns per scale); the first that divides the row width is used."""
_BLOCK = 1 << 18
"""Numbers that are rounded at a time: intermediate results are in float32, and as large as a block, not as the weight."""


def bits_and_group(width: int, quantization: Quantization) -> tuple[int, int] | None:
    """Bits per weight and group size for rows of this width; None if they are not quantized.

    Rows that would take no less memory with 4 bits have 8.
    """
    if (group := next((g for g in _GROUPS if width % g == 0), None)) is None:
        return None
    return (4 if quantization == "int4" and pays(width) else 8), group


def to_codes(array: np.ndarray, quantization: Quantization) -> tuple[np.ndarray, np.ndarray] | None:
    """Codes and scales of a matrix, [out, in], or a stack of them, [n, out, in]; None if rows do not divide into groups.

    8 bits: each group's largest magnitude maps to 127. 4 bits: it maps to -8, so that all 16 values are used.

    Returns:
        As `values` and `scale` (bfloat16) of a `QuantizedArray`.
    """
    if (found := bits_and_group(array.shape[-1], quantization)) is None:
        return None
    bits, group = found
    *lead, width = array.shape
    columns = width if bits == 8 else columns_of(width, "int4")
    codes = aligned_empty((*lead, columns * bits // 8), np.dtype("int8" if bits == 8 else "uint8"))
    scale = aligned_empty((*lead, columns // group), np.dtype(ml_dtypes.bfloat16))
    scale[..., width // group :] = 0
    for numbers, some_codes, stored_scales in _blocks(array, codes, scale):
        groups, scales = numbers.astype(np.float32).reshape(-1, group), stored_scales[:, : width // group]
        if bits == 8:
            some_codes[...] = _int8(groups, scales).reshape(some_codes.shape)
        else:
            some_codes[...] = in_words(_int4(groups, scales).reshape(numbers.shape), "int4")
    return codes, scale


def _int8(groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    largest = np.maximum(groups.max(-1), -groups.min(-1))
    scales[...] = (largest / np.float32(127)).reshape(scales.shape)
    return _rounded(groups, scales, -127, 127).astype(np.int8)


def _int4(groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes plus 8, uint8."""
    high, low = groups.max(-1), groups.min(-1)
    largest = np.where(high > -low, high, low)
    scales[...] = (largest / np.float32(-8)).reshape(scales.shape)
    codes = _rounded(groups, scales, -8, 7)
    codes += 8
    return codes.astype(np.uint8)


def _rounded(groups: np.ndarray, scales: np.ndarray, low: int, high: int) -> np.ndarray:
    """Multiples of the scales as they are stored, to even; overwrites the groups. A group of zeros has the scale 0."""
    of_groups = scales.astype(np.float32).reshape(-1, 1)
    of_groups[of_groups == 0] = 1
    groups /= of_groups
    np.rint(groups, out=groups)
    return np.clip(groups, low, high, out=groups)


def in_words(codes: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Codes of 4 bits, [..., in], as [..., columns / 2] uint8 in the order of `QuantizedArray.values`: int8 integers, or uint8, of
    integers plus 8."""
    *lead, width = codes.shape
    columns, zero = columns_of(width, encoding), 8 if encoding == "int4" else 0
    words = aligned_empty((*lead, columns // 2), np.dtype("uint8"))
    for some, packed in _blocks(codes, words):
        if some.dtype == np.int8:
            some = (some + 8).view(np.uint8)
        if columns != width:
            some = np.pad(some, ((0, 0), (0, columns - width)), constant_values=zero)
        quarters = some.reshape(-1, 4, 32)
        pairs = packed.reshape(-1, 32, 2)
        for half in (0, 1):
            np.left_shift(quarters[:, 2 * half + 1], 4, out=pairs[..., half])
            pairs[..., half] |= quarters[:, 2 * half]
    return words


def _blocks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Blocks of rows of several contiguous arrays with the same leading axes."""
    rows = [array.reshape(-1, array.shape[-1]) for array in arrays]
    step = max(1, _BLOCK // arrays[0].shape[-1])
    for begin in range(0, len(rows[0]), step):
        yield tuple(part[begin : begin + step] for part in rows)
