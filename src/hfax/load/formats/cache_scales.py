"""Scales of cached keys and values in a quantized checkpoint: a number for the keys of a layer, and one for its values."""

from __future__ import annotations

import logging
import math
import re

from hfax.load.formats.parts import misfit
from hfax.load.store import TensorStore

logger = logging.getLogger(__name__)

_NAMES = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)*?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$")
"""compressed-tensors and FP8 `self_attn.k_scale`, ModelOpt `self_attn.k_proj.k_scale`, Quark `self_attn.k_proj.output_scale`,
old checkpoints `self_attn.kv_scale`."""


def find_scales(store: TensorStore) -> list[tuple[float, float]]:
    """What the keys and the values of each layer are divided by in a cache of float8, up to the last layer that has scales.

    Args:
        store: the checkpoint's tensors.

    Raises:
        CheckpointCorruptError: a scale is not a positive number.
    """
    found: dict[int, dict[str, float]] = {}
    for name in store.names:
        if (match := _NAMES.search(name)) is None:
            continue
        if math.prod(store.shape(name)) != 1:
            logger.warning("%s has a scale for each head, which hfax's KV cache does not use", name)
            return []
        scale = float(store.read(name).float().reshape(()))
        if not (math.isfinite(scale) and scale > 0):
            raise misfit(name, f"is {scale}", "positive scales of keys and values")
        for kind in match.group(2) or match.group(3):
            found.setdefault(int(match.group(1)), {})[kind] = scale
    layers = range(max(found) + 1 if found else 0)
    return [(of.get("k", 1.0), of.get("v", 1.0)) for of in (found.get(layer, {}) for layer in layers)]
