"""Small copies of configs: small, of the same class, with every kind of layer that the original has."""

from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from hfax import shrink_config

_TYPES = {
    "llama": "LlamaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "jamba": "JambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "swin": "SwinForImageClassification",
    "wav2vec2": "Wav2Vec2ForCTC",
    "zamba2": "Zamba2ForCausalLM",
}


@pytest.mark.parametrize("model_type", _TYPES)
def test_small_model_can_be_built_and_is_small(model_type: str) -> None:
    original = CONFIG_MAPPING[model_type]()
    before = original.to_dict()
    small = shrink_config(original)
    assert original.to_dict() == before
    assert type(small) is type(original)
    with torch.device("meta"):
        model = getattr(transformers, _TYPES[model_type])(small)
    assert sum(p.numel() for p in model.parameters()) < 5_000_000


def _layer_kinds(config: Any) -> set[Any]:
    lists = [getattr(config, n, None) for n in ("layer_types", "mlp_layer_types", "layers_block_type")]
    present = [values for values in lists if isinstance(values, (list, tuple))]
    return set(zip(*present, strict=True)) if present else set()


@pytest.mark.parametrize(
    "model_type", ["gemma3_text", "qwen3_next", "gpt_oss", "zamba2", "lfm2", "deepseek_v32", "afmoe"]
)
def test_every_kind_of_layer_stays(model_type: str) -> None:
    original = CONFIG_MAPPING[model_type]()
    assert _layer_kinds(original)
    assert _layer_kinds(shrink_config(original)) == _layer_kinds(original)


def test_dense_layers_before_experts_stay() -> None:
    small: Any = shrink_config(transformers.DeepseekV3Config(first_k_dense_replace=3))
    assert small.first_k_dense_replace == 1
    assert small.num_hidden_layers == 2
    assert small.n_group > 1
    assert small.num_experts_per_tok < small.n_routed_experts


def test_windows_are_shorter_than_a_prompt_of_20() -> None:
    assert shrink_config(transformers.MistralConfig(sliding_window=4096)).sliding_window == 8


def test_grouped_queries_stay_grouped() -> None:
    heads = {
        n: shrink_config(transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=n)) for n in (32, 8, 1)
    }
    assert {n: c.num_key_value_heads for n, c in heads.items()} == {32: 4, 8: 2, 1: 1}


def test_special_tokens_stay_apart_and_inside_of_the_vocabulary() -> None:
    original = CONFIG_MAPPING["qwen2_5_vl"]()
    small = shrink_config(original)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = [getattr(small, n) for n in names]
    assert len(set(ids)) == len({getattr(original, n) for n in names})
    assert max(ids) < small.get_text_config().vocab_size


def test_parts_of_a_composite_config_shrink_together() -> None:
    small: Any = shrink_config(CONFIG_MAPPING["llava"]())
    assert small.text_config.hidden_size == small.vision_config.hidden_size == 64
