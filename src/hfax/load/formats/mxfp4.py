"""MXFP4 as gpt-oss has it: experts' matrices as blocks of 32 FP4 values with a power of two each.

`gate_up_proj_blocks` is [experts, out, in / 32, 16] uint8, `gate_up_proj_scales` [experts, out, in / 32] uint8; the module holds
the transpose, [experts, in, out] (transformers' `convert_moe_packed_tensors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hfax.load.formats.parts import as_scale, misfit, need_shape
from hfax.load.formats.unpacking import from_bytes
from hfax.load.packed import PackedLayout, PackedTensor, StoredWeight
from hfax.load.store import TensorStore

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32


def find(options: Mapping[str, Any], store: TensorStore) -> dict[str, StoredWeight]:
    """The experts' matrices.

    Args:
        options: the config's `quantization_config`.
        store: the checkpoint's tensors.
    """
    names = set(store.names)
    stems = {name.removesuffix(end) for name in names for end in (_BLOCKS, _SCALES) if name.endswith(end)}
    return {stem: _weight(store, stem, names) for stem in sorted(stems)}


def _weight(store: TensorStore, stem: str, names: set[str]) -> StoredWeight:
    blocks, scales = stem + _BLOCKS, stem + _SCALES
    for name, other in ((blocks, scales), (scales, blocks)):
        if name not in names:
            raise misfit(other, f"is stored without {name!r}", "both")
    shape = store.shape(blocks)
    if len(shape) != 4 or shape[-1] != 16 or store.dtype(blocks) != torch.uint8:
        raise misfit(
            blocks, f"has shape {shape} and dtype {store.dtype(blocks)}", "uint8 of shape [experts, out, in / 32, 16]"
        )
    need_shape(store, scales, shape[:-1])
    experts, rows, groups, _ = shape
    matrix = (experts, rows, groups * _GROUP)

    def read() -> PackedTensor:
        codes = from_bytes(store.read(blocks), 4).reshape(matrix)
        return PackedTensor(encoding="fp4", codes=codes, scale=as_scale(store.read(scales)), is_transposed=True)

    layout = PackedLayout(encoding="fp4", group=_GROUP, shape=matrix, is_transposed=True)
    return StoredWeight(parts=(blocks, scales), shape=(experts, matrix[2], rows), layout=layout, read=read)
