"""Replacements for mixture-of-experts code that loops over the routed experts, which depends on router values.

Most models use transformers' experts interface, where hfax registers its function. The patches here are for models with their own
loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hfax.patches.patch import ForwardPatch, Patch


def gated_experts(
    hidden: Any, chosen: Any, weights: Any, gate_up: Any, down: Any, activation: Callable[[Any], Any]
) -> Any:
    """Weighted sum of the routed experts' outputs.

    Args:
        hidden: [tokens, width].
        chosen: [tokens, k] int, expert indices.
        weights: [tokens, k], router weights.
        gate_up: [experts, 2 · inner, width].
        down: [experts, width, inner].
        activation: activation function of the gate.

    For few tokens the matrices of the routed experts are gathered; for many, every expert runs on every token.
    """
    if chosen.numel() <= gate_up.shape[0]:
        gate, up = torch.einsum("th,tkih->tki", hidden, gate_up[chosen]).chunk(2, dim=-1)
        return torch.einsum("tki,tkhi,tk->th", activation(gate) * up, down[chosen], weights)
    gate, up = torch.einsum("th,eih->tei", hidden, gate_up).chunk(2, dim=-1)
    outputs = torch.einsum("tei,ehi->teh", activation(gate) * up, down)
    share = torch.zeros((hidden.shape[0], gate_up.shape[0]), dtype=weights.dtype, device=hidden.device)
    return torch.einsum("teh,te->th", outputs, share.scatter_add(1, chosen, weights).to(outputs.dtype))


def _experts_with_identity(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        is_routed = top_k_index < module.num_routed_experts
        weights = top_k_weights.to(hidden_states.dtype)
        out = hidden_states * torch.where(is_routed, torch.zeros_like(weights), weights).sum(-1, keepdim=True)
        if module.gate_up_proj is not None:
            chosen = top_k_index.clamp(max=module.num_routed_experts - 1)
            routed = torch.where(is_routed, weights, torch.zeros_like(weights))
            out = out + gated_experts(
                hidden_states,
                chosen,
                routed,
                module.gate_up_proj[: module.num_routed_experts],
                module.down_proj,
                module.act_fn,
            )
        return out

    return forward


def _dbrx_experts(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        rows = hidden_states.shape[0]
        hidden_states = hidden_states.reshape(-1, module.hidden_size)
        shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
        gate_up = torch.cat([module.mlp.w1.view(shape), module.mlp.v1.view(shape)], dim=1)
        down = module.mlp.w2.view(shape).transpose(1, 2)
        out = gated_experts(hidden_states, top_k_index, top_k_weights, gate_up, down, module.mlp.activation_fn)
        return out.view(rows, -1, module.hidden_size)

    return forward


def _named_experts(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any, selected: Any, weights: Any, *args: Any) -> Any:
        share = (selected.permute(2, 1, 0).sum(1).transpose(0, 1) * weights.reshape(-1, 1)).to(hidden_states.dtype)
        parts = [module[f"expert_{i}"](hidden_states) * share[:, i, None] for i in range(module.num_experts)]
        return sum(parts[1:], parts[0])

    return forward


def _sorted_gating(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any) -> Any:
        logits = module.layer(hidden_states).float()
        top_k_logits, chosen = logits.topk(module.top_k, dim=1)
        gates = torch.softmax(top_k_logits, dim=1).to(hidden_states.dtype)
        experts, order = torch.sort(chosen.flatten(), dim=0, stable=True)
        return order, order // module.top_k, gates.flatten()[order], experts, logits

    return forward


def _parallel_experts(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(inputs: Any, expert_of_row: Any) -> Any:
        if inputs.shape[0] <= module.num_experts:
            return torch.einsum("ti,toi->to", inputs, module.weight[expert_of_row])
        outputs = torch.einsum("ti,eoi->teo", inputs, module.weight)
        return outputs[torch.arange(inputs.shape[0], device=inputs.device), expert_of_row]

    return forward


def _clamped_experts(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """Experts with clamped gate and up projections; the index past the last expert means no expert."""
        is_real = top_k_index < module.num_experts
        weights = torch.where(is_real, top_k_weights, torch.zeros_like(top_k_weights)).to(hidden_states.dtype)
        chosen = top_k_index.clamp(max=module.num_experts - 1)
        states = torch.einsum("th,eih->tei", hidden_states, module.gate_up_proj)
        outputs = torch.einsum("tei,ehi->teh", module._apply_gate(states), module.down_proj)
        share = torch.zeros((len(hidden_states), module.num_experts), dtype=weights.dtype, device=hidden_states.device)
        return torch.einsum("teh,te->th", outputs, share.scatter_add(1, chosen, weights))

    return forward


def _by_modality(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Any, moe_mm_token_type_ids: Any = None) -> Any:
        """Text experts for tokens of type 0, image experts for the others; every token runs through both."""
        if moe_mm_token_type_ids is None:
            return original(hidden_states)
        rows, length = hidden_states.shape[:2]
        is_image = moe_mm_token_type_ids.bool()
        text, text_logits = module.text_moe(hidden_states)
        image, image_logits = module.vision_moe(hidden_states)
        out = torch.where(is_image[..., None], image.reshape(hidden_states.shape), text.reshape(hidden_states.shape))
        text_logits, image_logits = (x.reshape(rows * length, -1) for x in (text_logits, image_logits))
        logits = torch.where(is_image.reshape(-1, 1), image_logits, text_logits)
        return (out if module.shared_experts is None else out + module.shared_experts(hidden_states)), logits

    return forward


PATCHES: list[Patch] = [
    ForwardPatch(
        backends=("jax", "torch_xla"),
        name="clamped-experts",
        why="Step 3.7 loops over the experts that were hit (`nonzero`); here every expert runs on every token",
        classes=("transformers.models.step3p7.modeling_step3p7:Step3p7Experts",),
        make=_clamped_experts,
    ),
    ForwardPatch(
        backends=("jax", "torch_xla"),
        name="experts-by-modality",
        why="ERNIE 4.5 VL sends `hidden_states[is_image]` to experts of their own; its size depends on the token types",
        classes=("transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe:Ernie4_5_VLMoeMoeBlock",),
        make=_by_modality,
    ),
    ForwardPatch(
        backends=("jax", "torch_xla"),
        name="experts-with-identity",
        why="LongCat-Flash loops over the experts that were hit (`nonzero`), some of which pass their input through",
        classes=("transformers.models.longcat_flash.modeling_longcat_flash:LongcatFlashExperts",),
        make=_experts_with_identity,
    ),
    ForwardPatch(
        backends=("jax", "torch_xla"),
        name="dbrx-experts",
        why="DBRX loops over the experts that were hit (`nonzero`)",
        classes=("transformers.models.dbrx.modeling_dbrx:DbrxExperts",),
        make=_dbrx_experts,
    ),
    ForwardPatch(
        backends=("jax", "torch_xla"),
        name="named-experts",
        why="Switch Transformers loop over the experts that were hit (`nonzero`); here every expert runs on every token",
        classes=("transformers.models.switch_transformers.modeling_switch_transformers:SwitchTransformersExperts",),
        make=_named_experts,
    ),
    ForwardPatch(
        backends=("jax", "torch_xla"),
        name="sorted-gating",
        why="JetMoE's router counts tokens an expert as Python numbers (`tolist`); here it gives each row's expert instead",
        classes=("transformers.models.jetmoe.modeling_jetmoe:JetMoeTopKGating",),
        make=_sorted_gating,
    ),
    ForwardPatch(
        backends=("jax", "torch_xla"),
        name="parallel-experts",
        why="JetMoE splits rows by those numbers; here each row is multiplied by the matrix of its expert",
        classes=("transformers.models.jetmoe.modeling_jetmoe:JetMoeParallelExperts",),
        make=_parallel_experts,
    ),
]
