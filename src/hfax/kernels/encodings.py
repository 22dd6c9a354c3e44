"""What the codes of packed weights mean."""

from __future__ import annotations

from typing import Literal

Encoding = Literal["int8", "int4", "fp8", "fp4"]
"""What a code means: a signed integer of 8 or 4 bits, a float8_e4m3fn, or one of the 16 values of `FP4_VALUES`."""

BITS: dict[Encoding, int] = {"int8": 8, "int4": 4, "fp8": 8, "fp4": 4}

STORED: dict[Encoding, str] = {"int8": "int8", "int4": "uint8", "fp8": "float8_e4m3fn", "fp4": "uint8"}
"""The dtype of the array that holds the codes."""

GROUPS = (128, 64, 32, 16)
"""Columns that may share a scale in a packed weight of another library's checkpoint, as the kernels of all platforms read it."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of float4_e2m1fn, by code (OCP Microscaling Formats 1.0, table 5)."""

WORD_COLUMNS = 128
"""Columns whose codes of 4 bits share words, see `hfax.kernels.quantized.QuantizedArray`."""
_WIDE = 1024


def columns_of(width: int, encoding: Encoding) -> int:
    """Columns that are stored for a row of `width` numbers: codes of 4 bits are padded to whole words.

    Wide rows are padded to two of them: the TPU kernel multiplies with 256 columns or more at a time.
    """
    if BITS[encoding] == 8 or width % WORD_COLUMNS == 0:
        return width
    unit = WORD_COLUMNS if width <= _WIDE else 2 * WORD_COLUMNS
    return -(-width // unit) * unit


def padded_width(width: int, encoding: Encoding) -> int | None:
    """The width of a row whose codes are padded; None: they are not."""
    return None if columns_of(width, encoding) == width else width


def pays(width: int) -> bool:
    """Whether a row of `width` numbers takes less memory with 4 bits each than with 8."""
    return columns_of(width, "int4") < 2 * width
