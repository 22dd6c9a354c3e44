"""HQQ: codes of 1 to 8 bits minus a zero, times a scale, as hqq's `HQQLinear` stores them with its settings beside them.

Codes are stacked: a byte holds one of the first half of all groups above one of the second half, and so on for other widths. Along
axis 1, groups are neighbouring columns; along axis 0, they are columns far apart, which no kernel multiplies with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hfax.load.formats.parts import by_module, misfit, need, need_shape, packed_weight, refused, scale_bytes
from hfax.load.formats.unpacking import signed
from hfax.load.packed import Encoding, PackedTensor, StoredWeight
from hfax.load.store import TensorStore

_SETTINGS = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero",
    "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
_PARTS = ("W_q", "scale", "zero", *_SETTINGS)
_PER_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Codes in a byte, or for 3 bits in a word of 32 bits, the first of them in the highest bits, by their width."""


def find(options: Mapping[str, Any], store: TensorStore) -> dict[str, StoredWeight]:
    """The weights that have codes.

    Args:
        options: the config's `quantization_config`.
        store: the checkpoint's tensors.
    """
    modules = by_module(store.names, _PARTS).items()
    return {f"{module}.weight": _weight(store, module, parts) for module, parts in modules if "W_q" in parts}


def _weight(store: TensorStore, module: str, parts: Mapping[str, str]) -> StoredWeight:
    if "scale_q" in parts or "zero_scale" in parts:
        raise refused(f"{module!r} has quantized scales.", "hfax reads HQQ's scales and zeros as plain numbers.")
    words, scale, zero, *settings = need(parts, module, "W_q", "scale", "zero", "nbits", "group_size", "shape", "axis")
    bits, group, shape, axis = (tuple(store.read(name).flatten().tolist()) for name in settings)
    bits, group, axis = int(bits[0]), int(group[0]), int(axis[0])
    if bits not in _PER_WORD:
        raise refused(
            f"{module!r} has HQQ weights of {bits} bits.", f"hfax reads {', '.join(map(str, _PER_WORD))} bits."
        )
    if len(shape) != 2 or group < 1 or axis not in (0, 1) or math.prod(shape) % group:
        raise misfit(words, f"is a weight of {shape} in groups of {group} along axis {axis}", "groups of a matrix")
    groups = math.prod(shape) // group
    stored, count = ((groups, group), groups) if axis == 1 else ((group, groups), group)
    for name in (scale, zero):
        need_shape(store, name, (groups, 1) if axis == 1 else (1, groups))
    per_word = _PER_WORD[bits]
    num_bytes = math.prod(store.shape(words)) * (store.dtype(words) or torch.uint8).itemsize
    expected = -(-count // per_word) * stored[1] * (4 if bits == 3 else 1)
    if num_bytes != expected:
        raise misfit(words, f"has {num_bytes} bytes", f"{expected} for a weight of {shape}")

    def codes() -> torch.Tensor:
        """Codes from 0, in the shape of groups."""
        packed = store.read(words).contiguous().view(torch.int32 if bits == 3 else torch.uint8).reshape(-1, stored[1])
        shifts = [bits * (per_word - 1 - place) for place in range(per_word)]
        parts_of = [(packed >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts]
        return torch.cat(parts_of)[:count]

    def numbers() -> torch.Tensor:
        return ((codes().float() - store.read(zero).float()) * store.read(scale).float()).reshape(shape)

    names = tuple(parts.values())
    if axis == 0 or shape[1] % group:
        return StoredWeight(parts=names, shape=shape, layout=None, read=numbers)
    encoding: Encoding = "int4" if bits <= 4 else "int8"
    half = 1 << (bits - 1)

    def read() -> PackedTensor:
        scales = store.read(scale).reshape(shape[0], -1)
        zeros = store.read(zero).float().reshape(shape[0], -1)
        offset = (half - zeros) * scales.float()
        return PackedTensor(
            encoding=encoding,
            codes=signed(codes().reshape(shape), bits),
            scale=scales,
            offset=offset if offset.any() else None,
        )

    return packed_weight(names, encoding, shape, group, read, scale_bytes=scale_bytes(store, scale), has_offset=True)
