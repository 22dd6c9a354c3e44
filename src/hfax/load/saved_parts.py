"""Names of a quantized weight's arrays in a checkpoint that hfax saved: the codes have the weight's name, the rest a suffix."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import jax
import torch

from hfax.kernels.encodings import BITS, Encoding, columns_of
from hfax.kernels.quantized import QuantizedArray
from hfax.load.packed import PackedLayout
from hfax.load.quantize import encoding_of

_SUFFIXES = {"offset": "_offset", "columns": "_columns"}
_SCALES: dict[str, tuple[Encoding | None, bool]] = {
    "_scale": (None, False),
    "_fp4_scale": ("fp4", False),
    "_scale_of_transpose": (None, True),
    "_fp4_scale_of_transpose": ("fp4", True),
}
"""The suffix of the scales says what the arrays do not: whether codes of 4 bits are FP4, and those of the weight's transpose."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedParts:
    """Where a quantized weight's arrays are stored.

    Args:
        names: by field of `QuantizedArray`.
        encoding: "fp4"; None: as the dtype of the codes says.
        is_transposed: the codes are of the weight's transpose.
    """

    names: Mapping[str, str]
    encoding: Encoding | None
    is_transposed: bool


def names_of(name: str, array: QuantizedArray) -> dict[str, str]:
    """Names under which to store the arrays that a weight has, by field."""
    kind = ("fp4" if array.encoding == "fp4" else None, array.is_transposed)
    scale = next(suffix for suffix, of in _SCALES.items() if of == kind)
    others = {f: name + suffix for f, suffix in _SUFFIXES.items() if getattr(array, f) is not None}
    return {"values": name, "scale": name + scale} | others


def saved_parts(weights: Iterable[str], stored: Collection[str]) -> dict[str, SavedParts]:
    """The quantized ones among a model's weights, by name.

    Args:
        weights: their names.
        stored: names of the stored arrays.
    """
    found: dict[str, SavedParts] = {}
    for name in weights:
        if (scale := next((suffix for suffix in _SCALES if name + suffix in stored), None)) is None:
            continue
        encoding, is_transposed = _SCALES[scale]
        names = {"values": name, "scale": name + scale}
        names |= {field: name + suffix for field, suffix in _SUFFIXES.items() if name + suffix in stored}
        found[name] = SavedParts(names=names, encoding=encoding, is_transposed=is_transposed)
    return found


def saved_layouts(
    weights: Mapping[str, torch.Tensor], arrays: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, PackedLayout]:
    """How the quantized weights are packed, by name.

    Args:
        weights: the model's weights, with or without numbers.
        arrays: the stored arrays.
    """
    found: dict[str, PackedLayout] = {}
    for name, parts in saved_parts(weights, arrays).items():
        matrix = tuple((weights[name].mT if parts.is_transposed else weights[name]).shape)
        encoding = parts.encoding or encoding_of(arrays[name].dtype.name)
        scale, offset = arrays[parts.names["scale"]], arrays.get(parts.names.get("offset", ""))
        groups, stored = scale.shape[-1], arrays[name].shape[-1]
        if encoding is None or not groups:
            continue  # loading reports it
        columns = columns_of(matrix[-1], encoding)
        if BITS[encoding] * columns == 8 * stored:  # else loading reports the shapes
            found[name] = PackedLayout(
                encoding=encoding,
                group=columns // groups,
                shape=matrix,
                is_transposed=parts.is_transposed,
                scale_bytes=scale.dtype.itemsize,
                offset_bytes=0 if offset is None else offset.dtype.itemsize,
            )
    return found
