"""torchao's safetensors: integers and float8 with scales of blocks, as the files' own metadata describes them.

Each file has a JSON text for every weight: the class of tensor that it was, and the parts that are stored, under names such as
`layer._weight_qdata` for the weight `layer.weight` (torchao's `prototype/safetensors`). Classes whose layout is that of a GPU's
kernel are refused. Pickles of older versions are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from hfax.load.formats.parts import (
    as_grid,
    misfit,
    need_shape,
    packed_weight,
    refused,
    scale_bytes,
    spread,
    width_of_groups,
)
from hfax.load.packed import Encoding, PackedTensor, StoredWeight
from hfax.load.store import TensorStore

_INTEGERS = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_FLOAT8 = "Float8Tensor"
_PLAIN = "Tensor"
_FOUR_BITS = ("int1", "int2", "int3", "int4")
_PRE_SCALE = "act_pre_scale"


def find(options: Mapping[str, Any], store: TensorStore) -> dict[str, StoredWeight]:
    """The weights that the metadata describes.

    Args:
        options: the config's `quantization_config`.
        store: the checkpoint's tensors.
    """
    found: dict[str, StoredWeight] = {}
    for name, text in store.metadata.items():
        if "." not in name or not text.startswith("{"):
            continue
        try:
            entry = json.loads(text)
            kind, fields = entry["_type"], entry.get("_data") or {}
        except (ValueError, KeyError, TypeError) as error:
            why = f"has metadata that cannot be read ({type(error).__name__}: {error})"
            raise misfit(name, why, "JSON with _type, _data and _tensor_data_names") from error
        if kind != _PLAIN:
            found[name] = _weight(store, name, kind, fields, entry.get("_tensor_data_names") or ())
    if not found:
        raise refused(
            "The checkpoint is quantized with torchao, and its files describe no weight.",
            "hfax reads torchao's safetensors; pickles, and files of versions before 0.13, have no description.",
        )
    return found


def _weight(store: TensorStore, name: str, kind: str, fields: Mapping[str, Any], stored: Any) -> StoredWeight:
    if kind not in (*_INTEGERS, _FLOAT8):
        raise refused(
            f"{name!r} is stored as torchao's {kind}.",
            f"hfax reads {', '.join((*_INTEGERS, _FLOAT8))}; others are packed for one kind of GPU.",
        )
    if _PRE_SCALE in stored:
        raise refused(f"{name!r} has scaled activations ({_PRE_SCALE}).", "hfax multiplies with unscaled ones.")
    module, _, weight = name.rpartition(".")
    parts = {part: f"{module}._{weight}_{part}" for part in stored}
    if lacking := sorted({f"{module}._{weight}_{part}" for part in ("qdata", "scale", *stored)} - set(store.names)):
        raise misfit(name, f"is stored without {', '.join(lacking)}", "all of its parts")
    shape = store.shape(parts["qdata"])
    expected = torch.float8_e4m3fn if kind == _FLOAT8 else torch.int8
    if store.dtype(parts["qdata"]) != expected:
        raise misfit(parts["qdata"], f"is {store.dtype(parts['qdata'])}", str(expected))
    block = _block(name, fields, shape)
    grid = tuple(size // by for size, by in zip(shape, block, strict=True))
    need_shape(store, parts["scale"], grid, *([()] if max(grid) == 1 else []))
    encoding: Encoding = "fp8" if kind == _FLOAT8 else "int4" if _target(fields) in _FOUR_BITS else "int8"
    pair = (block[-2], block[-1])

    def read() -> PackedTensor:
        scale, offset = as_grid(store.read(parts["scale"]), shape), None
        if "zero_point" in parts:
            zeros = as_grid(store.read(parts["zero_point"]), shape).float()
            offset = spread(-zeros * scale.float(), pair, shape) if zeros.any() else None
        scale = spread(scale, pair, shape)
        return PackedTensor(encoding=encoding, codes=store.read(parts["qdata"]), scale=scale, offset=offset)

    # what else is stored is of activations, which keep the model's dtype
    of_groups: Any = {"scale_bytes": scale_bytes(store, parts["scale"]), "has_offset": "zero_point" in parts}
    return packed_weight(parts.values(), encoding, shape, width_of_groups(block[-1], shape[-1]), read, **of_groups)


def _block(name: str, fields: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Rows and columns that share a scale."""
    given = fields.get("block_size")
    found = tuple(given) if isinstance(given, list) else ()
    is_matrix = len(found) == len(shape) >= 2 and all(isinstance(by, int) and by > 0 for by in found)
    if not is_matrix or any(size % by for size, by in zip(shape, found, strict=True)) or set(found[:-2]) - {1}:
        raise misfit(name, f"has blocks of {given} in a matrix of {list(shape)}", "blocks that divide it")
    return found


def _target(fields: Mapping[str, Any]) -> str:
    """The integers that codes stand for: "int4" where they are stored one to a byte, say."""
    target = fields.get("target_dtype") or {}
    return str(target.get("_data", "int8")) if isinstance(target, Mapping) else "int8"
