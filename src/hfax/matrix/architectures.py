"""transformers' architectures, one class per model type and auto mapping, and a small config for each.

Turns a mapping name into `Architecture`s, and an architecture into a config for its class. Builds no models.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, ResNetConfig, SwinConfig
from transformers.models.auto import modeling_auto

from hfax.synthetic.shrink import shrink_config

MAPPINGS: dict[str, str] = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "video-classification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "audio-classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "object-detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "zero-shot-object-detection": "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING_NAMES",
    "zero-shot-image-classification": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "semantic-segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "instance-segmentation": "MODEL_FOR_INSTANCE_SEGMENTATION_MAPPING_NAMES",
    "universal-segmentation": "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
    "depth-estimation": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "multiple-choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "next-sentence-prediction": "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
    "table-question-answering": "MODEL_FOR_TABLE_QUESTION_ANSWERING_MAPPING_NAMES",
    "document-question-answering": "MODEL_FOR_DOCUMENT_QUESTION_ANSWERING_MAPPING_NAMES",
    "visual-question-answering": "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES",
    "masked-image-modeling": "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES",
    "image-to-image": "MODEL_FOR_IMAGE_TO_IMAGE_MAPPING_NAMES",
    "image-matting": "MODEL_FOR_IMAGE_MATTING_MAPPING_NAMES",
    "keypoint-detection": "MODEL_FOR_KEYPOINT_DETECTION_MAPPING_NAMES",
    "keypoint-matching": "MODEL_FOR_KEYPOINT_MATCHING_MAPPING_NAMES",
    "pose-estimation": "MODEL_FOR_POSE_ESTIMATION_MAPPING_NAMES",
    "normal-estimation": "MODEL_FOR_NORMAL_ESTIMATION_MAPPING_NAMES",
    "mask-generation": "MODEL_FOR_MASK_GENERATION_MAPPING_NAMES",
    "text-recognition": "MODEL_FOR_TEXT_RECOGNITION_MAPPING_NAMES",
    "audio-frame-classification": "MODEL_FOR_AUDIO_FRAME_CLASSIFICATION_MAPPING_NAMES",
    "audio-xvector": "MODEL_FOR_AUDIO_XVECTOR_MAPPING_NAMES",
    "text-to-spectrogram": "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES",
    "text-to-waveform": "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
    "time-series-classification": "MODEL_FOR_TIME_SERIES_CLASSIFICATION_MAPPING_NAMES",
    "time-series-regression": "MODEL_FOR_TIME_SERIES_REGRESSION_MAPPING_NAMES",
    "time-series-prediction": "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
"""Short name to the name of transformers' mapping."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of the matrix.

    Args:
        mapping: a key of `MAPPINGS`.
        model_type: transformers model type.
        class_name: model class name.
    """

    mapping: str
    model_type: str
    class_name: str


def architectures(mapping: str) -> list[Architecture]:
    """All architectures of a mapping, by model type."""
    found = []
    for model_type, classes in getattr(modeling_auto, MAPPINGS[mapping]).items():
        for name in [classes] if isinstance(classes, str) else classes[:1]:
            found.append(Architecture(mapping=mapping, model_type=model_type, class_name=name))
    return sorted(found, key=lambda a: a.model_type)


_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_CODES = range(32)
_CHAMELEON_MAP = {"<image>": 190} | {f"IMGIMG{''.join(chr(65 + int(d)) for d in str(i))}Z": 100 + i for i in _CODES}
_EMU3_MAP = {"<image>": 190, "<|extra_200|>": 191} | {f"<|visual token {i:06}|>": 100 + i for i in _CODES}
_SIDES = {"long": 7, "mid": 5, "short": 3}
_BLOCK: dict[str, Any] = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{f"vertical_long_to_small_conv_{n}ratio": [[k, 1], [1, 1], [k // 2, 0]] for n, k in _SIDES.items()},
    **{f"horizontal_small_to_long_conv_{n}ratio": [[1, k], [1, 1], [0, k // 2]] for n, k in _SIDES.items()},
    **{f"symmetric_conv_long_{n}ratio": [[k, k], [1, 1], [k // 2, k // 2]] for n, k in _SIDES.items()},
}
MISSING: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "chameleon": {"vocabulary_map": _CHAMELEON_MAP, "image_token_id": 190},
    "emu3": {"vocabulary_map": _EMU3_MAP, "image_token_id": 190},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * 31], "num_experts_per_tok": 6},
    "step3p5": {"sliding_window": 512},
    "qwen2_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]}},
    "qwen2_5_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]}},
    "glm_image_text": {"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12]}},
    "glm_ocr_text": {"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12]}},
    "autoformer": {"prediction_length": 8, "context_length": 16},
    "informer": {"prediction_length": 8, "context_length": 16},
    "time_series_transformer": {"prediction_length": 8, "context_length": 16},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "beit": {"_out_indices": [3, 5, 7, 11], "_out_features": ["stage3", "stage5", "stage7", "stage11"]},
    "data2vec-vision": {"_out_indices": [3, 5, 7, 11], "_out_features": ["stage3", "stage5", "stage7", "stage11"]},
    "pp_doclayout_v2": {"class_thresholds": [0.5] * 25, "class_order": list(range(25))},
    "glm4v_text": {"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12]}},
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}},
    "hunyuan_vl_text": {"head_dim": 128, "rope_parameters": {**_ROPE, "mrope_section": [16, 16, 16, 16]}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652, "vision_end_token_id": 151653},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652, "vision_end_token_id": 151653},
    "t5": {"decoder_start_token_id": 0},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "instructblipvideo": {"video_token_index": 190},
    "pp_ocrv5_server_det": {
        "intraclass_block_config": _BLOCK,
        "kernel_list": [3, 2, 2],
        "scale_factor_list": [1, 2, 4, 8],
    },
    "pp_ocrv6_medium_det": {
        "intraclass_block_config": _BLOCK,
        "kernel_list": [3, 2, 2],
        "scale_factor_list": [1, 2, 4, 8],
    },
    "shieldgemma2": {"yes_token_index": 150, "no_token_index": 151},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "vitmatte": {"convstream_hidden_sizes": [8, 16, 32], "fusion_hidden_sizes": [32, 16, 16, 8]},
    "vits": {"noise_scale": 0.0, "noise_scale_duration": 0.0},  # no random numbers
    "lw_detr": {"projector_scale_factors": [1.0], "num_feature_levels": 1},
    "granite4_vision": {"deepstack_layer_map": [(0, 0), (1, 1)], "downsample_rate": "1/2"},
}
"""Model type to config fields missing from its defaults but set in every published checkpoint."""


def complete(config: Any) -> None:
    """Fill in config fields that have no usable default but are required to build the model."""
    backbone: Any = getattr(config, "backbone_config", None)
    if type(backbone).__name__ == "TimmBackboneConfig":
        # the equivalent network in transformers
        if "swin" in backbone.backbone:
            small: Any = SwinConfig(embed_dim=16, depths=[1] * 4, num_heads=[2] * 4, image_size=64, window_size=4)
        else:
            small = ResNetConfig(hidden_sizes=[16, 32, 32, 64], depths=[1] * 4, embedding_size=16, layer_type="basic")
        small.set_output_features_output_indices(out_features=None, out_indices=list(backbone.out_indices))
        object.__setattr__(config, "backbone_config", small)
        object.__setattr__(config, "timm_kwargs", {})
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            complete(part)
        elif name == "vision_config" and config.sub_configs[name] is not AutoConfig:
            object.__setattr__(config, name, config.sub_configs[name]())
    for name, value in MISSING.get(config.model_type, {}).items():
        object.__setattr__(config, name, copy.deepcopy(value))
    for name in ("image_token_id", "image_token_index"):  # image placeholder token, set only in checkpoints
        if name in vars(config) and getattr(config, name) is None and not config.is_encoder_decoder:
            object.__setattr__(config, name, config.get_text_config().vocab_size - 1)
    rope = vars(config).get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope and rope["rope_theta"] is None:
        rope["rope_theta"] = _ROPE["rope_theta"]
    if getattr(config, "languages", None) and getattr(config, "default_language", "") is None:
        config.default_language = config.languages[0]
    if config.model_type == "dbrx" and not hasattr(config.attn_config, "rope_theta"):
        config.attn_config.rope_theta = _ROPE["rope_theta"]
        config.attn_config.clip_qkv = 8.0


def small_config(architecture: Architecture) -> PretrainedConfig:
    """Make a small config for the architecture's class; for a submodel's class, the sub-config.

    Raises:
        UnsupportedModelError: the config cannot be shrunk.
    """
    config: Any = CONFIG_MAPPING[architecture.model_type]()
    wanted: Any = getattr(transformers, architecture.class_name).config_class
    if wanted is not None and not isinstance(config, wanted):
        parts = [getattr(config, name, None) for name in config.sub_configs]
        config = next((p for p in parts if isinstance(p, wanted)), None) or wanted()
    complete(config)
    small = shrink_config(config)
    text = small.get_text_config()
    if architecture.mapping == "sequence-classification" and getattr(text, "pad_token_id", 0) is None:
        small.pad_token_id = text.pad_token_id = 0
    if architecture.mapping == "causal-lm":
        for name in ("is_decoder",):
            if hasattr(small, name):
                setattr(small, name, True)
    if "is_encoder_decoder" in vars(small) and architecture.mapping == "causal-lm":
        small.is_encoder_decoder = False
    return small
