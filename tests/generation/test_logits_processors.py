"""Scores against transformers' own processors, in its own order, and what holds of hfax's alone: ties, sorts, dtypes."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from processor_contracts import (
    BEAM_CASES,
    CASES,
    NOT_ON_TORCH_XLA,
    NOT_OPTIONS,
    VOCAB,
    Batch,
    check,
    reference_processors,
    spec_of,
)
from transformers import GenerationConfig

from hfax.backends.torch_xla import sampling as torch_xla_sampling
from hfax.generation.logits_processors import PROCESSORS
from hfax.generation.sampling import init_sampling_state, process_logits, update_sampling_state
from hfax.generation.sampling_config import SamplingSpec, make_sampling_spec

process = jax.jit(process_logits, static_argnums=0)


def scores_of_steps(spec: SamplingSpec, values: Mapping[str, np.ndarray], batch: Batch) -> np.ndarray:
    """A `ScoresOf`."""
    state = init_sampling_state(spec, VOCAB, jnp.asarray(batch.prompts), jnp.asarray(batch.mask))
    found = []
    for step, logits in enumerate(batch.logits):
        found.append(process(spec, values, state, logits, batch.tokens_at(step), np.int32(step)))
        state = update_sampling_state(spec, state, jnp.asarray(batch.drawn[:, step]))
    return np.stack(found)


@pytest.mark.parametrize("name", CASES)
def test_each_row_of_a_left_padded_batch_scores_as_transformers_scores_it_alone(name: str):
    check(name, scores_of_steps)


@pytest.mark.parametrize("name", BEAM_CASES)
def test_filters_leave_beam_search_more_than_the_tokens_that_end_a_text(name: str):
    check(name, scores_of_steps, BEAM_CASES)


def test_every_processor_is_in_the_table_of_contracts():
    assert {name for case in CASES.values() for name in spec_of(case)[0].active} | set(NOT_OPTIONS) == set(PROCESSORS)


def test_torch_xla_has_the_same_processors_in_the_same_order_except_those_listed():
    assert set(NOT_ON_TORCH_XLA) <= set(PROCESSORS)
    assert list(torch_xla_sampling.PROCESSORS) == [name for name in PROCESSORS if name not in NOT_ON_TORCH_XLA]


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
        ids = torch.tensor(prompt[row][None], dtype=torch.int64)
        expected = reference_processors(config, 1)(ids, torch.tensor(logits[row][None]))[0].numpy()
        # Where the sum of probabilities of thousands of tokens crosses top_p, a rounding may decide about one of them.
        num_other = (np.isneginf(actual[row]) != np.isneginf(expected)).sum()
        assert num_other <= (1 if {"top_p", "typical_p"} & set(options) else 0)
        both = np.isfinite(actual[row]) & np.isfinite(expected)
        np.testing.assert_allclose(actual[row][both], expected[both], rtol=1e-5)


def scores_of(logits: list[list[float]], **options: float) -> np.ndarray:
    """Processed logits behind a prompt of one token, id 0."""
    array = np.asarray(logits, np.float32)
    spec, values = make_sampling_spec(
        GenerationConfig(**options), vocab_size=array.shape[1], prompt_length=1, max_new_tokens=4
    )
    prompt = jnp.zeros((len(array), 1), jnp.int32)
    state = init_sampling_state(spec, array.shape[1], prompt, jnp.ones(prompt.shape, bool))
    for token in (1, 1, 2):
        state = update_sampling_state(spec, state, jnp.full(len(array), token, jnp.int32))
    tokens = jnp.asarray([[0, 1, 1, 2, 0]] * len(array), jnp.int32)
    return np.asarray(process(spec, values, state, array, tokens, np.int32(3)))


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
