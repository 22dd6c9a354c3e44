"""Writes small checkpoints and their outputs with transformers' last Flax classes: what hfax's reading of Flax is tested against.

Runs in an environment of its own, with Python 3.11:

    pip install "transformers==4.49.0" "jax==0.4.38" "jaxlib==0.4.38" "flax==0.10.4" "numpy<2.2" "scipy<1.16"
    python scripts/flax_reference.py tests/load/flax

Each model gets a folder with config.json, flax_model.msgpack (weights drawn from a fixed seed) and reference.npz (inputs under
their names, and what the Flax class computes of them under "output.…").
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict

TEXT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
BERT = {**TEXT, "max_position_embeddings": 24}
LLAMA = {**TEXT, "num_key_value_heads": 1, "max_position_embeddings": 32, "tie_word_embeddings": False}
BART = {
    **{"vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 24},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
}
T5 = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
IDS = np.array([[3, 5, 7, 11, 13, 17, 19, 23], [4, 8, 15, 16, 23, 42, 6, 9]], np.int32)
TEXTS = {"input_ids": IDS}
PAIRS = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "albert": ("AlbertForMaskedLM", {**BERT, "embedding_size": 8}, "text"),
    "bart": ("BartForConditionalGeneration", BART, "pair"),
    "beit": ("BeitForImageClassification", {**VISION, "vocab_size": 32, "num_labels": 3}, "image"),
    "bert": ("BertForMaskedLM", BERT, "text"),
    "big_bird": ("BigBirdForMaskedLM", {**BERT, "attention_type": "original_full"}, "text"),
    "blenderbot": ("BlenderbotForConditionalGeneration", BART, "pair"),
    "blenderbot_small": ("BlenderbotSmallForConditionalGeneration", BART, "pair"),
    "bloom": ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}, "masked text"),
    "clip": (
        "CLIPModel",
        {
            "text_config": {**BERT, "projection_dim": 8},
            "vision_config": {**VISION, "projection_dim": 8},
            "projection_dim": 8,
        },
        "image and text",
    ),
    "dinov2": ("Dinov2ForImageClassification", {**VISION, "num_labels": 3}, "image"),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 24},
        "text",
    ),
    # without token types the Flax class takes ones, the PyTorch class zeros
    "electra": ("ElectraForMaskedLM", {**BERT, "embedding_size": 8}, "typed text"),
    "gemma": (
        "GemmaForCausalLM",
        {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32},
        "text",
    ),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}, "text"),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 24,
        },
        "text",
    ),
    "gptj": (
        "GPTJForCausalLM",
        {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "rotary_dim": 4},
        "text",
    ),
    "llama": ("LlamaForCausalLM", LLAMA, "text"),
    "longt5": ("LongT5ForConditionalGeneration", {**T5, "local_radius": 3, "encoder_attention_type": "local"}, "pair"),
    "marian": ("MarianMTModel", BART, "pair"),
    "mbart": ("MBartForConditionalGeneration", BART, "pair"),
    # a window lets each token see one more in Flax than in PyTorch
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 32}, "text"),
    "mt5": (
        "MT5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "pair",
    ),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 24,
            "max_position_embeddings": 24,
            "word_embed_proj_dim": 16,
        },
        "text",
    ),
    "pegasus": ("PegasusForConditionalGeneration", BART, "pair"),
    "regnet": (
        "RegNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 2],
            "groups_width": 4,
            "layer_type": "y",
            "num_labels": 3,
        },
        "large image",
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 3},
        "large image",
    ),
    "roberta": ("RobertaForMaskedLM", BERT, "text"),
    "roberta_prelayernorm": ("RobertaPreLayerNormForMaskedLM", BERT, "text"),
    "t5": ("T5ForConditionalGeneration", T5, "pair"),
    "vit": ("ViTForImageClassification", {**VISION, "num_labels": 3}, "image"),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {
            **{
                "vocab_size": 12,
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 24,
            },
            **{"conv_dim": [8, 8], "conv_kernel": [4, 4], "conv_stride": [2, 2], "num_feat_extract_layers": 2},
            **{"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True},
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
        },
        "sound",
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **{"vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8},
            **{
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 24,
                "decoder_ffn_dim": 24,
            },
            **{"max_source_positions": 12, "max_target_positions": 24, "pad_token_id": 1, "decoder_start_token_id": 2},
        },
        "spectrogram",
    ),
    "xglm": (
        "XGLMForCausalLM",
        {
            "vocab_size": 64,
            "d_model": 16,
            "num_layers": 2,
            "attention_heads": 2,
            "ffn_dim": 24,
            "max_position_embeddings": 24,
        },
        "text",
    ),
    "xlm_roberta": ("XLMRobertaForMaskedLM", BERT, "text"),
}


def inputs_of(kind: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What the model reads, as its Flax class takes it."""
    pixels = lambda size: rng.normal(size=(2, 3, size, size)).astype(np.float32)  # noqa: E731
    return {
        "text": lambda: TEXTS,
        "typed text": lambda: {**TEXTS, "token_type_ids": np.zeros_like(IDS)},
        "masked text": lambda: {**TEXTS, "attention_mask": np.ones_like(IDS)},
        "pair": lambda: PAIRS,
        "image": lambda: {"pixel_values": pixels(16)},
        "large image": lambda: {"pixel_values": pixels(32)},
        "image and text": lambda: {**TEXTS, "pixel_values": pixels(16)},
        "sound": lambda: {"input_values": rng.normal(size=(2, 200)).astype(np.float32)},
        "spectrogram": lambda: {
            "input_features": rng.normal(size=(2, 8, 24)).astype(np.float32),
            "decoder_input_ids": IDS[:, :5],
        },
    }[kind]()


def drawn(params: Any, rng: np.random.Generator) -> Any:
    """Weights of which none is zero or one by default, so that none can be mistaken for another."""
    found = {}
    for path, array in flatten_dict(params).items():
        values = rng.normal(size=array.shape) * 0.2
        if (path[-1] in ("scale", "weight", "weight_g", "lambda1") and array.ndim < 2) or path[-1] == "weight_g":
            values = 1 + values
        if path[-1] == "var":
            values = 1 + np.abs(values)
        found[path] = np.asarray(values, np.float32)
    return unflatten_dict(found)


def write(folder: Path, name: str) -> None:
    """One model's folder."""
    cls_name, options, kind = MODELS[name]
    cls = getattr(transformers, f"Flax{cls_name}")
    rng = np.random.default_rng(sum(map(ord, name)))
    model = cls(cls.config_class(**options), seed=0)
    model.params = drawn(jax.tree_util.tree_map(np.asarray, model.params), rng)
    given = inputs_of(kind, rng)
    result = model(**given)
    outputs = {
        f"output.{key}": np.asarray(value)
        for key, value in result.items()
        if key in ("logits", "logits_per_image", "text_embeds", "image_embeds")
    }
    model.config.architectures = [cls_name]
    model.save_pretrained(folder / name)
    np.savez(folder / name / "reference.npz", **given, **outputs)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    for each in sys.argv[2:] or MODELS:  # FlaxRoFormer does not run on this jax
        write(target, each)
        print(each, "written", flush=True)
