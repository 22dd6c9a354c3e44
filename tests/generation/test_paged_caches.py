"""`generate` with caches in pages, as on TPU: the same text as with dense ones, however it is generated."""

import functools

import numpy as np
import pytest
import transformers
from tiny_models import tiny_llama_config

from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams
from hfax.kernels.target import compiling_for
from hfax.programs import program_cache

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
SLIDING = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "all tokens": tiny_llama_config(**SIZES, max_position_embeddings=1024),
    "sinks": transformers.GptOssConfig(**SIZES, **SLIDING, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "soft caps": transformers.Gemma2Config(**SIZES, **SLIDING, head_dim=32),
    "biases": transformers.BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.1),
    "latents": transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
    ),
    "shared keys": transformers.Gemma3nTextConfig(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=16,
        sliding_window=100,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=64,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    ),
}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture
def models(monkeypatch, request):
    """The same model twice, with dense caches and with paged ones. Programs are not stored: their keys tell no difference."""
    monkeypatch.setenv("HFAX_PROGRAM_CACHE", "0")
    made = [AutoModelForTPU.from_config(CONFIGS[request.param], dtype="float32", seed=0) for _ in range(2)]

    def run(call):
        dense = call(made[0])
        with monkeypatch.context() as patched:
            patched.setattr(program_cache, "compiling_for", functools.partial(compiling_for, pages=True))
            return dense, call(made[1])

    run.is_paged = request.param != "biases"
    return run


def prompts(seed=0):
    ids = np.random.default_rng(seed).integers(3, 60, (2, 300))
    mask = np.ones_like(ids)
    mask[1, :77] = 0
    return ids, mask


@pytest.mark.parametrize(
    "models",
    [pytest.param(name, marks=[] if name in ("sinks", "biases") else [pytest.mark.sweep]) for name in CONFIGS],
    indirect=True,
)
def test_a_padded_batch(models):
    ids, mask = prompts()
    options = GREEDY | {"max_new_tokens": 12, "return_dict_in_generate": True}
    dense, in_pages = models(lambda model: model.generate(ids, attention_mask=mask, **options))
    np.testing.assert_array_equal(in_pages.sequences, dense.sequences)
    kinds = {name.rpartition(".")[2] for name in in_pages.cache.state["cache"]}
    assert kinds == ({"pages"} if models.is_paged else {"keys", "values"})


@pytest.mark.parametrize("models", ["all tokens", pytest.param("sinks", marks=pytest.mark.sweep)], indirect=True)
def test_a_conversation_whose_cache_grows(models):
    """Pages of all tokens had their old number in a cache of more tokens, and later tokens were written over the first ones."""
    ids, _ = prompts()
    options = GREEDY | {"return_dict_in_generate": True}

    def talk(model):
        first = model.generate(ids[:1, :150], max_new_tokens=12, **options)
        longer = np.concatenate([first.sequences, np.full((1, 9), 7)], axis=1)
        continued = model.generate(longer, max_new_tokens=400, past_key_values=first.cache, **options)
        assert continued.cache.capacity > first.cache.capacity
        return longer, continued.sequences

    (longer, dense), (same, in_pages) = models(talk)
    np.testing.assert_array_equal(longer, same)
    np.testing.assert_array_equal(in_pages, dense)


@pytest.mark.parametrize("models", ["all tokens", pytest.param("sinks", marks=pytest.mark.sweep)], indirect=True)
@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"num_beams": 3}])
def test_several_tokens_or_texts_at_once(models, options):
    ids = np.tile(prompts()[0][:1, :30], (1, 8))
    options = GREEDY | options | {"max_new_tokens": 24}
    dense, in_pages = models(lambda model: model.generate(ids, **options))
    np.testing.assert_array_equal(in_pages, dense)


@pytest.mark.parametrize("models", ["latents"], indirect=True)
def test_slots_are_not_paged(models):
    """The engine maps a step over its slots, which kernels do not support; a prompt's pages had no place in them."""
    ids = prompts()[0][0, :40].tolist()

    def serve(model):
        with Engine(model, config=EngineConfig(max_num_seqs=2, max_model_len=128)) as engine:
            assert not engine.is_paged
            (output,) = engine.generate([ids], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
            return output.outputs[0].token_ids

    dense, in_pages = models(serve)
    assert in_pages == dense
