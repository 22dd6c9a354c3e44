"""What the bytes of a GGUF tensor mean: codes with scales and offsets for each of ggml's block formats, or numbers.

The layouts are those of ggml's `ggml-common.h` and `ggml-quants.c`; gguf-py's `quants.py` reads the same. A block's value is
`code * scale + offset`, computed in float32 in ggml's order, so that dequantized values are equal bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from hfax.errors import UnsupportedModelError
from hfax.load.gguf.file import TYPES
from hfax.load.packed import Encoding, PackedLayout, PackedTensor

PLAIN: dict[int, torch.dtype] = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64}
"""Types that store numbers as they are."""

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Codes:
    """Blocks taken apart: codes [blocks, values] int8 or uint8; scale and offset [blocks, groups], float16 or float32."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Format:
    """A block format.

    Args:
        encoding: that holds its codes, once `zero` is subtracted; "fp4" for codes that index `FP4_VALUES`.
        group: values that share a scale.
        read: takes blocks, [blocks, bytes] uint8, apart.
        zero: subtracted from the codes, and added to the offset as so many scales, to make them signed.
    """

    encoding: Encoding
    group: int
    read: Callable[[torch.Tensor], _Codes]
    zero: int = 0


def layout_of(kind: int, shape: tuple[int, ...]) -> PackedLayout | None:
    """How a tensor is packed; None if `unpack` returns numbers only."""
    if kind not in _FORMATS:
        return None
    block = pack(kind, torch.zeros(1, TYPES[kind][2], dtype=torch.uint8))
    return dataclasses.replace(block.layout, shape=shape)


def check_type(kind: int, name: str) -> None:
    """Raise if no tensor of this type can be read.

    Raises:
        UnsupportedModelError: names the type.
    """
    if kind not in PLAIN and kind not in _FORMATS and kind not in _others():
        readable = {*PLAIN, *_FORMATS, *_others()}
        raise UnsupportedModelError(
            f"The GGUF tensor {name!r} is quantized to {TYPES[kind][0]}.",
            f"hfax reads {', '.join(TYPES[kind][0] for kind in sorted(readable))}.",
            "Take another file of the same model, such as Q4_K_M or Q8_0.",
        )


def dequantize(kind: int, rows: torch.Tensor) -> torch.Tensor:
    """Numbers of a tensor's rows: [rows, row bytes] uint8 to [rows, columns] in float32, or in the type that the file stores."""
    if kind in PLAIN:
        return rows.view(PLAIN[kind])
    blocks = rows.reshape(-1, TYPES[kind][2])
    if kind not in _FORMATS:
        from transformers.integrations.gguf.dequant import dequantize as values_of

        return values_of(blocks, kind).reshape(len(rows), -1)
    found = _FORMATS[kind].read(blocks)
    groups = found.codes.float().unflatten(-1, (found.scale.shape[-1], -1)) * found.scale.float()[..., None]
    if found.offset is not None:
        groups += found.offset.float()[..., None]
    return groups.reshape(len(rows), -1)


def pack(kind: int, rows: torch.Tensor) -> PackedTensor:
    """Codes and scales of a tensor's rows: [rows, row bytes] uint8 to [rows, columns].

    The offset of a format with unsigned codes is moved to signed ones, which rounds it once in float32.
    """
    known = _FORMATS[kind]
    found = known.read(rows.reshape(-1, TYPES[kind][2]))
    codes, scale, offset = found.codes, found.scale, found.offset
    if known.encoding == "fp4":
        codes, scale = _fp4_codes(codes), scale * 2
    elif known.zero:
        assert offset is not None
        codes, offset = codes.view(torch.int8) - known.zero, offset.float() + scale.float() * known.zero
    codes, scale = codes.reshape(len(rows), -1), scale.reshape(len(rows), -1)
    codes = codes if known.encoding == "fp4" else codes.view(torch.int8)
    offset = None if offset is None else offset.reshape(len(rows), -1)
    return PackedTensor(encoding=known.encoding, codes=codes, scale=scale, offset=offset)


def _others() -> frozenset[int]:
    """Types that transformers reads: codebooks, which no packed form expresses."""
    from transformers.integrations.gguf.dequant import GGML_BLOCK

    return frozenset(GGML_BLOCK) & frozenset(TYPES)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """[blocks, 1] float16."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _bits(data: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Fields of so many bits, [blocks, fields] uint8: first the lowest field of `width` bytes, then their next one, …"""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).reshape(1, 1, -1, 1)
    return (data.reshape(len(data), -1, 1, width) >> shifts & ((1 << bits) - 1)).reshape(len(data), -1)


def _q4_0(b: torch.Tensor) -> _Codes:
    return _Codes(codes=_bits(b[:, 2:], 4, 16).view(torch.int8) - 8, scale=_half(b, 0))


def _q4_1(b: torch.Tensor) -> _Codes:
    return _Codes(codes=_bits(b[:, 4:], 4, 16), scale=_half(b, 0), offset=_half(b, 2))


def _fifth(b: torch.Tensor, at: int) -> torch.Tensor:
    """The fifth bits of 32 codes, from 4 bytes: bit i is code i's."""
    bits = torch.arange(8, dtype=torch.uint8)
    return (b[:, at : at + 4, None] >> bits & 1).reshape(len(b), 32) << 4


def _q5_0(b: torch.Tensor) -> _Codes:
    return _Codes(codes=(_bits(b[:, 6:], 4, 16) | _fifth(b, 2)).view(torch.int8) - 16, scale=_half(b, 0))


def _q5_1(b: torch.Tensor) -> _Codes:
    return _Codes(codes=_bits(b[:, 8:], 4, 16) | _fifth(b, 4), scale=_half(b, 0), offset=_half(b, 2))


def _q8_0(b: torch.Tensor) -> _Codes:
    return _Codes(codes=b[:, 2:].contiguous().view(torch.int8), scale=_half(b, 0))


def _q2_k(b: torch.Tensor) -> _Codes:
    scales = b[:, :16]
    scale = _half(b, 80).float() * (scales & 15).float()
    offset = -(_half(b, 82).float() * (scales >> 4).float())
    return _Codes(codes=_bits(b[:, 16:80], 2, 32), scale=scale, offset=offset)


def _q3_k(b: torch.Tensor) -> _Codes:
    scales = _bits(b[:, 96:104], 4, 8) | _bits(b[:, 104:108], 2, 4) << 4
    is_low = _bits(b[:, :32], 1, 32) ^ 1  # a clear bit subtracts 4
    codes = _bits(b[:, 32:96], 2, 32).view(torch.int8) - (is_low << 2).view(torch.int8)
    return _Codes(codes=codes, scale=_half(b, 108).float() * (scales.view(torch.int8) - 32).float())


def _k_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the offset of 8 groups, [blocks, 8] float32: two halves and twelve bytes with 6 bits for each."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat([low & 63, high & 15 | low >> 6 << 4], 1).float()
    least = torch.cat([mid & 63, high >> 4 | mid >> 6 << 4], 1).float()
    return _half(b, 0).float() * scale, -(_half(b, 2).float() * least)


def _q4_k(b: torch.Tensor) -> _Codes:
    scale, offset = _k_scales(b)
    return _Codes(codes=_bits(b[:, 16:], 4, 32), scale=scale, offset=offset)


def _q5_k(b: torch.Tensor) -> _Codes:
    scale, offset = _k_scales(b)
    codes = _bits(b[:, 48:], 4, 32) | _bits(b[:, 16:48], 1, 32) << 4
    return _Codes(codes=codes, scale=scale, offset=offset)


def _q6_k(b: torch.Tensor) -> _Codes:
    codes = (_bits(b[:, :128], 4, 64) | _bits(b[:, 128:192], 2, 32) << 4).view(torch.int8) - 32
    scales = b[:, 192:208].contiguous().view(torch.int8).float()
    return _Codes(codes=codes, scale=_half(b, 208).float() * scales)


def _iq4_nl(b: torch.Tensor) -> _Codes:
    return _Codes(codes=_lookup(_IQ4_VALUES, _bits(b[:, 2:], 4, 16)), scale=_half(b, 0))


def _iq4_xs(b: torch.Tensor) -> _Codes:
    low = torch.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], -1).reshape(len(b), 8)
    high = (b[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).reshape(len(b), 8)
    scale = _half(b, 0).float() * ((low | high << 4).view(torch.int8) - 32).float()
    return _Codes(codes=_lookup(_IQ4_VALUES, _bits(b[:, 8:], 4, 16)), scale=scale)


def _mxfp4(b: torch.Tensor) -> _Codes:
    """Doubled values with half the scale, 2 ** (exponent - 128), as ggml computes them: the largest is finite."""
    exponent = b[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1).clamp(min=0) << 23)
    return _Codes(codes=_lookup(_FP4_DOUBLED, _bits(b[:, 1:], 4, 16)), scale=bits.view(torch.float32))


def _lookup(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int8)[codes.int()]


def _fp4_codes(doubled: torch.Tensor) -> torch.Tensor:
    """The codes, uint8, of doubled FP4 values; 0 for both zeros."""
    table = torch.zeros(256, dtype=torch.uint8)
    for code, value in reversed(list(enumerate(_FP4_DOUBLED))):
        table[value + 128] = code
    return table[doubled.int() + 128]


_FORMATS: dict[int, _Format] = {
    2: _Format(encoding="int4", group=32, read=_q4_0),
    3: _Format(encoding="int4", group=32, read=_q4_1, zero=8),
    6: _Format(encoding="int8", group=32, read=_q5_0),
    7: _Format(encoding="int8", group=32, read=_q5_1),
    8: _Format(encoding="int8", group=32, read=_q8_0),
    10: _Format(encoding="int4", group=16, read=_q2_k),
    11: _Format(encoding="int4", group=16, read=_q3_k),
    12: _Format(encoding="int4", group=32, read=_q4_k, zero=8),
    13: _Format(encoding="int8", group=32, read=_q5_k),
    14: _Format(encoding="int8", group=16, read=_q6_k),
    20: _Format(encoding="int8", group=32, read=_iq4_nl),
    23: _Format(encoding="int8", group=32, read=_iq4_xs),
    39: _Format(encoding="fp4", group=32, read=_mxfp4),
}
