"""Multiplications and additions per token, counted from a model's structure."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from hfax.load.quantize import weights_to_quantize
from hfax.load.skeleton import Skeleton
from hfax.sharding.mesh import attention_heads, num_experts


def used_numbers(skeleton: Skeleton) -> dict[str, float]:
    """Values per matrix that a token is multiplied with; for experts, only the routed share."""
    config = skeleton.module.config
    text: Any = config.get_text_config(decoder=True)
    experts, chosen = num_experts(config), getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k", None)
    share = chosen / experts if experts and isinstance(chosen, int) else 1.0
    used = weights_to_quantize(skeleton.module, skeleton.shapes, skeleton.tied)  # those of linear layers and experts
    return {name: skeleton.shapes[name].numel() * (share if skeleton.shapes[name].ndim == 3 else 1.0) for name in used}


def operations_per_token(skeleton: Skeleton) -> float:
    """Operations per token of a forward pass: two per multiplied value; attention is not counted."""
    return 2 * sum(used_numbers(skeleton).values())


def attention_per_pair(config: PretrainedConfig, layers: int) -> float:
    """Operations for each pair of a query and a key in `layers` layers: two products over all heads."""
    text: Any = config.get_text_config(decoder=True)
    heads, _ = attention_heads(config)
    width = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    return 4.0 * layers * (heads or 0) * width
