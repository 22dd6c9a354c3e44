"""The small value of a single config field, according to what its name means across transformers.

Tables list the names of heads, widths, experts, windows and so on; `new_value` turns a field's name and value, with
the other fields of its config, into the value in a small copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hfax.synthetic.kept_layers import LAYER_COUNTS, layer_count

WIDTH = 64
"""Hidden size of every submodel, so that connected submodels still fit."""
HEADS = 4
HEAD_DIM = 16
INNER = 128
VOCABULARY = 199
WINDOW = 8
POSITIONS = 512

_QUERY_HEADS = re.compile(
    r"^(num_attention_heads|n_heads?|num_heads|attention_heads|(en|de)coder_(num_)?attention_heads|num_key_value_heads|n_head_kv"
    r"|num_kv_heads|kv_n_heads|multi_query_group_num|(speech_encoder|t2u_encoder|t2u_decoder)_attention_heads"
    r"|mit_num_attention_heads|decoder_(self|cross)_attention_heads|swa_num_attention_heads|swa_num_key_value_heads"
    r"|num_sliding_attention_heads|num_sliding_key_value_heads|resampler_n_heads|index_n_heads|qformer_heads|num_attn_heads"
    r"|(en|de)coder_num_key_value_heads|num_global_key_value_heads|cross_num_attention_heads)$"
)
_WIDTHS = re.compile(
    r"^(hidden_size|d_model|n_embd|embed_dim|embedding_size|dim|out_hidden_size|projection_dim|project_dim|word_embed_proj_dim"
    r"|encoder_hidden_size|decoder_hidden_size|text_hidden_size|vision_hidden_size|audio_hidden_size|backbone_hidden_size"
    r"|emb_dim|output_dim|projector_hidden_size|hidden_size_global|cross_hidden_size|qformer_hidden_size|output_hidden_size"
    r"|adapter_(in|out)_dim|projection_hidden_size|vision_output_dim|projector_input_dim|projector_output_dim|attention_hidden_size|mlp_hidden_size|d_embed"
    r"|hidden_dim|fusion_hidden_size|text_embed_dim|mit_hidden_size|pooler_output_size|image_token_embed_dim|prediction_head_size"
    r"|projection_size|embedding_dim|reassemble_hidden_size|bottleneck_features|adapter_input_size|fpn_hidden_size|vit_dim|codebook_dim|pooler_hidden_size|cross_attention_hidden_size|model_dim|rnn_hidden_size|encoder_embed_dim|classifier_proj_size)$"
)
_INNER_WIDTHS = re.compile(
    r"^(intermediate_size|ffn_dim|(en|de)coder_ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|inner_dim|ffn_intermediate_size|dim_ff"
    r"|dff|intermediate_size_mlp|shared_intermediate_size|dense_intermediate_size|intermediate_dim|feed_forward_hidden_size"
    r"|decoder_intermediate_size|encoder_intermediate_size|(speech_encoder)_intermediate_size|mit_intermediate_size"
    r"|alignment_intermediate_size|t2u_(en|de)coder_ffn_dim|(en|de)coder_feedforward_dim|dim_feedforward|moe_hidden_size"
    r"|projector_intermediate_size|merger_intermediate_size|mlp_intermediate_size|ffn_embed_dim)$"
)
_EXPERT_WIDTHS = re.compile(
    r"(moe|expert).*(intermediate|ffn_hidden)_size|^intermediate_size_per_expert|^expert_dim$|^share_expert_dim|moe_ffn_hidden"
)
_EXPERTS = re.compile(
    r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|n_experts)$"
)
_TOP_K = re.compile(
    r"^(num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts|num_selected_experts)$"
)
_EXPERT_GROUPS = {"n_group": 2, "num_expert_group": 2, "topk_group": 1, "n_limited_groups": 1}
_WINDOWS = re.compile(
    r"^(sliding_window|sliding_window_size|attention_chunk_size|local_attention|keep_window_size|window_size_left|local_window_size"
    r"|attention_window_size|local_attention_window_len|swa_window_size)$"
)
_POSITIONS = re.compile(
    r"^(max_position_embeddings|n_positions|n_ctx|max_sequence_length|seq_length|max_seq_len|max_target_positions|model_max_length"
    r"|max_2d_position_embeddings|block_size|original_max_position_embeddings)$"
)
_EXACT: dict[str, int] = {
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "rotary_dim": HEAD_DIM,
    "d_head": HEAD_DIM,
    "zero_expert_num": 2,
    "coordinate_size": 12,
    "shape_size": 8,
    "encoder_hash_byte_group_vocab": 64,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    # state-space and linear attention
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "time_step_rank": 8,
    "mamba_dt_rank": 8,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "query_pre_attn_scalar": HEAD_DIM,
    "d_kv": HEAD_DIM,
    "kv_channels": HEAD_DIM,
    "type_vocab_size": 2,
    "max_source_positions": 300,
    "attention_window": 8,
    "num_point_embeddings": 4,
    "codebook_size": 32,
    "num_embeddings": 32,
    "num_codevectors_per_group": 8,
    "mm_tokens_per_image": 4,
    "resolution": 64,
    "index_kpool": 4,
    "position_embedding_size": 64,
    "num_queries": 10,
    "frames_per_clip": 4,
    "n_window": 20,
    "mm_posemb_size": 64,
}
_HEAD_DIMS = re.compile(
    r"^(head_dim|attention_head_dim|attention_head_size|dim_head|swa_head_dim|kv_channels|global_head_dim|head_size|resampler_head_dim)$"
)
TOKEN_FIELDS = re.compile(r"(_token_id|_token_index|_token_ids|_id)$")
"""Names of the fields that hold special token ids."""


def new_value(name: str, value: Any, fields: dict[str, Any], layers: list[int] | None, tokens: dict[int, int]) -> Any:
    """The value of a field in a small copy; the same object if the field's name says nothing about its size.

    Args:
        name: the field.
        value: its value.
        fields: all fields of its config.
        layers: indices of the layers that are kept; None if the config has no layer count.
        tokens: special token ids mapped to those of the small vocabulary.
    """
    if value is None or isinstance(value, bool) or name.startswith("_"):
        return value
    if isinstance(value, int):
        return _new_int(name, value, fields, layers, tokens)
    if isinstance(value, (list, tuple)) and value:
        return _new_list(name, value, fields, layers, tokens)
    return value


def _new_int(name: str, value: int, fields: dict[str, Any], layers: list[int] | None, tokens: dict[int, int]) -> int:
    if LAYER_COUNTS.match(name):
        return min(value, max(len(layers or ()), 2))
    if name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_k_dense") and layers:
        return sum(1 for i in layers if i < value)
    if name == "embed_dim" and isinstance(fields.get("num_heads"), (list, tuple)):  # each stage doubles it
        return min(value, HEAD_DIM * fields["num_heads"][0])
    if name in ("image_size", "crop_size") and isinstance(fields.get("patch_size"), int) and "depths" not in fields:
        return min(value, 4 * fields["patch_size"])
    if name == "num_kv_shared_layers" and layers:
        count = layer_count(fields) or 0
        return sum(1 for i in layers if i >= count - value)
    if name in ("attn_layer_period", "attn_layer_offset"):
        return min(value, 3 if name.endswith("period") else 1)
    if _QUERY_HEADS.match(name):
        return _heads(name, value, fields)
    if _HEAD_DIMS.match(name):
        if value == fields.get("qk_nope_head_dim", 0) + fields.get("qk_rope_head_dim", 0):
            return _EXACT["qk_head_dim"]
        same = (
            n for n in ("qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_head_dim") if fields.get(n) == value
        )
        return _EXACT.get(next(same, ""), HEAD_DIM)
    if _EXPERT_WIDTHS.search(name):
        return min(value, 32)
    if _EXPERTS.match(name):
        return min(value, 4 if not fields.get("n_group") or fields.get("n_group") == 1 else 8)
    if _TOP_K.match(name):
        return min(value, 2)
    if name in _EXPERT_GROUPS:
        return min(value, _EXPERT_GROUPS[name])
    if _WINDOWS.match(name):
        return min(value, WINDOW) if value > 0 else value
    if _POSITIONS.match(name):
        return min(value, POSITIONS)
    if _WIDTHS.match(name):
        return min(value, WIDTH) if value > 0 else value
    if _INNER_WIDTHS.match(name):
        return min(value, INNER) if value > 0 else value
    if name in _EXACT:
        return min(value, _EXACT[name])
    if name.endswith("vocab_size") or name in ("unpadded_vocab_size", "vocab_offset"):
        return min(value, VOCABULARY)
    if TOKEN_FIELDS.search(name):
        return tokens.get(value, value)
    return value


def _heads(name: str, value: int, fields: dict[str, Any]) -> int:
    queries = next(
        (
            fields[n]
            for n in ("num_attention_heads", "n_head", "n_heads", "num_heads")
            if isinstance(fields.get(n), int)
        ),
        value,
    )
    if name == "index_n_heads":  # with few heads, all scores are often clipped to zero, and ties are unordered
        return min(value, 16)
    if "kv" in name or "key_value" in name or "group_num" in name:
        return HEADS if value >= queries else min(value, 2)
    return min(value, HEADS)


def _new_list(name: str, value: Any, fields: dict[str, Any], layers: list[int] | None, tokens: dict[int, int]) -> Any:
    make: Callable[[list[Any]], Any] = type(value)
    count = layer_count(fields)
    if layers and count is not None and len(value) == count and count > len(layers):
        kept = [value[i] for i in layers]
        return make([new_value(_singular(name), v, fields, layers, tokens) for v in kept])
    if TOKEN_FIELDS.search(name) and all(isinstance(v, int) for v in value):
        return make([tokens.get(v, v) for v in value])
    if (
        layers
        and re.search(r"(_layers|_idxs|_indexes|_indices|_layer_ids)$", name)
        and all(isinstance(v, int) for v in value)
    ):
        kept_here = [layers.index(v) for v in value if v in layers]
        return make(kept_here or [len(layers) - 1])
    return _staged(name, value, fields)


def _staged(name: str, value: Any, fields: dict[str, Any]) -> Any:
    """Shrink lists with an entry per stage of a hierarchical model: one layer per stage."""
    if name in ("depths", "num_blocks_per_stage", "layers_per_stage") and all(isinstance(v, int) for v in value):
        return type(value)(min(v, 1) for v in value)
    return value


def _singular(name: str) -> str:
    return name[:-1] if name.endswith("s") else name
