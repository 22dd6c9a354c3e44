"""GPTQ: `qweight`, `qzeros` and `scales` of AutoGPTQ and GPTQModel, with 2, 3, 4 or 8 bits.

Codes are packed along inputs, zeros along outputs: `w[i, o] = scales[g, o] * (q[i, o] - z[g, o])` with `g = g_idx[i]`. Files of the
first version ("gptq") store `z - 1`, those of the second ("gptq_v2") `z`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch

from hfax.load.formats.parts import (
    by_module,
    need,
    need_shape,
    order_of,
    packed_weight,
    refused,
    scale_bytes,
    spread,
    width_of_groups,
)
from hfax.load.formats.unpacking import from_words, signed
from hfax.load.packed import Encoding, PackedTensor, StoredWeight
from hfax.load.store import TensorStore

logger = logging.getLogger(__name__)

_WIDTHS = (2, 3, 4, 8)
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""A word with 1 in each of its codes."""


def find(options: Mapping[str, Any], store: TensorStore) -> dict[str, StoredWeight]:
    """The weights that have a `qweight`.

    Args:
        options: the config's `quantization_config`.
        store: the checkpoint's tensors.
    """
    version = str(options.get("checkpoint_format") or "gptq")
    if options.get("is_marlin_format"):
        version = "marlin"
    if version not in ("gptq", "gptq_v2"):
        raise refused(f"The checkpoint's GPTQ format is {version!r}.", "hfax reads 'gptq' and 'gptq_v2'.")
    found = by_module(store.names, ("qweight", "qzeros", "scales", "g_idx"))
    found = {module: parts for module, parts in found.items() if parts.keys() != {"scales"}}
    return {f"{module}.weight": _weight(store, module, parts, options) for module, parts in found.items()}


def _option(options: Mapping[str, Any], module: str, name: str) -> Any:
    """An option of a module: `dynamic` has others than the config's for modules that match a pattern."""
    for pattern, others in (options.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), module):
            return others.get(name, options.get(name))
    return options.get(name)


def _weight(store: TensorStore, module: str, parts: Mapping[str, str], options: Mapping[str, Any]) -> StoredWeight:
    qweight, qzeros, scales = need(parts, module, "qweight", "qzeros", "scales")
    bits, size = _option(options, module, "bits"), _option(options, module, "group_size")
    if bits not in _WIDTHS:
        raise refused(
            f"{module!r} has GPTQ weights of {bits} bits.", f"hfax reads {', '.join(map(str, _WIDTHS))} bits."
        )
    words, rows = store.shape(qweight)
    width = words * 32 // bits
    size = width if size is None or size <= 0 else min(int(size), width)
    groups = -(-width // size)
    need_shape(store, scales, (groups, rows))
    need_shape(store, qzeros, (groups, -(-rows * bits // 32)))
    order = parts.get("g_idx")
    if order is not None:
        need_shape(store, order, (width,))
    encoding: Encoding = "int4" if bits <= 4 else "int8"
    half, shape, block = 1 << (bits - 1), (rows, width), (1, size)

    def read() -> PackedTensor:
        columns = None if order is None else order_of(store.read(order), size, order)
        codes = signed(from_words(store.read(qweight).T.contiguous(), bits, width), bits)
        scale = store.read(scales).T.contiguous()
        zeros = zeros_of(store.read(qzeros), bits, rows, options, qzeros).T.float() - half
        offset = None if not zeros.any() else spread(-zeros * scale.float(), block, shape)
        return PackedTensor(
            encoding=encoding,
            codes=codes if columns is None else codes[:, columns],
            scale=spread(scale, block, shape),
            offset=offset,
            columns=columns,
        )

    of_groups: Any = {"scale_bytes": scale_bytes(store, scales), "has_offset": not options.get("sym", True)}
    return packed_weight(parts.values(), encoding, shape, width_of_groups(size, width), read, **of_groups)


def zeros_of(words: torch.Tensor, bits: int, rows: int, options: Mapping[str, Any], name: str) -> torch.Tensor:
    """[groups, rows] zeros.

    Symmetric weights have half the range as zero, so that the file says itself which version it is: some of the second version are
    labelled as the first.

    Args:
        words: [groups, rows * bits / 32] int32.
        bits: of a code.
        rows: of the weight.
        options: the config's `quantization_config`.
        name: of the tensor, for the log.
    """
    stored, half = from_words(words, bits, rows), 1 << (bits - 1)
    is_first = str(options.get("checkpoint_format") or "gptq") == "gptq"
    if options.get("sym", True) and bool((stored == half - (not is_first)).all()):
        logger.info("%s has zeros of the other version of GPTQ's format than the config says", name)
        return stored + (not is_first)
    if not is_first:
        return stored
    if bits == 3:
        return (stored + 1) & 7
    # Producers subtract from whole words, with a borrow from the next code; so this adds to whole words.
    return from_words((words.long() + _ONES[bits]).to(torch.int32), bits, rows)
