"""Published models by name: the configs in this folder, which benchmarks measure with random weights and tests plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

FOLDER = Path(__file__).parent


def fields_of(name: str, **changes: Any) -> dict[str, Any]:
    """The fields of a model's config.json that determine its shapes, some of them changed.

    Args:
        name: such as "llama-3-8b"; a file of this folder.
        **changes: fields to replace, such as `num_hidden_layers`.
    """
    return json.loads((FOLDER / f"{name}.json").read_text()) | changes


def config_of(name: str, **changes: Any) -> PretrainedConfig:
    """The config of a model; see `fields_of`."""
    fields = fields_of(name, **changes)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)
