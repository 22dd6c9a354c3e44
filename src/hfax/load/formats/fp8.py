"""FP8: float8 weights with scales of blocks, rows or whole matrices, which multiply them whatever they are called.

DeepSeek, Qwen and transformers call the scales `weight_scale_inv`, DeepSeek-V4 `scale`, Mistral `qscale_weight`, FBGEMM and Quark
`weight_scale`. Scales stored as exponents (ue8m0) are powers of two. DeepSeek-V4's experts are FP4, two values in each int8, with
scales of 32 columns (MXFP4), and so are Quark's MXFP4 weights. transformers reads all of them with its operation `Fp8Dequantize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hfax.load.formats.parts import (
    as_grid,
    as_scale,
    block_of,
    misfit,
    need_shape,
    refused,
    scale_bytes,
    scaled_codes,
    spread,
)
from hfax.load.formats.unpacking import from_bytes
from hfax.load.packed import StoredWeight
from hfax.load.store import TensorStore

_SUFFIXES = {"_scale_inv": "", ".qscale_weight": ".weight", ".weight_scale": ".weight", ".scale": ".weight"}
"""Suffix of scales, mapped to the weight's instead of it."""

_FP4_BLOCK = 32

_QUARK = ("fp8_e4m3", "fp4")


def find(options: Mapping[str, Any], store: TensorStore) -> dict[str, StoredWeight]:
    """The weights that have scales.

    Args:
        options: the config's `quantization_config`.
        store: the checkpoint's tensors.
    """
    if options.get("quant_method") == "quark":
        _check_quark(options)
    names = set(store.names)
    found: dict[str, StoredWeight] = {}
    for scale in sorted(names):
        suffix = next((suffix for suffix in _SUFFIXES if scale.endswith(suffix)), None)
        if suffix is None:
            continue
        weight = scale.removesuffix(suffix) + _SUFFIXES[suffix]
        if weight in names and store.dtype(weight) in _QUANTIZED:
            found[weight] = scaled_weight(store, weight, scale, options.get("weight_block_size"))
        elif suffix != ".scale":
            raise misfit(scale, f"is a scale, and {weight!r} is missing or not quantized", "both")
    return found


def scaled_weight(
    store: TensorStore, weight: str, scale: str, block: tuple[int, int] | list[int] | None = None
) -> StoredWeight:
    """One weight in FP8, or FP4 with scales of 32 columns.

    Args:
        store: the checkpoint's tensors.
        weight: name of its values.
        scale: name of its scales.
        block: rows and columns that share a scale, if the config has them.

    Raises:
        CheckpointCorruptError: the scales do not fit the weight.
    """
    stored = store.dtype(weight)
    if stored in (torch.int8, torch.uint8):
        *rows, half = store.shape(weight)
        shape = (*rows, 2 * half)
        need_shape(store, scale, (*rows, 2 * half // _FP4_BLOCK))
        return scaled_codes(
            parts=(weight, scale),
            encoding="fp4",
            shape=shape,
            codes=lambda: from_bytes(store.read(weight).contiguous().view(torch.uint8), 4),
            scale=lambda: store.read(scale),
            block=(1, _FP4_BLOCK),
            scale_bytes=scale_bytes(store, scale),
        )
    shape = store.shape(weight)
    shared = block_of(store, scale, shape, block)
    if stored == torch.float8_e4m3fn:
        return scaled_codes(
            parts=(weight, scale),
            encoding="fp8",
            shape=shape,
            codes=lambda: store.read(weight),
            scale=lambda: store.read(scale),
            block=shared,
            scale_bytes=scale_bytes(store, scale),
        )

    def read() -> torch.Tensor:
        scales = spread(as_grid(as_scale(store.read(scale)), shape).float(), shared, shape)
        return (store.read(weight).float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)

    return StoredWeight(parts=(weight, scale), shape=shape, layout=None, read=read)


_QUANTIZED = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.uint8,
)


def _check_quark(options: Mapping[str, Any]) -> None:
    """Raise unless all weights are in FP8 or MXFP4."""
    layers = [options.get("global_quant_config"), *(options.get("layer_quant_config") or {}).values()]
    for layer in layers:
        weight = (layer or {}).get("weight") or {}
        if isinstance(weight, Mapping) and weight and weight.get("dtype") not in _QUARK:
            raise refused(
                f"The checkpoint is quantized by Quark to {weight.get('dtype')!r}.",
                f"hfax reads Quark's {' and '.join(_QUARK)}.",
            )
