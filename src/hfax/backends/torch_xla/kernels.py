"""Attention and experts functions for transformers' interfaces on torch_xla, with shapes that do not depend on values."""

from __future__ import annotations

from typing import Any

import torch

from hfax.patches import masks
from hfax.patches.torch_xla import attention, masked_softmax

NAME = masks.AttentionName("hfax_torch_xla", "sdpa")
ADDITIVE_NAME = masks.AttentionName("hfax_torch_xla_additive", "eager")


def register_interfaces() -> None:
    """Register the functions under hfax's names; transformers looks them up when a model is built."""
    from transformers import masking_utils, modeling_utils
    from transformers.integrations import moe

    for name, mask in ((NAME, masks.attention_mask), (ADDITIVE_NAME, masks.additive_mask)):
        modeling_utils.ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """transformers' attention interface: [batch, heads, length, dim] to [batch, length, heads, dim]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal and (all_real := masks.structure_of(attention_mask).all_real) is not None:
        attention_mask = attention_mask | all_real
    is_alone = attention_mask is None and causal and query.shape[-2] > 1
    if softcap is None and s_aux is None and kwargs.get("position_bias") is None:
        out = attention(query, key, value, attention_mask, is_causal=is_alone, scale=scaling)
        return out.transpose(1, 2), None
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key, value = (a.repeat_interleave(groups, dim=1) if groups > 1 else a for a in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if (bias := kwargs.get("position_bias")) is not None:
        scores = scores + bias.float()
    if is_alone:
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if s_aux is not None:  # a sink takes a share of the probability
        sinks = s_aux.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1).float()
        scores = torch.cat([scores, sinks], dim=-1)
        if attention_mask is not None:
            attention_mask = torch.nn.functional.pad(attention_mask, (0, 1), value=attention_mask.dtype == torch.bool)
    weights = torch.softmax(scores, dim=-1) if attention_mask is None else masked_softmax(scores, attention_mask)
    if s_aux is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(value.dtype), value).transpose(1, 2), None


def experts_forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """transformers' experts interface: every expert runs on every token, weighted by the router.

    One set of operations per expert, with shapes independent of routing; one token reads as much as a dense layer would.

    Args:
        self: a module with `gate_up_proj` or `up_proj` and `down_proj`, [experts, out, in] (or [experts, in, out] if
            `is_transposed`).
        hidden_states: [tokens, width].
        top_k_index: [tokens, k], the experts of each token; indices at or above `num_experts` mean no expert.
        top_k_weights: [tokens, k].

    Returns:
        [tokens, width].
    """
    share = torch.zeros(
        (hidden_states.shape[0], self.num_experts + 1), dtype=top_k_weights.dtype, device=hidden_states.device
    )
    share = share.scatter_add(1, top_k_index.clamp(0, self.num_experts), top_k_weights)[:, : self.num_experts]
    inner = _project(self, "gate_up_proj" if self.has_gate else "up_proj", hidden_states.unsqueeze(0))
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = _project(self, "down_proj", inner)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    return (out * share.t().unsqueeze(-1)).sum(dim=0).to(hidden_states.dtype)


def _project(module: Any, name: str, rows: Any) -> Any:
    """[1 or experts, tokens, in] to [experts, tokens, out]."""
    weight = getattr(module, name)
    out = torch.matmul(rows, weight if module.is_transposed else weight.transpose(-1, -2))
    return out + getattr(module, f"{name}_bias").unsqueeze(1) if module.has_bias else out
