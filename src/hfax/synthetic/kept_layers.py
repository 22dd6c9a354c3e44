"""Which layers a small copy of a model keeps, from the fields of its config.

Turns the fields into indices of layers: the first of each kind, where kinds are given by lists with an entry per layer, by periods,
or by first indices and counts.
"""

from __future__ import annotations

import re
from typing import Any

LAYER_COUNTS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|(encoder|decoder|speech_encoder|t2u_encoder|t2u_decoder)_layers|depth|layers"
    r"|num_decoder_layers|encoder_depth|num_encoder_layers|mit_num_hidden_layers|decoder_num_hidden_layers|text_layers"
    r"|encoder_num_hidden_layers|num_spatial_layers|num_temporal_layers|num_auxiliary_layers|num_global_layers|resampler_depth"
    r"|memory_attention_num_layers|speaker_layers|vision_layers|n_layers_enc|num_layers_(enc|dec)oder)$"
)
"""Names of the fields that count layers."""


def layer_count(fields: dict[str, Any]) -> int | None:
    """The number of layers: a field, or the length of the list of their kinds (Nemotron-H); None if there is neither."""
    count = next((v for n, v in fields.items() if LAYER_COUNTS.match(n) and isinstance(v, int)), None)
    return count or len(fields.get("layers_block_type") or ()) or None


def kept_layers(fields: dict[str, Any]) -> list[int] | None:
    """Indices of the layers to keep: the first of each kind, at least two; None if there is no layer count."""
    if (count := layer_count(fields)) is None:
        return None
    if "block_types" in fields:  # a repeating pattern
        return list(range(min(count, len(fields["block_types"] or "12"))))
    if "attn_layer_period" in fields and not isinstance(fields.get("layers_block_type"), (list, tuple)):
        return list(range(min(count, 4)))
    if len(taken := fields.get("backbone_out_indices") or fields.get("_out_indices") or ()) > 1:
        first = 0 if "backbone_out_indices" in fields else 1
        if all(isinstance(i, int) and 0 <= i - first < count for i in taken) and "depths" not in fields:
            return sorted(i - first for i in taken)  # layers whose outputs are used together
    lists = [v for v in fields.values() if isinstance(v, (list, tuple)) and len(v) == count and count > 3]
    kinds: dict[Any, int] = {}
    for index in range(count):
        kind = tuple(repr(values[index]) for values in lists if _is_categorical(values))
        kind += tuple(_periodic(fields, index))
        kinds.setdefault(kind, index)
    kept = sorted(kinds.values())
    following = [i for i in range(count) if i not in kept]
    while len(kept) < min(2, count):
        kept = sorted([*kept, following.pop(0)])
    return kept


def _is_categorical(values: Any) -> bool:
    return len({repr(v) for v in values}) <= 6


def _periodic(fields: dict[str, Any], index: int) -> list[bool]:
    """Layer kinds that a config gives by a first index or a count instead of a list, one bool each."""
    found: list[bool] = []
    for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_k_dense"):
        if isinstance(fields.get(name), int) and not isinstance(fields.get(name), bool):
            found.append(index < fields[name])
    shared = fields.get("num_kv_shared_layers")
    if isinstance(shared, int) and shared:
        found.append(index >= (layer_count(fields) or 0) - shared)
    return found
