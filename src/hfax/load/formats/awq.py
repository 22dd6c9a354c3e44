"""AWQ: 4-bit weights of AutoAWQ, in the layouts of its kernels "gemm" and "gemv"; `w = (q - z) * scale`.

"gemm" packs eight outputs in each word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits up; "gemv" packs eight inputs, in
order, and pads zeros and scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hfax.load.formats.parts import (
    by_module,
    misfit,
    need,
    need_shape,
    packed_weight,
    refused,
    spread,
    width_of_groups,
)
from hfax.load.formats.unpacking import from_words, signed
from hfax.load.packed import PackedTensor, StoredWeight
from hfax.load.store import TensorStore

_GEMM_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of its eight outputs."""


def find(options: Mapping[str, Any], store: TensorStore) -> dict[str, StoredWeight]:
    """The weights that have a `qweight`.

    Args:
        options: the config's `quantization_config`.
        store: the checkpoint's tensors.
    """
    bits = int(options.get("bits", options.get("w_bit", 4)))
    version = str(options.get("version") or options.get("format") or "gemm").lower()
    if bits != 4 or version not in ("gemm", "gemv"):
        raise refused(
            f"The checkpoint has AWQ weights of {bits} bits for the kernel {version!r}.",
            "hfax reads 4 bits in the layouts 'gemm' and 'gemv'.",
        )
    scaled = [name for name in store.names if name.endswith("act.scales") or name.endswith("gelu_impl.scales")]
    if scaled:
        raise refused(
            f"The checkpoint scales activations ({scaled[0]}).",
            "The model's class has no such scales, and hfax adds none.",
        )
    found = by_module(store.names, ("qweight", "qzeros", "scales"))
    found = {module: parts for module, parts in found.items() if parts.keys() != {"scales"}}
    size = int(options.get("group_size", options.get("q_group_size", 128)))
    make = _gemm if version == "gemm" else _gemv
    return {
        f"{module}.weight": make(store, need(parts, module, "qweight", "qzeros", "scales"), size)
        for module, parts in found.items()
    }


def _gemm(store: TensorStore, parts: tuple[str, ...], size: int) -> StoredWeight:
    qweight, qzeros, scales = parts
    width, words = store.shape(qweight)
    rows, size = words * 8, width if size <= 0 else size
    if width % size:
        raise misfit(qweight, f"has {width} inputs", f"a multiple of the group size, {size}")
    need_shape(store, qzeros, (width // size, words))
    need_shape(store, scales, (width // size, rows))

    def codes(name: str) -> torch.Tensor:
        places = from_words(store.read(name), 4, rows).unflatten(-1, (-1, 8))
        return places[..., _GEMM_ORDER].flatten(-2).T

    return _weight(parts, (rows, width), size, codes, lambda: store.read(scales).T.contiguous())


def _gemv(store: TensorStore, parts: tuple[str, ...], size: int) -> StoredWeight:
    qweight, qzeros, scales = parts
    rows, words = store.shape(qweight)
    width = words * 8
    size = width if size <= 0 else size
    groups, padded = width // size, store.shape(qzeros)[-1] * 8
    if width % size or padded < groups:
        raise misfit(qzeros, f"has shape {store.shape(qzeros)}", f"zeros for {width} inputs in groups of {size}")
    need_shape(store, qzeros, (rows, padded // 8))
    need_shape(store, scales, (rows, padded))

    def codes(name: str) -> torch.Tensor:
        return from_words(store.read(name), 4, width if name == qweight else groups)

    return _weight(parts, (rows, width), size, codes, lambda: store.read(scales)[:, :groups])


def _weight(parts: tuple[str, ...], shape: tuple[int, int], size: int, codes: Any, scales: Any) -> StoredWeight:
    qweight, qzeros, _ = parts

    def read() -> PackedTensor:
        scale = scales()
        offset = (8 - codes(qzeros).float()) * scale.float()
        return PackedTensor(
            encoding="int4",
            codes=signed(codes(qweight).contiguous(), 4),
            scale=spread(scale, (1, size), shape),
            offset=spread(offset, (1, size), shape) if offset.any() else None,
        )

    group = width_of_groups(size, shape[1])
    return packed_weight(parts, "int4", shape, group, read, scale_bytes=2, has_offset=True)
