"""Scores against transformers' own processors, in its own order, each row alone and without padding."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_models import tiny_llama_config
from transformers import GenerationConfig, LlamaForCausalLM

from hfax.generation.logits_processors import PROCESSORS
from hfax.generation.sampling import init_sampling_state, process_logits, update_sampling_state
from hfax.generation.sampling_config import make_sampling_spec

VOCAB = 40
EOS = [5, 11]
PAD = 3
PROMPT_LENGTHS = (8, 1, 4, 2)
MAX_NEW_TOKENS = 6

NEVER_SAMPLED = {
    "nothing": {},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_reward": {"repetition_penalty": 0.6},
    "no_repeat_unigrams": {"no_repeat_ngram_size": 1},
    "no_repeat_bigrams": {"no_repeat_ngram_size": 2},
    "no_repeat_trigrams": {"no_repeat_ngram_size": 3},
    "bad_words": {"bad_words_ids": [[7], [1, 2], [PAD, 1], [PAD, PAD, 2], [0, 1, 2, 3], [11], [2, 5]]},
    "sequence_bias": {
        "sequence_bias": [[[7], -2.5], [[1, 2], 4.0], [[0, 2], 1.5], [[PAD, PAD, 1], 3.0], [[2, 9], 0.5]]
    },
    "min_length": {"min_length": 6},
    "min_new_tokens": {"min_new_tokens": 3},
    "min_new_tokens_over_min_length": {"min_new_tokens": 2, "min_length": 30},
    "forced_bos": {"forced_bos_token_id": 4},
    "forced_eos": {"forced_eos_token_id": 5},
    "forced_eos_of_several": {"forced_eos_token_id": [5, 11]},
    "remove_invalid_values": {"remove_invalid_values": True, "bad_words_ids": [[7]]},
    "exponential_decay": {"exponential_decay_length_penalty": (2, 1.3)},
    "suppress_tokens": {"suppress_tokens": [0, 1, 2]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [4, 5, 6]},
    "begin_suppress_after_forced_bos": {"begin_suppress_tokens": [4, 5, 6], "forced_bos_token_id": 4},
    "renormalize": {"renormalize_logits": True, "suppress_tokens": [1]},
}
SAMPLED = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_k_past_vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.8},
    "tiny_top_p": {"top_p": 1e-6},
    "top_k_top_p": {"top_k": 9, "top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.03},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "warpers_after_bans": {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "suppress_tokens": [2, 3]},
    "everything": {
        **NEVER_SAMPLED["bad_words"],
        **NEVER_SAMPLED["sequence_bias"],
        **{"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95, "epsilon_cutoff": 1e-3},
        **{"eta_cutoff": 1e-3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 2},
        **{"exponential_decay_length_penalty": (1, 1.1), "suppress_tokens": [30], "begin_suppress_tokens": [31]},
        "renormalize_logits": True,
    },
}
OPTIONS = NEVER_SAMPLED | {name: {"do_sample": True, **options} for name, options in SAMPLED.items()}


@functools.cache
def reference_model() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(tiny_llama_config(vocab_size=VOCAB))


def reference_scores(config: GenerationConfig, prompt: np.ndarray, drawn: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """What transformers' generate() makes of the logits [vocab] of one sequence."""
    config = copy.deepcopy(config)
    config.max_length = len(prompt) + MAX_NEW_TOKENS
    config._eos_token_tensor = None if config.eos_token_id is None else torch.tensor(config.eos_token_id)
    if config.min_new_tokens is not None:
        config.min_length = len(prompt) + config.min_new_tokens
    processors = reference_model()._get_logits_processor(
        config, input_ids_seq_length=len(prompt), device="cpu", model_kwargs={}
    )
    ids = torch.tensor(np.concatenate([prompt, drawn])[None], dtype=torch.int64)
    return processors(ids, torch.tensor(logits[None], dtype=torch.float32))[0].numpy()


process = jax.jit(process_logits, static_argnums=0)


def assert_same_scores(actual: np.ndarray, expected: np.ndarray, context: str) -> None:
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected), err_msg=context)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=context)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_row_of_a_left_padded_batch_scores_as_transformers_scores_it_alone(name: str):
    config = GenerationConfig(eos_token_id=EOS, **OPTIONS[name])
    rng = np.random.default_rng(len(name))
    rows, width = len(PROMPT_LENGTHS), max(PROMPT_LENGTHS)
    mask = np.arange(width)[None] >= width - np.asarray(PROMPT_LENGTHS)[:, None]
    few = np.asarray([0, 1, 2, PAD], np.int32)
    prompts = np.where(mask, rng.choice(few, (rows, width)), PAD).astype(np.int32)
    drawn = rng.choice(few, (rows, MAX_NEW_TOKENS)).astype(np.int32)
    spec, values = make_sampling_spec(config, vocab_size=VOCAB, prompt_length=width, max_new_tokens=MAX_NEW_TOKENS)
    state = init_sampling_state(spec, VOCAB, jnp.asarray(prompts), jnp.asarray(mask))
    for step in range(MAX_NEW_TOKENS):
        tokens = np.full((rows, width + MAX_NEW_TOKENS + 3), 2, np.int32)
        tokens[:, : width + step] = np.concatenate([prompts, drawn[:, :step]], axis=1)
        logits = (3 * rng.normal(size=(rows, VOCAB))).astype(np.float32)
        if config.remove_invalid_values:
            logits[:, 20], logits[:, 21], logits[:, 22] = np.nan, np.inf, -np.inf
        actual = np.asarray(process(spec, values, state, logits, tokens, np.int32(step)))
        for row, length in enumerate(PROMPT_LENGTHS):
            expected = reference_scores(config, prompts[row, width - length :], drawn[row, :step], logits[row])
            assert_same_scores(actual[row], expected, f"{name}, row {row}, step {step}")
        state = update_sampling_state(spec, state, jnp.asarray(drawn[:, step]))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 50},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 0.3},
        {"typical_p": 0.8},
        {"eta_cutoff": 3e-4},
    ],
    ids=str,
)
def test_a_large_vocabulary_keeps_the_same_tokens_as_transformers(options: dict):
    config = GenerationConfig(do_sample=True, **options)
    vocab = 50257
    logits = (2 * np.random.default_rng(7).normal(size=(2, vocab))).astype(np.float32)
    prompt = np.zeros((2, 1), np.int32)
    spec, values = make_sampling_spec(config, vocab_size=vocab, prompt_length=1, max_new_tokens=1)
    state = init_sampling_state(spec, vocab, jnp.asarray(prompt), jnp.ones((2, 1), bool))
    actual = np.asarray(process(spec, values, state, logits, prompt, np.int32(0)))
    for row in range(2):
        expected = reference_scores(config, prompt[row], prompt[row, :0], logits[row])
        # Where the sum of probabilities of thousands of tokens crosses top_p, a rounding may decide about one of them.
        num_other = (np.isneginf(actual[row]) != np.isneginf(expected)).sum()
        assert num_other <= (1 if {"top_p", "typical_p"} & set(options) else 0)
        both = np.isfinite(actual[row]) & np.isfinite(expected)
        np.testing.assert_allclose(actual[row][both], expected[both], rtol=1e-5)


def scores_of(logits: list[list[float]], **options: float) -> np.ndarray:
    """Processed logits behind a prompt of one token, id 0."""
    array = np.asarray(logits, np.float32)
    extra = {name: options.pop(name) for name in ("presence_penalty", "frequency_penalty") if name in options}
    spec, values = make_sampling_spec(
        GenerationConfig(**options), vocab_size=array.shape[1], prompt_length=1, max_new_tokens=4, **extra
    )
    prompt = jnp.zeros((len(array), 1), jnp.int32)
    state = init_sampling_state(spec, array.shape[1], prompt, jnp.ones(prompt.shape, bool))
    for token in (1, 1, 2):
        state = update_sampling_state(spec, state, jnp.full(len(array), token, jnp.int32))
    tokens = jnp.asarray([[0, 1, 1, 2, 0]] * len(array), jnp.int32)
    return np.asarray(process(spec, values, state, array, tokens, np.int32(3)))


def test_presence_and_frequency_penalties_count_drawn_tokens_and_not_the_prompt():
    scores = scores_of([[1.0, 1.0, 1.0, 1.0]], presence_penalty=0.5, frequency_penalty=0.25)
    np.testing.assert_allclose(scores, [[1.0, 1.0 - 0.5 - 2 * 0.25, 1.0 - 0.5 - 0.25, 1.0]])


def test_generated_penalties_come_after_the_repetition_penalty():
    scores = scores_of([[2.0, 2.0, -2.0, 2.0]], repetition_penalty=2.0, presence_penalty=0.5)
    np.testing.assert_allclose(scores, [[1.0, 0.5, -4.5, 2.0]])


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": 2, "top_p": 0.5}, {"top_p": 0.5}], ids=str)
def test_scores_that_tie_at_the_border_are_all_kept(options: dict):
    scores = scores_of([[1.0, 3.0, 1.0, 1.0, -5.0], [-1.0, -0.0, 0.0, 0.0, -3.0]], do_sample=True, **options)
    assert np.isfinite(scores[1]).tolist() == [False, True, True, True, False]
    assert np.isfinite(scores[0]).tolist() == (
        [True, True, True, True, False] if options == {"top_k": 2} else [False, True] + 3 * [False]
    )


def test_ties_past_the_candidates_count_in_the_mass_of_top_p():
    """One likely token and 63 equal ones: with top_k=2 all stay, and top_p=0.1 is reached by the first only if it has 10%."""
    logits = [[1.0] + 63 * [0.0]]
    kept = np.isfinite(scores_of(logits, do_sample=True, top_k=2, top_p=0.1))
    assert kept.sum() == 64
    assert np.e / (np.e + 63) < 0.1 < np.e / (np.e + 1)


def test_bfloat16_logits_are_processed_in_float32():
    spec, values = make_sampling_spec(
        GenerationConfig(do_sample=True, temperature=0.7), vocab_size=4, prompt_length=1, max_new_tokens=1
    )
    logits = jnp.asarray([[1.0, 2.0, 3.0, 4.0]], jnp.bfloat16)
    state = init_sampling_state(spec, 4, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool))
    scores = process(spec, values, state, logits, jnp.zeros((1, 2), jnp.int32), np.int32(0))
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, [[1 / 0.7, 2 / 0.7, 3 / 0.7, 4 / 0.7]], rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"typical_p": 0.9}], ids=str
)
def test_no_loop_sorts_the_vocabulary(options: dict):
    """A sliced `lax.top_k` becomes a sort in XLA's CPU backend, 100 times slower."""
    vocab = 4096
    spec, values = make_sampling_spec(
        GenerationConfig(do_sample=True, **options), vocab_size=vocab, prompt_length=1, max_new_tokens=1
    )

    def loop(logits: jax.Array) -> jax.Array:
        prompt = jnp.zeros((1, 1), jnp.int32)
        state = init_sampling_state(spec, vocab, prompt, jnp.ones((1, 1), bool))
        numbers = {name: jnp.asarray(value) for name, value in values.items()}
        step = lambda i, x: jnp.maximum(process_logits(spec, numbers, state, x, prompt, i), -9.0) + logits  # noqa: E731
        return jax.lax.fori_loop(0, 3, step, logits)

    text = jax.jit(loop).lower(jnp.zeros((1, vocab), jnp.float32)).compile().as_text()
    assert " sort(" not in text
    assert ('custom_call_target="TopK"' in text) == ("top_k" in options)


def test_the_host_names_only_processors_that_exist():
    everything = GenerationConfig(
        eos_token_id=EOS, forced_bos_token_id=1, forced_eos_token_id=1, **OPTIONS["everything"]
    )
    everything.remove_invalid_values = True
    rules = {"timestamp_begin": 5, "timestamp_text_end": 2, "timestamp_max_initial": 3}
    spec, _ = make_sampling_spec(
        everything, vocab_size=VOCAB, prompt_length=1, max_new_tokens=1, presence_penalty=0.1, timestamps=rules
    )
    alternatives = {"top_k", "top_p"}
    assert set(spec.active) == set(PROCESSORS) - alternatives
