"""Latent attention without expanding the cache: what keys and values are made of is handed to the attention function.

transformers caches DeepSeek's latents, and expands all of them to keys and values of every head in each decoding step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfax.kernels import target
from hfax.kernels.latents import Latents
from hfax.patches import copies
from hfax.patches.masks import AttentionName
from hfax.patches.patch import ForwardPatch, Patch


def _why_not(module: Any) -> str | None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    kind = type(module)
    if not hasattr(kind, "expand_kv"):
        return "it has no latents"
    found = copies.difference(
        kind.expand_kv, DeepseekV3Attention.expand_kv, owner=kind, reference_owner=DeepseekV3Attention
    )
    return None if found is None else f"{found} of {kind.__name__} differs from DeepSeek V3's"


def _handed_over(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def expand_kv(kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
        """Keys that know their latents, and the latents as values; arguments as in the original."""
        projection, attention = module.kv_b_proj, module.config._attn_implementation
        is_more = projection.bias is not None or getattr(projection.forward, "has_adapter", False)
        # models without support for other attention functions (Kimi Linear) run transformers' own, which knows no latents
        if is_more or not isinstance(attention, AttentionName) or target.may_be_differentiated():
            return original(kv_nope, k_rot)
        keys = k_rot.view(k_rot.shape)
        keys.latents = Latents(
            compressed=kv_nope,
            rotated=k_rot,
            weight=projection.weight,
            nope=module.qk_nope_head_dim,
            width=module.v_head_dim,
            expand=lambda: original(kv_nope, k_rot),
        )
        return keys, kv_nope

    return expand_kv


PATCHES: list[Patch] = [
    ForwardPatch(
        name="latent-attention",
        why="DeepSeek's latent attention expands all cached tokens to keys and values of every head in each decoding step",
        classes=(),
        make=_handed_over,
        method="expand_kv",
        only_if=lambda module: hasattr(type(module), "expand_kv"),
        why_not=_why_not,
    ),
]
