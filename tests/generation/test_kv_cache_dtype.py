"""A KV cache of float8: the logits of transformers with a cache that rounds likewise, on every kind of cache there is."""

from collections.abc import Callable
from typing import Any

import generation_pairs
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import torch
import transformers
from generation_pairs import CONFIGS, GREEDY, batch_of
from transformers.cache_utils import Cache, EncoderDecoderCache

from hfax import Engine, EngineConfig, SamplingParams
from hfax.errors import InvalidInputError, UnsupportedModelError, UnsupportedOptionError
from hfax.kernels.cache_numbers import FP8, to_cache

pairs = generation_pairs.pairs

KINDS = {
    **{name: CONFIGS[name] for name in ("llama", "gpt2", "t5", "bart")},
    "gemma2": transformers.Gemma2Config(**tiny_models.SIZES, head_dim=16, sliding_window=9, attn_logit_softcapping=5.0),
    "deepseek": transformers.DeepseekV3Config(
        **{**tiny_models.SIZES, "num_key_value_heads": 4},
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=2,
    ),
}  # fmt: skip


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' caches round to float8, but for those of an encoder's output."""
    update, init = Cache.update, EncoderDecoderCache.__init__

    def rounded(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not getattr(self, "is_of_encoder", False):
            keys, values = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values))
        return update(self, keys, values, *args, **options)

    def marked(self: Any, *caches: Any) -> None:
        init(self, *caches)
        self.cross_attention_cache.is_of_encoder = True

    monkeypatch.setattr(Cache, "update", rounded)
    monkeypatch.setattr(EncoderDecoderCache, "__init__", marked)


def scores_of(out: Any) -> np.ndarray:
    return np.maximum(
        np.stack([np.asarray(step, np.float32) for step in out.scores]), -1e4
    )  # forced tokens leave minus infinity


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_transformers_with_rounded_keys_and_values(
    pairs: Any, name: str, request: pytest.FixtureRequest
) -> None:
    model, plain = pairs(name, KINDS[name])
    batch = batch_of(name)
    exact = plain.generate(**batch, **GREEDY)
    request.getfixturevalue("rounding")
    expected = plain.generate(**batch, **GREEDY)
    ours = model.generate(**batch, **GREEDY, kv_cache_dtype="fp8")
    assert ours.sequences.tolist() == expected.sequences.tolist()
    error = np.abs(scores_of(ours) - scores_of(expected)).mean()
    same = exact.sequences[:, :-6].tolist() == expected.sequences[:, :-6].tolist()
    effect = np.abs(scores_of(exact)[0] - scores_of(expected)[0]).mean()
    assert same
    # a number between two of float8 may be rounded to the other one, which is a small part of all that rounding changes
    assert error < 0.1 * effect


def test_the_cache_is_of_float8(pairs: Any) -> None:
    model, _ = pairs("llama", KINDS["llama"])
    options = {**GREEDY, "max_new_tokens": 2}
    plain, rounded = (
        model.generate(**batch_of("llama"), **options, kv_cache_dtype=name).cache.state["cache"]
        for name in (None, "fp8")
    )
    assert {array.dtype for array in rounded.values()} == {FP8}
    assert {array.dtype for array in plain.values()} == {jnp.dtype("float32")}


def test_a_conversation_continues_it(pairs: Any) -> None:
    """One read after the other gives what one call with all of it gives: a prompt's own keys are rounded before it reads them."""
    model, _ = pairs("llama", KINDS["llama"])
    first = model.generate(**batch_of("llama"), **GREEDY, kv_cache_dtype="fp8")
    ids = np.concatenate([np.asarray(first.sequences), [[9, 4], [11, 3], [8, 8]]], axis=1)
    mask = np.pad(batch_of("llama")["attention_mask"].numpy(), ((0, 0), (0, ids.shape[1] - 6)), constant_values=1)
    whole = model.generate(ids, attention_mask=mask, **GREEDY, kv_cache_dtype="fp8")
    second = model.generate(ids, attention_mask=mask, **GREEDY, kv_cache_dtype="fp8", past_key_values=first.cache)
    assert np.asarray(second.sequences).tolist() == np.asarray(whole.sequences).tolist()
    np.testing.assert_allclose(scores_of(second), scores_of(whole), atol=0.05)
    unrounded = model.generate(**batch_of("llama"), **GREEDY)
    with pytest.raises(UnsupportedOptionError, match="another dtype"):
        model.generate(ids, attention_mask=mask, **GREEDY, kv_cache_dtype="fp8", past_key_values=unrounded.cache)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"guidance_scale": 1.5}, {"num_return_sequences": 2, "do_sample": True}],
    ids=["beams", "drafts", "guidance", "samples"],
)  # fmt: skip
def test_beside_other_options(pairs: Any, options: dict[str, Any]) -> None:
    model, _ = pairs("llama", KINDS["llama"])
    prompt = np.array([[9, 3, 61, 33, 2, 7]])
    options = {"do_sample": False, **options, "max_new_tokens": 5, "seed": 1}
    plain = np.asarray(model.generate(prompt, **options))
    rounded = np.asarray(model.generate(prompt, **options, kv_cache_dtype="fp8_e4m3"))
    assert rounded.shape == plain.shape
    assert rounded[:, :6].tolist() == plain[:, :6].tolist()
    if options.keys() & {"prompt_lookup_num_tokens"}:  # draft tokens change the speed alone
        del options["prompt_lookup_num_tokens"]
        assert rounded.tolist() == np.asarray(model.generate(prompt, **options, kv_cache_dtype="fp8")).tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "deepseek"])
def test_the_engine_writes_what_generate_writes(pairs: Any, name: str) -> None:
    """On pages, and in slots where a model supports no pages; prompts are read in parts of eight tokens."""
    model, _ = pairs(name, KINDS[name])
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(2, 97, n).tolist() for n in (3, 20, 13)]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64}
    with Engine(model, config=EngineConfig(**options, kv_cache_dtype="fp8")) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(np.array([prompt]), max_new_tokens=6, do_sample=False, kv_cache_dtype="fp8")
        assert output.outputs[0].token_ids == np.asarray(expected)[0, len(prompt) :].tolist()


def test_a_page_takes_a_quarter_of_float32(pairs: Any) -> None:
    model, _ = pairs("llama", KINDS["llama"])
    sizes = []
    for name in ("auto", "fp8"):
        with Engine(model, config=EngineConfig(max_num_seqs=2, max_model_len=64, kv_cache_dtype=name)) as engine:
            sizes.append(engine._runner._layout.page_bytes)
    assert sizes[0] == 4 * sizes[1]


def test_what_is_refused(pairs: Any) -> None:
    model, _ = pairs("llama", KINDS["llama"])
    for name in ("int4", "float8", 8):
        with pytest.raises(InvalidInputError, match="kv_cache_dtype"):
            model.generate(np.array([[1, 2]]), max_new_tokens=1, kv_cache_dtype=name)
    with pytest.raises(InvalidInputError, match="kv_cache_dtype"):
        Engine(model, config=EngineConfig(kv_cache_dtype="int3"))
    recurrent, _ = pairs("mamba", CONFIGS["mamba"])
    with pytest.raises(UnsupportedModelError, match="no KV cache"):
        recurrent.generate(np.array([[1, 2]]), max_new_tokens=1, kv_cache_dtype="fp8")


def test_numbers_become_the_nearest_and_the_largest() -> None:
    given = [0.0, 1.0, 1.07, -3.3, 447.0, 500.0, -1e9, np.inf, 1e-9]
    numbers: Callable[[Any], Any] = lambda x: np.asarray(to_cache(jnp.asarray(x, jnp.float32), FP8), np.float32)  # noqa: E731
    expected = torch.tensor(given).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(numbers(given), expected)
    assert np.isnan(numbers(np.nan))
