"""ModelOpt, the format of NVIDIA's checkpoints: FP8 with one scale a matrix, and NVFP4 (`weight_scale_2` multiplies)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hfax.load.formats.compressed_tensors import nvfp4
from hfax.load.formats.fp8 import scaled_weight
from hfax.load.formats.parts import by_module, need, refused
from hfax.load.packed import StoredWeight
from hfax.load.store import TensorStore


def find(options: Mapping[str, Any], store: TensorStore) -> dict[str, StoredWeight]:
    """The weights that have scales.

    Args:
        options: the config's `quantization_config`.
        store: the checkpoint's tensors.
    """
    found = by_module(store.names, ("weight", "weight_scale", "weight_scale_2", "pre_quant_scale"))
    return {
        f"{module}.weight": _weight(store, module, parts)
        for module, parts in found.items()
        if parts.keys() != {"weight"}
    }


def _weight(store: TensorStore, module: str, parts: Mapping[str, str]) -> StoredWeight:
    if "pre_quant_scale" in parts:
        raise refused(
            f"{module!r} scales its inputs ({parts['pre_quant_scale']}).",
            "The model's class has no such scales, and hfax adds none.",
        )
    weight, scale = need(parts, module, "weight", "weight_scale")
    if store.dtype(weight) == torch.uint8:
        return nvfp4(store, *need(parts, module, "weight", "weight_scale", "weight_scale_2"), divides=False)
    if store.dtype(weight) == torch.float8_e4m3fn:
        return scaled_weight(store, weight, scale)
    raise refused(f"{weight!r} is stored as {store.dtype(weight)}.", "hfax reads ModelOpt's FP8 and NVFP4.")
