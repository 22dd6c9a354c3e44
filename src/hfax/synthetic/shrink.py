"""Small copies of configs that keep the structure of the original, for tests, doctor and the support matrix.

Turns a transformers config into one whose model has a few hundred thousand weights and still has every kind of layer, expert,
window, latent and submodel of the original. `kept_layers` chooses the layers, `small_values` the value of each field, according to
what its name means across transformers; this module visits the submodels and fits the fields that depend on each other. Model types
that no rule fits are in one table, `SPECIAL`. Builds no models and does not use jax.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig

from hfax.errors import UnsupportedModelError
from hfax.synthetic.kept_layers import kept_layers
from hfax.synthetic.small_values import HEAD_DIM, HEADS, POSITIONS, TOKEN_FIELDS, VOCABULARY, WIDTH, WINDOW, new_value

_SMALL_HIERA: dict[str, Any] = {
    "hidden_size": 16,
    "image_size": [128, 128],
    "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [16, 32, 64, 128],
    "global_attention_blocks": [3],
}
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
    "align": {"projection_dim": lambda c: int(c.vision_config.hidden_dim * c.vision_config.width_coefficient)},
    # image tokens, then audio tokens, at the end of the vocabulary
    "apertus1p5": {"image_token_offset": 100, "audio_token_offset": lambda c: 100 + c.vision_config.codebook_size},
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": lambda c: [*c.layer_types, c.layer_types[0]],
    },
    # the width is the last stage's number of channels
    "efficientloftr": {
        "hidden_size": lambda c: c.out_features[-1],
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "dia_decoder": {"cross_num_key_value_heads": HEADS, "cross_head_dim": HEAD_DIM},
    # each stage doubles the width
    "clap_audio_model": {"hidden_size": lambda c: c.patch_embeds_hidden_size * 2 ** (len(c.depths) - 1)},
    "apertus1p5_vision_tokenizer": {"base_channels": 32, "latent_channels": WIDTH},
    "pocket_tts": {"flow_head_config.condition_dim": WIDTH},
    "fast_vlm": {"vision_config.hidden_size": 3072},
    "neucodec": {"quantization_dim": 2 * WIDTH},
    "gemma3n_vision": {"hidden_size": 2048},
    "gradium_phonon_tts": {"flow_head_config.condition_dim": WIDTH},
    "lightglue": {"descriptor_dim": WIDTH},
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
    "sam_vision_model": {"output_channels": WIDTH, "num_pos_feats": WIDTH // 2},
    "sam_hq_vision_model": {"output_channels": WIDTH, "num_pos_feats": WIDTH // 2},
    "sam2_prompt_encoder": {"image_size": 128},
    "sam3_vision_model": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "sam2_hiera_det_model": _SMALL_HIERA,
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        **{f"backbone_config.{name}": value for name, value in _SMALL_HIERA.items()},
    },
    # a vocoder of few layers: rounding grows in each
    "vits": {
        "upsample_rates": [4, 2],
        "upsample_kernel_sizes": [8, 4],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
        "flow_size": 32,
        "upsample_initial_channel": 32,
        "spectrogram_bins": 33,
        "duration_predictor_filter_channels": 32,
        "posterior_encoder_num_wavenet_layers": 2,
        "prior_encoder_num_wavenet_layers": 2,
        "prior_encoder_num_flows": 2,
    },
    # predictors of one layer: rounding grows in each, and durations are rounded
    "fastspeech2_conformer": {
        "speech_decoder_postnet_layers": 1,
        "speech_decoder_postnet_units": 32,
        "pitch_predictor_layers": 1,
        "energy_predictor_layers": 1,
        "duration_predictor_layers": 1,
    },
    "fastspeech2_conformer_hifigan": {"upsample_initial_channel": 32},
    "seggpt": {
        "merge_index": 0,
        "intermediate_hidden_state_indices": [1],
        "image_size": [64, 32],
        "pretrain_image_size": 64,
    },
    "depth_pro": {"patch_size": lambda c: c.image_model_config.image_size, "intermediate_hook_ids": [1, 0]},
    "fun_asr_nano": {"adaptor_config.intermediate_size": WIDTH // 4},
    # the layer whose cache a layer uses: its own, or another's that it shares
    "mistral_large4_text": {"kv_source_layers": lambda c: list(range(c.num_hidden_layers))},
    # one group per channel
    "mimi": {"upsample_groups": lambda c: c.hidden_size, "vector_quantization_hidden_dimension": WIDTH},
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
    # the projection's width follows from other widths, entropies of random logits are just below the logarithm of the vocabulary,
    # and transformers 5.23 cannot make the cache
    "blt": {
        "global_config.encoder_cross_output_size": lambda c: c.encoder_config.hidden_size * c.cross_attn_k,
        "patching_threshold": 4.82,
        "use_cache": False,
    },
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
    layers = kept_layers(fields)
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig):
            _shrink(value, tokens)
            continue
        if name in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"):
            _set(config, name, None)
            continue
        new = new_value(name, value, fields, layers, tokens)
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


# Fields that follow from others


def _fit_layer_overrides(config: Any, layers: list[int] | None) -> None:
    """Shrink the fields that some layers override, keeping their ratio to the common value."""
    spec = vars(config).get("_heterogeneity_spec")
    if spec is None or not layers:
        return
    small: dict[int, dict[str, Any]] = {}
    for index, different in spec.per_layer_overrides.items():
        if index in layers:
            small[layers.index(index)] = {
                name: 2 * HEAD_DIM if name == "head_dim" else new_value(name, value, different, layers, {})
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
            elif TOKEN_FIELDS.search(name) and isinstance(value, int) and not isinstance(value, bool):
                ids.add(value)
            elif TOKEN_FIELDS.search(name) and isinstance(value, (list, tuple)):
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
