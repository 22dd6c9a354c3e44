"""Scales of cached keys and values, which some quantized checkpoints have for each layer. Independent of the backend.

They are part of the model's config, on which its programs depend: one number for the keys of a layer and one for its values. A
cache of float8 holds keys and values divided by them; one of another dtype does not use them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PretrainedConfig

_FIELD = "kv_cache_scales"


def scales_of(config: PretrainedConfig) -> Iterator[tuple[float, float]]:
    """What the keys and the values of each layer are divided by, without end: 1 where the checkpoint has no scales."""
    given = getattr(config.get_text_config(decoder=True), _FIELD, None) or []
    return itertools.chain(((float(keys), float(values)) for keys, values in given), itertools.repeat((1.0, 1.0)))


def keep_scales(config: PretrainedConfig, scales: Sequence[tuple[float, float]]) -> None:
    """Write the scales of the first layers into a config."""
    text: Any = config.get_text_config(decoder=True)
    setattr(text, _FIELD, [list(each) for each in scales])
