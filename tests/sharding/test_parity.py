"""Models over meshes give the logits and the greedy tokens that they give on one device."""

import functools

import jax
import numpy as np
import pytest
import transformers

from hfax import AutoModelForTPU

NEW = 6
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

CONFIGS = {
    "dense": transformers.LlamaConfig(**TEXT, num_key_value_heads=8, tie_word_embeddings=False),
    "two_kv_heads": transformers.Qwen2Config(**TEXT, num_key_value_heads=2),
    "windows": transformers.Gemma3TextConfig(
        **TEXT,
        num_key_value_heads=4,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "experts": transformers.MixtralConfig(**TEXT, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2),
    "biased_experts": transformers.GptOssConfig(
        **TEXT,
        num_key_value_heads=4,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "latents": transformers.DeepseekV3Config(
        **TEXT,
        num_key_value_heads=8,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
    ),
    "state_space": transformers.MambaConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "encoder_decoder": transformers.T5Config(
        vocab_size=128,
        d_model=64,
        d_kv=8,
        d_ff=128,
        num_layers=2,
        num_heads=8,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "learned_positions": transformers.OPTConfig(
        vocab_size=128,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=256,
        init_std=0.2,
        eos_token_id=None,
        pad_token_id=0,
    ),
}

MESHES = {
    "tensor 2": {"tensor": 2},
    "tensor 4": {"tensor": 4},
    "tensor 8": {"tensor": 8},
    "data 2, tensor 4": {"data": 2, "tensor": 4},
    "expert 2, tensor 4": {"expert": 2, "tensor": 4},
    "expert 4, data 2": {"expert": 4, "data": 2},
    "fsdp 8": {"fsdp": 8},
    "fsdp 2, tensor 2, data 2": {"fsdp": 2, "tensor": 2, "data": 2},
}


def prompts(batch=8, length=12):
    ids = np.random.default_rng(0).integers(3, 120, (batch, length))
    mask = (np.arange(length)[None] >= (np.arange(batch) % 4)[:, None]).astype(np.int64)
    return np.where(mask, ids, 0), mask


def outputs(model):
    ids, mask = prompts()
    inputs = {"input_ids": ids, "attention_mask": mask}
    extra = {"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}
    logits = np.asarray(model(**inputs, **extra).logits)
    if not model.config.is_encoder_decoder:
        logits = logits * mask[:, :, None]
    tokens = np.asarray(model.generate(**inputs, max_new_tokens=NEW, do_sample=False))
    one = np.asarray(model.generate(ids[:1, 4:], max_new_tokens=NEW, do_sample=False))
    return logits, tokens, one


ON_EVERY_CHANGE = {
    ("dense", "fsdp 2, tensor 2, data 2"),
    ("two_kv_heads", "data 2, tensor 4"),
    ("windows", "tensor 4"),
    ("experts", "expert 2, tensor 4"),
    ("experts", "expert 4, data 2"),
    ("experts", "fsdp 8"),
    ("biased_experts", "expert 4, data 2"),
    ("state_space", "tensor 2"),
    ("encoder_decoder", "fsdp 2, tensor 2, data 2"),
    ("latents", "tensor 4"),
    ("learned_positions", "tensor 8"),
}
"""Every kind of model and every mesh; the sweep runs all pairs."""


@pytest.fixture(scope="module")
def expected():
    """Of a model on one device; made when it is first asked for."""
    return functools.cache(lambda name: outputs(AutoModelForTPU.from_config(CONFIGS[name])))


def cases():
    for name in CONFIGS:
        for mesh in MESHES:
            marks = () if (name, mesh) in ON_EVERY_CHANGE else pytest.mark.sweep
            yield pytest.param(name, mesh, marks=marks, id=f"{name}-{mesh}")


@pytest.mark.parametrize(("name", "mesh"), list(cases()))
def test_one_device_and_many_agree(name, mesh, expected):
    sizes = MESHES[mesh]
    model = AutoModelForTPU.from_config(CONFIGS[name], parallelism=sizes)
    assert len(
        model.params["lm_head.weight" if "lm_head.weight" in model.params else next(iter(model.params))].devices()
    ) == (np.prod(list(sizes.values())))
    logits, tokens, one = outputs(model)
    np.testing.assert_allclose(logits, expected(name)[0], atol=1e-4)
    np.testing.assert_array_equal(tokens, expected(name)[1])
    np.testing.assert_array_equal(one, expected(name)[2])


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("dense", "fsdp 2, tensor 2, data 2"), ("encoder_decoder", "data 2, tensor 4"), ("state_space", "tensor 2")],
)
def test_beams_are_the_same_on_many_devices(name, mesh):
    def search(model):
        ids, mask = prompts(batch=6)
        options = {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": [7, 11], "output_scores": True}
        found = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
        return found.sequences, found.beam_indices, found.sequences_scores

    ours = search(AutoModelForTPU.from_config(CONFIGS[name], parallelism=MESHES[mesh]))
    ids, parents, scores = search(AutoModelForTPU.from_config(CONFIGS[name]))
    np.testing.assert_array_equal(ours[0], ids)
    np.testing.assert_array_equal(ours[1], parents)
    np.testing.assert_allclose(ours[2], scores, atol=1e-4)


def test_eight_devices():
    assert jax.device_count() == 8
