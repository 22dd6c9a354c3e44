"""llama.cpp's architectures: their configs and weights in transformers' terms.

Each one names transformers' model type, the metadata that make up its config, and the rules that turn its tensors into that model's
weights, written as transformers writes its own. Architectures that transformers' current GGUF reader knows come from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming, WeightTransform
from transformers.integrations.gguf.gguf_conversion_mapping import (
    GGUF_ARCHS,
    ConcatenateRows,
    PermuteRows,
    SubtractOne,
    Unsqueeze,
)

from hfax.errors import UnsupportedModelError

Rules = Callable[[PretrainedConfig], list[WeightTransform]]

COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the config replaces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp.

    Args:
        model_type: transformers' model type.
        model_class: transformers' class of the language model.
        fields: the config's field that each metadata key, without the architecture's name, gives.
        rules: turn the file's tensors into the model's weights.
        fixed: fields that are the same in every file.
    """

    model_type: str
    model_class: str
    fields: Mapping[str, str]
    rules: Rules
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def conversion_rules(architecture: str, config: PretrainedConfig) -> list[WeightTransform]:
    """The rules that turn a file's tensors into the weights of the model that `config` describes."""
    own = ARCHITECTURES.get(architecture)
    return GGUF_ARCHS[architecture](config) if own is None else own.rules(config)


def check_architecture(name: str) -> None:
    """Raise if the architecture is not supported.

    Raises:
        UnsupportedModelError: lists those that are.
    """
    if name not in ARCHITECTURES and name not in GGUF_ARCHS:
        raise UnsupportedModelError(
            f"The GGUF file holds a model of the architecture {name!r}.",
            f"hfax maps these to transformers' models: {', '.join(sorted({*ARCHITECTURES, *GGUF_ARCHS}))}.",
            "Use the model's safetensors; quantization='int8' or 'int4' makes it as small.",
        )


_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_HEADS = {"attention.key_length": "head_dim"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GEMMA = {
    **_FIELDS,
    **_HEADS,
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
}

_OUTSIDE = {r"^token_embd\.": "model.embed_tokens.", r"^output\.": "lm_head.", r"^blk\.": "model.layers."}
_NORM = {r"^output_norm\.": "model.norm."}
_ATTENTION = {
    r"\.attn_q\.": ".self_attn.q_proj.",
    r"\.attn_k\.": ".self_attn.k_proj.",
    r"\.attn_v\.": ".self_attn.v_proj.",
    r"\.attn_output\.": ".self_attn.o_proj.",
}
_HEAD_NORMS = {r"\.attn_q_norm\.": ".self_attn.q_norm.", r"\.attn_k_norm\.": ".self_attn.k_norm."}
_MLP = {
    r"\.ffn_gate\.": ".mlp.gate_proj.",
    r"\.ffn_up\.": ".mlp.up_proj.",
    r"\.ffn_down\.": ".mlp.down_proj.",
}
_NORMS = {r"\.attn_norm\.": ".input_layernorm.", r"\.ffn_norm\.": ".post_attention_layernorm."}
_GEMMA_NORMS = {
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.post_attention_norm\.": ".post_attention_layernorm.",
    r"\.ffn_norm\.": ".pre_feedforward_layernorm.",
    r"\.post_ffw_norm\.": ".post_feedforward_layernorm.",
}
_MOE = {
    r"\.ffn_gate_inp\.": ".mlp.gate.",
    r"\.ffn_gate_inp_shexp\.": ".mlp.shared_expert_gate.",
    r"\.ffn_gate_shexp\.": ".mlp.shared_expert.gate_proj.",
    r"\.ffn_up_shexp\.": ".mlp.shared_expert.up_proj.",
    r"\.ffn_down_shexp\.": ".mlp.shared_expert.down_proj.",
    r"\.ffn_down_exps\.weight": ".mlp.experts.down_proj",
}
_GPT2 = {
    r"^token_embd\.": "transformer.wte.",
    r"^position_embd\.": "transformer.wpe.",
    r"^output_norm\.": "transformer.ln_f.",
    r"^output\.": "lm_head.",
    r"^blk\.": "transformer.h.",
    r"\.attn_norm\.": ".ln_1.",
    r"\.ffn_norm\.": ".ln_2.",
    r"\.attn_qkv\.": ".attn.c_attn.",
    r"\.attn_output\.": ".attn.c_proj.",
    r"\.ffn_up\.": ".mlp.c_fc.",
    r"\.ffn_down\.": ".mlp.c_proj.",
}


def _renamed(*tables: Mapping[str, str]) -> list[WeightTransform]:
    return [WeightRenaming(pattern, target) for table in tables for pattern, target in table.items()]


def _only_names(*tables: Mapping[str, str]) -> Rules:
    return lambda config: _renamed(*tables)


def _converted(name: str, *operations: Any) -> WeightConverter:
    """Operations on weights whose renamed name ends so."""
    return WeightConverter(source_patterns=name, target_patterns=name, operations=list(operations))


def _llama(config: PretrainedConfig) -> list[WeightTransform]:
    """Rows of q and k are in the order of llama.cpp's rotary embedding, which pairs neighbours: transformers pairs halves."""
    shared: list[WeightTransform] = _renamed(_OUTSIDE, _NORM, _ATTENTION, _MLP, _NORMS, _MOE)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        # On the CPU explicitly: the caller's default device may be meta.
        rows = torch.arange(heads * size, device="cpu").reshape(heads, size // 2, 2).swapaxes(1, 2).reshape(-1)
        for kind in ("weight", "bias"):
            shared.append(_converted(f"self_attn.{part}_proj.{kind}", PermuteRows(rows)))
    return [*shared, _fused_experts()]


def _fused_experts() -> WeightConverter:
    return WeightConverter(
        source_patterns=[r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"],
        target_patterns=".mlp.experts.gate_up_proj",
        operations=[ConcatenateRows(dim=1)],
    )


def _qwen_moe(config: PretrainedConfig) -> list[WeightTransform]:
    return [
        *_renamed(_OUTSIDE, _NORM, _ATTENTION, _HEAD_NORMS, _NORMS, _MOE),
        _fused_experts(),
        _converted("mlp.shared_expert_gate.weight", Unsqueeze(0, expected_ndim=2)),
    ]


def _gemma(*norms: Mapping[str, str]) -> Rules:
    """Norms are stored with 1 added, as llama.cpp multiplies with them."""
    named = [(pattern, target) for table in (_NORM, *norms) for pattern, target in table.items()]

    def rules(config: PretrainedConfig) -> list[WeightTransform]:
        return [
            *_renamed(_OUTSIDE, _ATTENTION, _MLP),
            *(
                WeightConverter(
                    source_patterns=f"{pattern}weight", target_patterns=f"{target}weight", operations=[SubtractOne()]
                )
                for pattern, target in named
            ),
        ]

    return rules


def _gpt2(config: PretrainedConfig) -> list[WeightTransform]:
    """transformers' Conv1D stores a matrix as [in, out]."""
    matrices = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    return [*_renamed(_GPT2), *(_converted(name, Transpose(0, 1)) for name in matrices)]


_LLAMA = Architecture(
    model_type="llama",
    model_class="LlamaForCausalLM",
    fields={**_FIELDS, "rope.dimension_count": "head_dim", **_HEADS},
    rules=_llama,
)
MIXTRAL = Architecture(
    model_type="mixtral",
    model_class="MixtralForCausalLM",
    fields={**_LLAMA.fields, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    rules=_llama,
)
"""A file of the architecture "llama" with experts."""

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": Architecture(
        model_type="qwen2",
        model_class="Qwen2ForCausalLM",
        fields=_FIELDS,
        rules=_only_names(_OUTSIDE, _NORM, _ATTENTION, _MLP, _NORMS),
    ),
    "qwen3": Architecture(
        model_type="qwen3",
        model_class="Qwen3ForCausalLM",
        fields={**_FIELDS, **_HEADS},
        rules=_only_names(_OUTSIDE, _NORM, _ATTENTION, _HEAD_NORMS, _MLP, _NORMS),
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        model_class="Qwen2MoeForCausalLM",
        fields={**_FIELDS, **_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        rules=_qwen_moe,
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        model_class="Qwen3MoeForCausalLM",
        fields={**_FIELDS, **_HEADS, **_EXPERTS},
        rules=_qwen_moe,
        fixed={"norm_topk_prob": True},
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        model_class="Gemma2ForCausalLM",
        fields={**_GEMMA, "attn_logit_softcapping": "attn_logit_softcapping"},
        rules=_gemma(_GEMMA_NORMS),
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        model_class="Gemma3ForCausalLM",
        fields=_GEMMA,
        rules=_gemma(_GEMMA_NORMS, _HEAD_NORMS),
    ),
    "phi3": Architecture(
        model_type="phi3",
        model_class="Phi3ForCausalLM",
        fields={
            **_FIELDS,
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        rules=_only_names(
            _OUTSIDE,
            _NORM,
            _NORMS,
            {
                r"\.attn_qkv\.": ".self_attn.qkv_proj.",
                r"\.attn_output\.": ".self_attn.o_proj.",
                r"\.ffn_up\.": ".mlp.gate_up_proj.",
                r"\.ffn_down\.": ".mlp.down_proj.",
            },
        ),
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        model_class="GPT2LMHeadModel",
        fields={
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        rules=_gpt2,
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        model_class="Starcoder2ForCausalLM",
        fields={**_FIELDS, "attention.layer_norm_epsilon": "norm_epsilon"},
        rules=_only_names(
            _OUTSIDE, _NORM, _ATTENTION, _NORMS, {r"\.ffn_up\.": ".mlp.c_fc.", r"\.ffn_down\.": ".mlp.c_proj."}
        ),
    ),
}
"""By llama.cpp's name."""
