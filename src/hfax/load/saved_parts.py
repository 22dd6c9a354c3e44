"""Names of a quantized weight's arrays in a checkpoint that hfax saved: the codes have the weight's name, the rest a suffix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from hfax.kernels.encodings import BITS, Encoding
from hfax.kernels.quantized import QuantizedArray
from hfax.load.packed import PackedLayout

_SUFFIXES = {"scale": "_scale", "offset": "_offset", "columns": "_columns"}
_FP4_SCALE = "_fp4_scale"
"""Instead of `_scale`, since codes of 4 bits have one dtype whatever they mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedParts:
    """Where a quantized weight's arrays are stored.

    Args:
        names: by field of `QuantizedArray`.
        encoding: "fp4"; None: as the dtype of the codes says.
    """

    names: Mapping[str, str]
    encoding: Encoding | None


def names_of(name: str, array: QuantizedArray) -> dict[str, str]:
    """Names under which to store the arrays that a weight has, by field."""
    suffixes = _SUFFIXES | ({"scale": _FP4_SCALE} if array.encoding == "fp4" else {})
    return {"values": name} | {f: name + suffix for f, suffix in suffixes.items() if getattr(array, f) is not None}


def saved_parts(weights: Iterable[str], stored: Collection[str]) -> dict[str, SavedParts]:
    """The quantized ones among a model's weights, by name.

    Args:
        weights: their names.
        stored: names of the stored arrays.
    """
    found: dict[str, SavedParts] = {}
    for name in weights:
        is_fp4 = name + _FP4_SCALE in stored
        if not is_fp4 and name + _SUFFIXES["scale"] not in stored:
            continue
        suffixes = _SUFFIXES | ({"scale": _FP4_SCALE} if is_fp4 else {})
        names = {field: name + suffix for field, suffix in suffixes.items() if name + suffix in stored}
        found[name] = SavedParts(names={"values": name} | names, encoding="fp4" if is_fp4 else None)
    return found


def saved_layouts(
    weights: Mapping[str, tuple[int, ...]], stored: Collection[str], shape: Callable[[str], tuple[int, ...]]
) -> dict[str, PackedLayout]:
    """How the quantized weights are packed, by name; "fp8" is given as "int8", which is packed alike.

    Args:
        weights: shapes of the model's weights.
        stored: names of the stored arrays.
        shape: of a stored array.
    """
    found: dict[str, PackedLayout] = {}
    for name, parts in saved_parts(weights, stored).items():
        width, groups = weights[name][-1], shape(parts.names["scale"])[-1]
        by_width: Encoding = "int8" if shape(name)[-1] == width else "int4"
        encoding = parts.encoding or by_width
        if groups and BITS[encoding] * width == 8 * shape(name)[-1]:  # else loading reports the shapes
            found[name] = PackedLayout(encoding=encoding, group=width // groups, shape=weights[name])
    return found
