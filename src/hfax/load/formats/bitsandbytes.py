"""bitsandbytes: NF4 and FP4 with scales of blocks of a matrix's numbers in order, and int8 with a scale for each row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from hfax.load.formats.parts import by_module, misfit, need, need_shape, scaled_codes
from hfax.load.packed import StoredWeight
from hfax.load.store import TensorStore

_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_STATE_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *_STATES)


def find(options: Mapping[str, Any], store: TensorStore) -> dict[str, StoredWeight]:
    """The weights that have a state, or scales of rows.

    Args:
        options: the config's `quantization_config`.
        store: the checkpoint's tensors.
    """
    names = set(store.names)
    found = {name: _four_bits(store, name, parts, names) for name, parts in by_module(names, _STATE_PARTS).items()}
    for module, parts in by_module(names, ("SCB", "weight_format")).items():
        found[f"{module}.weight"] = _eight_bits(store, module, parts, names)
    return found


def _eight_bits(store: TensorStore, module: str, parts: Mapping[str, str], names: set[str]) -> StoredWeight:
    weight = f"{module}.weight"
    stored = dict(parts) | ({"weight": weight} if weight in names else {})
    weight, scale = need(stored, module, "weight", "SCB")
    shape = store.shape(weight)
    if store.dtype(weight) != torch.int8 or len(shape) != 2:
        raise misfit(weight, f"has shape {shape} and dtype {store.dtype(weight)}", "an int8 matrix")
    need_shape(store, scale, shape[:1])
    return scaled_codes(
        parts=stored.values(),
        encoding="int8",
        shape=shape,
        codes=lambda: store.read(weight),
        scale=lambda: store.read(scale).float() * 7.874015718698502e-3,  # 1 / 127, as in bitsandbytes
        block=(1, shape[1]),
        scale_bytes=4,
    )


def _four_bits(store: TensorStore, name: str, parts: Mapping[str, str], names: set[str]) -> StoredWeight:
    key = next((key for key in _STATES if key in parts), _STATES[0])
    state_name, absmax, quant_map = need(parts, name, key, "absmax", "quant_map")
    if name not in names:
        raise misfit(state_name, f"is stored without {name!r}", "both")
    try:
        state = json.loads(bytes(store.read(state_name).tolist()))
        shape, block = tuple(map(int, state["shape"])), int(state["blocksize"])
        dtype = getattr(torch, state["dtype"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"is not a state ({type(error).__name__}: {error})"
        raise misfit(state_name, why, "JSON with shape, blocksize and dtype") from error
    is_nested = "nested_absmax" in parts or "nested_quant_map" in parts
    if is_nested:
        need(parts, name, "nested_absmax", "nested_quant_map")
    count = math.prod(shape)
    need_shape(store, absmax, (-(-count // block),))
    stored = store.dtype(name)
    num_bytes = math.prod(store.shape(name)) * (stored.itemsize if stored is not None else 1)
    if num_bytes != -(-count // 2):
        raise misfit(name, f"has {num_bytes} bytes", f"{-(-count // 2)} for a weight of shape {shape}")

    def scales() -> torch.Tensor:
        found = store.read(absmax)
        if not is_nested:
            return found.float()
        mapped = store.read(parts["nested_quant_map"]).float()[found.int()]
        whole = store.read(parts["nested_absmax"]).float()
        return mapped * whole.repeat_interleave(state["nested_blocksize"])[: len(mapped)] + state["nested_offset"]

    def read() -> torch.Tensor:
        packed = store.read(name).contiguous().view(torch.uint8).flatten()  # any storage dtype holds the same bytes
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[:count]
        numbers = store.read(quant_map).float()[codes.int()]
        padded = torch.nn.functional.pad(numbers, (0, -count % block)).unflatten(0, (-1, block))
        return (padded * scales()[:, None]).flatten()[:count].reshape(shape).to(dtype)

    return StoredWeight(parts=(name, *parts.values()), shape=shape, layout=None, read=read)
