"""Codes of a few bits, as checkpoints pack them into bytes and words."""

from __future__ import annotations

import torch


def from_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """[..., n] int32 as [..., count] uint8 codes: a dense stream, code i in bits `i * bits` and up of the row.

    A row's words may end in padding. Codes of 3, 5, 6 and 7 bits cross from one word to the next.
    """
    if 8 % bits == 0:
        return from_bytes(words.contiguous().view(torch.uint8), bits)[..., :count]
    first = torch.arange(count) * bits
    word, shift = first // 32, first % 32
    wide = words.long() & 0xFFFFFFFF
    wide = torch.nn.functional.pad(wide, (0, 1))
    pairs = wide[..., word] | wide[..., word + 1] << 32  # a code lies in at most two words
    return (pairs >> shift & (1 << bits) - 1).to(torch.uint8)


def from_padded_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """[..., n] int32 as [..., count] uint8 codes: `32 // bits` in each word from its lowest bits up, the rest of it unused."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes = words[..., None] >> shifts & (1 << bits) - 1
    return codes.flatten(-2)[..., :count].to(torch.uint8)


def signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes of up to 8 bits with half their range subtracted, as int8: in place, where the result may share their memory."""
    return codes.bitwise_xor_(0x80).view(torch.int8) if bits == 8 else codes.view(torch.int8).sub_(1 << (bits - 1))


def from_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] uint8 as [..., n * 8 / bits] uint8 codes of 2, 4 or 8 bits, the lowest bits first."""
    if bits == 8:
        return packed
    codes = packed.new_empty((*packed.shape, 8 // bits))
    for place, shift in enumerate(range(0, 8, bits)):
        torch.bitwise_right_shift(packed, shift, out=codes[..., place])
    return codes.bitwise_and_((1 << bits) - 1).flatten(-2)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """float8_e8m0fnu scales, also if they are stored as uint8, as float32: `2 ** (code - 127)`."""
    return exponents.view(torch.float8_e8m0fnu).float()
