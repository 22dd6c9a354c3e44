"""compressed-tensors, the format of llm-compressor: each group of the config says how the modules that it targets are stored.

Float- and int-quantized weights are stored one code an element, pack-quantized ones as a dense stream of codes plus half their
range, NVFP4 and MXFP4 two in each byte. Activations' scales are not used: like transformers with `dequantize=True`, hfax leaves
activations as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from hfax.load.formats.fp8 import scaled_weight
from hfax.load.formats.parts import (
    as_grid,
    as_scale,
    block_of,
    by_module,
    misfit,
    need,
    need_shape,
    order_of,
    packed_weight,
    refused,
    scale_bytes,
    scaled_codes,
    spread,
    width_of_groups,
)
from hfax.load.formats.unpacking import from_bytes, from_padded_words, from_words
from hfax.load.packed import Encoding, PackedTensor, StoredWeight
from hfax.load.store import TensorStore

_PACKED = "weight_packed"
_ENDINGS = (
    "weight",
    _PACKED,
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "weight_g_idx",
)
_UNPACKED_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "mxfp8-quantized")


def find(options: Mapping[str, Any], store: TensorStore) -> dict[str, StoredWeight]:
    """The weights that have scales.

    Args:
        options: the config's `quantization_config`.
        store: the checkpoint's tensors.
    """
    if options.get("transform_config"):
        raise refused(
            "The checkpoint's activations are transformed while the model runs (transform_config).",
            "hfax reads weights, and applies no transforms.",
        )
    if (options.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise refused(
            f"The checkpoint is sparse ({options['sparsity_config']['format']}).", "hfax reads no sparse weights."
        )
    found: dict[str, StoredWeight] = {}
    for module, parts in by_module(store.names, _ENDINGS).items():
        if parts.keys() == {"weight"}:
            continue
        scheme = _scheme_of(module, options)
        weight = _weight(store, module, parts, scheme)
        found[f"{module}.weight"] = weight
    return found


def _scheme_of(module: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights' arguments for a module, with the format under "format"."""
    groups = list((options.get("config_groups") or {}).values())
    named = [g for g in groups if any(_matches(module, target) for target in g.get("targets", ()))]
    by_class = [g for g in groups if any(not t.startswith("re:") and "." not in t for t in g.get("targets", ()))]
    chosen = next(iter(named or by_class or groups), None)
    if not chosen or not chosen.get("weights"):
        raise refused(f"No group of the config's config_groups says how {module!r} is quantized.", "Its tensors are.")
    return {**chosen["weights"], "format": chosen.get("format") or options.get("format")}


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target or ("." in target and module.endswith(f".{target}"))


def _weight(store: TensorStore, module: str, parts: Mapping[str, str], scheme: Mapping[str, Any]) -> StoredWeight:
    stored_as = scheme["format"]
    if stored_as == "pack-quantized":
        return _pack_quantized(store, module, parts, scheme)
    if stored_as == "nvfp4-pack-quantized":
        return nvfp4(store, *need(parts, module, _PACKED, "weight_scale", "weight_global_scale"), divides=True)
    if stored_as == "mxfp4-pack-quantized":
        packed, scale = need(parts, module, _PACKED, "weight_scale")
        return scaled_weight(store, packed, scale)
    if stored_as in _UNPACKED_FORMATS:
        return _unpacked(store, module, parts, scheme)
    known = ", ".join(("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", *_UNPACKED_FORMATS))
    raise refused(f"{module!r} is stored in compressed-tensors' format {stored_as!r}.", f"hfax reads {known}.")


def nvfp4(store: TensorStore, packed: str, scale: str, whole: str, *, divides: bool) -> StoredWeight:
    """A weight in NVFP4: two FP4 values in each byte, a float8 scale for 16 columns and a float32 for the matrix.

    Args:
        store: the checkpoint's tensors.
        packed: name of the values.
        scale: name of the scales of groups.
        whole: name of the matrix's scale.
        divides: whether it divides the groups' scales; else it multiplies them.

    Raises:
        CheckpointCorruptError: the scales do not fit the weight.
    """
    *rows, half = store.shape(packed)
    shape = (*rows, 2 * half)
    need_shape(store, scale, (*rows, 2 * half // 16))
    need_shape(store, whole, (), (1,), tuple(rows[:-1]))

    def scales() -> torch.Tensor:
        groups, matrix = store.read(scale).float(), store.read(whole).float()
        matrix = matrix.reshape(*rows[:-1], 1, 1) if matrix.numel() > 1 else matrix.reshape(())
        return groups / matrix if divides else groups * matrix

    return scaled_codes(
        parts=(packed, scale, whole),
        encoding="fp4",
        shape=shape,
        codes=lambda: from_bytes(store.read(packed).contiguous().view(torch.uint8), 4),
        scale=scales,
        block=(1, 16),
        scale_bytes=4,
    )


def _unpacked(store: TensorStore, module: str, parts: Mapping[str, str], scheme: Mapping[str, Any]) -> StoredWeight:
    weight, scale = need(parts, module, "weight", "weight_scale")
    stored = store.dtype(weight)
    if stored is not None and stored.is_floating_point and stored.itemsize > 1:
        raise refused(
            f"{weight!r} is stored as {stored} beside its scales (quantization_status is not 'compressed').",
            "Such weights are rounded while the model runs, which hfax does not do.",
        )
    block = scheme.get("block_structure")
    if stored != torch.int8:
        return scaled_weight(store, weight, scale, block)
    shape = store.shape(weight)
    shared = block_of(store, scale, shape, block)
    if (zero := parts.get("weight_zero_point")) is None:
        return scaled_codes(
            parts=(weight, scale),
            encoding="int8",
            shape=shape,
            codes=lambda: store.read(weight),
            scale=lambda: store.read(scale),
            block=shared,
            scale_bytes=scale_bytes(store, scale),
        )
    need_shape(store, zero, store.shape(scale))

    def read() -> PackedTensor:
        scales = as_grid(as_scale(store.read(scale)), shape)
        offset = -as_grid(store.read(zero).float(), shape) * scales.float()
        return PackedTensor(
            encoding="int8",
            codes=store.read(weight),
            scale=spread(scales, shared, shape),
            offset=spread(offset, shared, shape),
        )

    group = width_of_groups(shared[1], shape[-1])
    of_groups: Any = {"scale_bytes": scale_bytes(store, scale), "has_offset": True}
    return packed_weight((weight, scale, zero), "int8", shape, group, read, **of_groups)


def _pack_quantized(
    store: TensorStore, module: str, parts: Mapping[str, str], scheme: Mapping[str, Any]
) -> StoredWeight:
    packed, scale, *others = need(
        parts, module, _PACKED, "weight_scale", *([] if scheme.get("symmetric", True) else ["weight_zero_point"])
    )
    zero, order = next(iter(others), None), parts.get("weight_g_idx")
    bits, size = int(scheme["num_bits"]), scheme.get("group_size")
    if scheme.get("actorder") in (True, "group") and order is None:
        raise misfit(packed, "has no weight_g_idx", "the group of each column, for actorder='group'")
    shape = _shape(store, parts, packed, scale, bits, size)
    rows, width = shape
    shared = (1, int(size)) if size and order is not None else block_of(store, scale, shape)
    read_codes = _reader(store, packed, bits, width)
    encoding: Encoding = "int4" if bits <= 4 else "int8"
    half = 1 << (bits - 1)

    def read() -> PackedTensor:
        scales = as_grid(as_scale(store.read(scale)), shape)
        codes = (read_codes().short() - half).to(torch.int8)
        columns = None if order is None else order_of(store.read(order), shared[1], order)
        offset = None
        if zero is not None:
            zeros = _zeros(store.read(zero), bits, rows).float() - half
            offset = spread(-zeros * scales.float(), shared, shape)
        return PackedTensor(
            encoding=encoding,
            codes=codes if columns is None else codes[:, columns],
            scale=spread(scales, shared, shape),
            offset=offset,
            columns=columns,
        )

    names = tuple(parts[e] for e in _ENDINGS if e in parts)
    of_groups: Any = {"scale_bytes": scale_bytes(store, scale), "has_offset": zero is not None}
    return packed_weight(names, encoding, shape, width_of_groups(shared[1], width), read, **of_groups)


def _shape(
    store: TensorStore, parts: Mapping[str, str], packed: str, scale: str, bits: int, size: int | None
) -> tuple[int, int]:
    rows, words = store.shape(packed)
    if (stored := parts.get("weight_shape")) is not None:
        found = tuple(int(n) for n in store.read(stored))
        if len(found) != 2 or found[0] != rows:
            raise misfit(stored, f"is {found}", f"the shape of {packed!r}, which has {rows} rows")
        return found
    if size and size > 0:
        return rows, store.shape(scale)[-1] * int(size)
    return rows, words * 32 // bits


def _reader(store: TensorStore, packed: str, bits: int, width: int) -> Any:
    """Reads codes from a dense stream, or from words with unused bits, as versions before 0.14 wrote 3, 5, 6 and 7 bits."""
    words = store.shape(packed)[-1]
    if words == -(-width * bits // 32):
        return lambda: from_words(store.read(packed), bits, width)
    if words == -(-width // (32 // bits)):
        return lambda: from_padded_words(store.read(packed), bits, width)
    raise misfit(packed, f"has {words} words in a row", f"{-(-width * bits // 32)} for {width} codes of {bits} bits")


def _zeros(words: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    """[rows, groups] zero points, which are packed along the rows."""
    flipped = words.T.contiguous()
    dense = flipped.shape[-1] == -(-rows * bits // 32)
    return (from_words if dense else from_padded_words)(flipped, bits, rows).T
