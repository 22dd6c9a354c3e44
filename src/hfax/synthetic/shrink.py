"""Small copies of configs that keep the structure of the original, for tests, doctor and the support matrix.

Turns a transformers config into one whose model has a few hundred thousand weights and still has every kind of layer, expert,
window, latent and submodel of the original. Fields are changed according to what their names mean across transformers, not by model
type; the few exceptions are in one table, `SPECIAL`. Builds no models and does not use jax.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from hfax.errors import UnsupportedModelError

WIDTH = 64
"""Hidden size of every submodel, so that connected submodels still fit."""
HEADS = 4
HEAD_DIM = 16
INNER = 128
VOCABULARY = 199
WINDOW = 8
POSITIONS = 512

_LAYER_COUNTS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|(encoder|decoder|speech_encoder|t2u_encoder|t2u_decoder)_layers|depth|layers"
    r"|num_decoder_layers|encoder_depth|num_encoder_layers|mit_num_hidden_layers|decoder_num_hidden_layers|text_layers"
    r"|encoder_num_hidden_layers|num_spatial_layers|num_temporal_layers|num_auxiliary_layers|num_global_layers|resampler_depth"
    r"|memory_attention_num_layers|speaker_layers|vision_layers|n_layers_enc|num_layers_(enc|dec)oder)$"
)
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
_TOKEN = re.compile(r"(_token_id|_token_index|_token_ids|_id)$")

SPECIAL: dict[str, dict[str, Any]] = {
    # the head size of sliding-window layers is checked against that of the latent heads
    "dots3_note_text": {"head_dim": 24},
    # the layers are stacks run in cycles; the layer count covers all passes
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": lambda c: c.H_cycles * (c.L_cycles + 1)},
    # attention takes two concatenated hidden states, and hybrid layers share its weights
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * HEAD_DIM,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * HEAD_DIM,
        "mamba_headdim": HEAD_DIM,
        "n_mamba_heads": 8,
        "adapter_rank": 8,
    },
    # axial position embeddings split the hidden size and factor the length
    "reformer": {
        "axial_pos_embds_dim": (16, 48),
        "axial_pos_shape": (8, 8),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "attn_layers": ["local", "lsh"],
        "hash_seed": 0,
    },
    # the hidden size is split into six box embeddings
    "lilt": {"hidden_size": 96},
    # a coefficient determines the last layer's width
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "align_vision_model": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "align": {"projection_dim": lambda c: c.vision_config.hidden_dim},
    # the mask head has hidden size plus heads channels, which must be a multiple of 8
    "detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "eomt": {"num_blocks": 1},
    "eomt_dinov3": {"num_blocks": 1},
    "oneformer": {"conv_dim": WIDTH, "mask_dim": WIDTH},
    "mobilevitv2": {"image_size": 64},
    # sinusoidal position embeddings are split over the box corners
    "bros": {"dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2, "dim_bbox_projection": 16},
    # the prompt grid is the grid of image features
    "sam_prompt_encoder": {"image_embedding_size": 4},
    "sam_hq_prompt_encoder": {"image_embedding_size": 4},
    "sam2_hiera_det_model": {"hidden_size": 96},
    "seggpt": {
        "merge_index": 0,
        "intermediate_hidden_state_indices": [1],
        "image_size": [64, 32],
        "pretrain_image_size": 64,
    },
    "depth_pro": {"patch_size": lambda c: c.image_model_config.image_size},
    "fun_asr_nano": {"adaptor_config.intermediate_size": WIDTH // 4},
    # the layer whose cache a layer uses: its own, or another's that it shares
    "mistral_large4_text": {"kv_source_layers": lambda c: list(range(c.num_hidden_layers))},
    # one group per channel
    "mimi": {"upsample_groups": lambda c: c.hidden_size},
    "timesfm2_5": {"context_length": 128},
    "mimi_encoder": {"upsample_groups": lambda c: c.hidden_size},
    "mimi_decoder": {"upsample_groups": lambda c: c.hidden_size},
    "recurrent_gemma": {"lru_width": lambda c: c.hidden_size},
    # short prompts must exceed the window
    "gpt_neo": {"window_size": WINDOW},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "pocket_tts_audio_tokenizer": {"upsample_groups": lambda c: c.hidden_size},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": lambda c: c.hidden_size},
    # pixel shuffle moves features from positions to channels before the projection
    "llama4_vision_model": {"intermediate_size": lambda c: int(c.hidden_size / c.pixel_shuffle_ratio**2)},
    "minimax_m3_vl": {"merged_hidden_size": lambda c: WIDTH * c.vision_config.spatial_merge_size**2},
    "step3p5_vision": {"intermediate_size": lambda c: int(c.hidden_size * c.mlp_ratio)},
    "molmo2_vision": {"image_size": [56, 56], "num_position_embeddings": 16},
    "muse_glimmer": {"out_hidden_size": lambda c: c.vision_config.hidden_size * 4},
    "muse_spark": {"out_hidden_size": lambda c: c.vision_config.hidden_size * 4},
    "mllama_vision_model": {"vision_output_dim": lambda c: c.hidden_size * (1 + len(c.intermediate_layers_indices))},
    # group normalization has 32 groups
    "chameleon_vqgan": {"base_channels": 32},
    "emu3_vqgan": {"base_channels": 32, "hidden_size": 128},
    # queries for two fixed resolutions; the last number of channels is the encoder's width
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, WIDTH]},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [32, WIDTH]},
    "granite4_vision": {"spatial_target_layers": [0, 0, 1, 1]},
    # the total width of queries and keys is rounded up to a multiple of 64
    "xlstm": {"qk_dim_factor": 1.0, "chunk_size": 64, "num_blocks": lambda c: c.num_hidden_layers},
}
"""Model type to field values that no general rule finds, with the reasons."""


def shrink_config(config: PretrainedConfig) -> PretrainedConfig:
    """A small, structurally faithful copy of a config.

    Args:
        config: any transformers configuration; not changed.

    Returns:
        A config of the same class. Every kind of layer, expert group, window, latent rank and sub-config of the original is there;
        windows are 8 tokens, vocabularies 199, hidden sizes 64, and special tokens keep their distinctness.

    Raises:
        UnsupportedModelError: no consistent small copy could be created.
    """
    small = copy.deepcopy(config)
    try:
        text = small.get_text_config()
        if text is not small and vars(small).get("vision_config") is not None and vars(text).get("rope_parameters"):
            # the sections of multimodal RoPE are often defaults in the modelling code, for full-size heads
            kinds = [v for v in text.rope_parameters.values() if isinstance(v, dict)]
            for rope in kinds or [text.rope_parameters]:
                rope.setdefault("mrope_section", [1, 1, 1])
        _shrink(small, _token_map(small))
        _fit_images(small)
    except Exception as error:
        raise UnsupportedModelError(
            f"The config of model type {config.model_type!r} could not be shrunk.",
            f"{type(error).__name__}: {error}",
            "Pass your own small config, or report the model type to the project.",
        ) from error
    return small


def _shrink(config: Any, tokens: dict[int, int]) -> None:
    fields = dict(vars(config))
    layers = _kept_layers(fields)
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig):
            _shrink(value, tokens)
            continue
        if name in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"):
            _set(config, name, None)
            continue
        new = _new_value(name, value, fields, layers, tokens)
        if new is not value:
            _set(config, name, new)
    for path, value in SPECIAL.get(config.model_type, {}).items():
        *parts, name = path.split(".")
        holder = config
        for part in parts:
            holder = getattr(holder, part)
        _set(holder, name, value(config) if callable(value) else value)
    if layers and len(fields.get("stage_names") or ()) > len(layers) + 1:
        _set(config, "stage_names", ["stem", *(f"stage{i + 1}" for i in range(len(layers)))])
        places = range(1, len(layers) + 1) if len(fields.get("_out_indices") or ()) > 1 else [len(layers)]
        _set(config, "_out_features", [f"stage{i}" for i in places])
        _set(config, "_out_indices", list(places))
    _fit_state_space_heads(config)
    _fit_layer_overrides(config, layers)
    if getattr(config, "rope_parameters", None):
        _fit_rope(config.rope_parameters, config)


def _set(config: Any, name: str, value: Any) -> None:
    object.__setattr__(config, name, value)


# Layers


def _kept_layers(fields: dict[str, Any]) -> list[int] | None:
    """Indices of the layers to keep: the first of each kind, at least two; None if there is no layer count."""
    count = next((v for n, v in fields.items() if _LAYER_COUNTS.match(n) and isinstance(v, int)), None)
    if count is None:
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
        count = next(v for n, v in fields.items() if _LAYER_COUNTS.match(n) and isinstance(v, int))
        found.append(index >= count - shared)
    return found


# Single fields


def _new_value(name: str, value: Any, fields: dict[str, Any], layers: list[int] | None, tokens: dict[int, int]) -> Any:
    if value is None or isinstance(value, bool) or name.startswith("_"):
        return value
    if isinstance(value, int):
        return _new_int(name, value, fields, layers, tokens)
    if isinstance(value, (list, tuple)) and value:
        return _new_list(name, value, fields, layers, tokens)
    return value


def _new_int(name: str, value: int, fields: dict[str, Any], layers: list[int] | None, tokens: dict[int, int]) -> int:
    if _LAYER_COUNTS.match(name):
        return min(value, max(len(layers or ()), 2))
    if name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_k_dense") and layers:
        return sum(1 for i in layers if i < value)
    if name == "embed_dim" and isinstance(fields.get("num_heads"), (list, tuple)):  # each stage doubles it
        return min(value, HEAD_DIM * fields["num_heads"][0])
    if name in ("image_size", "crop_size") and isinstance(fields.get("patch_size"), int) and "depths" not in fields:
        return min(value, 4 * fields["patch_size"])
    if name == "num_kv_shared_layers" and layers:
        count = next(v for n, v in fields.items() if _LAYER_COUNTS.match(n) and isinstance(v, int))
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
    if _TOKEN.search(name):
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
    count = next((v for n, v in fields.items() if _LAYER_COUNTS.match(n) and isinstance(v, int)), None)
    if layers and count is not None and len(value) == count and count > len(layers):
        kept = [value[i] for i in layers]
        return make([_new_value(_singular(name), v, fields, layers, tokens) for v in kept])
    if _TOKEN.search(name) and all(isinstance(v, int) for v in value):
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


def _fit_layer_overrides(config: Any, layers: list[int] | None) -> None:
    """Shrink the fields that some layers override, keeping their ratio to the common value."""
    spec = vars(config).get("_heterogeneity_spec")
    if spec is None or not layers:
        return
    small: dict[int, dict[str, Any]] = {}
    for index, different in spec.per_layer_overrides.items():
        if index in layers:
            small[layers.index(index)] = {
                name: 2 * HEAD_DIM if name == "head_dim" else _new_value(name, value, different, layers, {})
                for name, value in different.items()
            }
    config.per_layer_config = small


def _fit_state_space_heads(config: Any) -> None:
    """Make the heads of a state-space layer cover its expanded width."""
    fields = vars(config)
    for heads, dim, expand in (("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand")):
        if all(isinstance(fields.get(n), int) for n in (heads, expand)) and dim in fields:
            width = fields[expand] * fields["hidden_size"]
            if fields.get("mamba_d_ssm"):
                _set(config, "mamba_d_ssm", width)
            _set(config, dim, HEAD_DIM)
            _set(config, heads, width // HEAD_DIM)


# Images


def _fit_images(config: Any) -> None:
    """Fit the fields of a multimodal config that depend on its vision config to the new sizes of the vision config."""
    vision = vars(config).get("vision_config")
    if vocabulary := vars(config).get("vocabulary_map"):
        _set(config, "image_token_id", vocabulary["<image>"])
    if vision is None:
        return
    size, layers = getattr(vision, "image_size", None), getattr(vision, "num_hidden_layers", None)
    if vars(config).get("image_grid_pinpoints") and isinstance(size, int):
        _set(config, "image_grid_pinpoints", [[size, 2 * size], [2 * size, size], [2 * size, 2 * size]])
    for part in (config, vars(config).get("adapter_config")):
        for name in ("vision_feature_layer", "vision_feature_layers"):
            value = vars(part).get(name) if part is not None else None
            if value is not None and isinstance(layers, int):
                clip = lambda v: max(-layers, min(v, layers - 1))  # noqa: E731
                _set(part, name, clip(value) if isinstance(value, int) else type(value)(clip(v) for v in value))
    if vars(config).get("projector_patch_to_query_dict") and isinstance(size, int):
        _set(config, "projector_patch_to_query_dict", {(size // vision.patch_size) ** 2: 4})
        _set(config, "max_value_projector_patch_to_query_dict", 4)


# Special tokens


def _token_map(config: Any) -> dict[int, int]:
    """Map special token ids into the small vocabulary: small ids stay, the others become its last ids, in order."""
    ids: set[int] = set()

    def visit(part: Any) -> None:
        for name, value in vars(part).items():
            if isinstance(value, PretrainedConfig):
                visit(value)
            elif _TOKEN.search(name) and isinstance(value, int) and not isinstance(value, bool):
                ids.add(value)
            elif _TOKEN.search(name) and isinstance(value, (list, tuple)):
                ids.update(v for v in value if isinstance(v, int))

    visit(config)
    large = sorted(i for i in ids if i >= VOCABULARY - 40)
    return {old: VOCABULARY - len(large) + place for place, old in enumerate(large)}


# Rotary position embeddings


def _proportional(parts: list[int], total: int) -> list[int]:
    """Integers that sum to `total`, approximately proportional to `parts`."""
    shares = [p * total / sum(parts) for p in parts]
    found = [int(s) for s in shares]
    order = sorted(range(len(parts)), key=lambda i: found[i] - shares[i])
    for index in order[: total - sum(found)]:
        found[index] += 1
    return found


def _fit_rope(rope: dict[str, Any], config: Any) -> None:
    """Fit the sections and factors of RoPE to the small heads."""
    for value in rope.values():
        if isinstance(value, dict):
            _fit_rope(value, config)
    head_dim = vars(config).get("head_dim") or HEAD_DIM
    latent = vars(config).get("qk_rope_head_dim")
    if latent and rope.get("partial_rotary_factor"):
        rope["partial_rotary_factor"] = latent / head_dim
    rotary = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    if rope.get("mrope_section"):
        rope["mrope_section"] = _proportional(rope["mrope_section"], rotary)
    for name in ("long_factor", "short_factor"):
        if rope.get(name):
            rope[name] = list(rope[name][:rotary])
    if rope.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = min(rope["original_max_position_embeddings"], POSITIONS // 2)
