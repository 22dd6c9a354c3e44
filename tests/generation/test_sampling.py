"""Draws: their distribution, their reproducibility, their independence of other rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats
from transformers import GenerationConfig
from transformers.generation import logits_process as reference

from hfax.generation.sampling import (
    _draw_index,
    choose_token,
    init_sampling_state,
    process_logits,
    update_sampling_state,
)
from hfax.generation.sampling_config import SamplingSpec, make_sampling_spec

DRAWS = 20_000
VOCAB = 48
PROMPT = [4, 9, 4]
DRAWN = [7, 7, 30]

choose = jax.jit(choose_token, static_argnums=0)

SAMPLE = SamplingSpec(do_sample=True, active=(), num_candidates=0, no_repeat_ngram_size=0)
GREEDY = SamplingSpec(do_sample=False, active=(), num_candidates=0, no_repeat_ngram_size=0)


def counted_penalties(scores: torch.Tensor, presence: float, frequency: float) -> torch.Tensor:
    """vLLM's formula, written out for the drawn tokens of this test."""
    scores = scores.clone()
    for token in set(DRAWN):
        scores[:, token] -= presence + frequency * DRAWN.count(token)
    return scores


IDS = torch.tensor([PROMPT + DRAWN])
OPTIONS = {
    "plain": ({}, []),
    "temperature": ({"temperature": 0.6}, [reference.TemperatureLogitsWarper(0.6)]),
    "top_k": ({"top_k": 6}, [reference.TopKLogitsWarper(6)]),
    "top_p": ({"top_p": 0.7}, [reference.TopPLogitsWarper(0.7)]),
    "top_k_top_p": ({"top_k": 9, "top_p": 0.8}, [reference.TopKLogitsWarper(9), reference.TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.1}, [reference.MinPLogitsWarper(0.1)]),
    "typical_p": ({"typical_p": 0.7}, [reference.TypicalLogitsWarper(0.7)]),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.02}, [reference.EpsilonLogitsWarper(0.02)]),
    "eta_cutoff": ({"eta_cutoff": 0.02}, [reference.EtaLogitsWarper(0.02)]),
    "repetition_penalty": ({"repetition_penalty": 1.5}, [reference.RepetitionPenaltyLogitsProcessor(1.5)]),
    "presence_penalty": ({"presence_penalty": 0.8}, [lambda _, s: counted_penalties(s, 0.8, 0.0)]),
    "frequency_penalty": ({"frequency_penalty": 0.4}, [lambda _, s: counted_penalties(s, 0.0, 0.4)]),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 1}, [reference.NoRepeatNGramLogitsProcessor(1)]),
    "bad_words_ids": ({"bad_words_ids": [[7, 30, 2], [8]]}, [reference.NoBadWordsLogitsProcessor([[7, 30, 2], [8]])]),
    "sequence_bias": ({"sequence_bias": [[[30, 2], 1.5]]}, [reference.SequenceBiasLogitsProcessor([[[30, 2], 1.5]])]),
    "suppress_tokens": ({"suppress_tokens": [1, 2]}, [reference.SuppressTokensLogitsProcessor([1, 2])]),
    "min_new_tokens": ({"min_new_tokens": 5}, [reference.MinNewTokensLengthLogitsProcessor(3, 5, [5])]),
    "forced_eos_token_id": ({"forced_eos_token_id": [5, 6]}, [reference.ForcedEOSTokenLogitsProcessor(7, [5, 6])]),
    "exponential_decay": (
        {"exponential_decay_length_penalty": (1, 1.2)},
        [reference.ExponentialDecayLengthPenalty((1, 1.2), [5], 3)],
    ),
    "renormalize_logits": ({"renormalize_logits": True}, [reference.LogitNormalization()]),
}


@functools.partial(jax.jit, static_argnums=(0, 3))
def draw_many(spec: SamplingSpec, values: dict, logits: jax.Array, rows: int, seed: jax.Array) -> jax.Array:
    """The fourth token of `rows` sequences with the same text and the same logits."""
    prompt = jnp.tile(jnp.asarray(PROMPT, jnp.int32), (rows, 1))
    state = init_sampling_state(spec, VOCAB, prompt, jnp.ones(prompt.shape, bool))
    for token in DRAWN:
        state = update_sampling_state(spec, state, jnp.full(rows, token, jnp.int32))
    tokens = jnp.tile(jnp.asarray([*PROMPT, *DRAWN, 0], jnp.int32), (rows, 1))
    scores = process_logits(spec, values, state, jnp.tile(logits, (rows, 1)), tokens, jnp.int32(3))
    return choose_token(spec, scores, seed, jnp.int32(3))


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_scores_that_transformers_computes(name: str):
    """Chi-square of 20,000 draws against the softmax of transformers' scores.

    A correct sampler fails one seed in 10,000; the seed is fixed, so the test does not flicker, and over these 20 options the odds
    that a change of the random stream gives a false alarm are 1 in 500.
    """
    options, processors = OPTIONS[name]
    extra = {key: value for key, value in options.items() if key in ("presence_penalty", "frequency_penalty")}
    config = GenerationConfig(
        do_sample=True, eos_token_id=5, **{key: value for key, value in options.items() if key not in extra}
    )
    logits = np.random.default_rng(11).normal(size=VOCAB).astype(np.float32) * 1.5
    scores = torch.tensor(logits[None])
    for processor in processors:
        scores = processor(IDS, scores)
    expected = torch.softmax(scores[0].double(), dim=-1).numpy() * DRAWS
    spec, values = make_sampling_spec(config, vocab_size=VOCAB, prompt_length=3, max_new_tokens=4, **extra)
    counts = np.bincount(draw_many(spec, values, logits, DRAWS, np.uint32(2024)), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


def test_draws_from_many_blocks_of_the_vocabulary_follow_the_scores():
    """Chi-square over 61 groups of 10007 tokens, 20,000 draws; a correct sampler fails one seed in 10,000."""
    vocab, rows = 10007, 1000
    scores = np.random.default_rng(3).normal(size=vocab).astype(np.float32)
    group = np.arange(vocab) % 61
    chances = np.exp(scores.astype(np.float64))
    wanted = np.bincount(group, chances) / chances.sum() * DRAWS
    tiled = jnp.asarray(np.broadcast_to(scores, (rows, vocab)))
    drawn = np.concatenate([choose(SAMPLE, tiled, np.uint32(5), np.int32(step)) for step in range(DRAWS // rows)])
    assert stats.chisquare(np.bincount(group[drawn]), wanted).pvalue > 1e-4


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others():
    scores = np.zeros((64, VOCAB), np.float32)
    first, again, other = (np.asarray(choose(SAMPLE, scores, np.uint32(s), np.int32(0))) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5


def test_a_draw_does_not_depend_on_the_rows_beside_it():
    scores = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32)
    others = np.concatenate([scores[:3], 5 * scores[3:]])
    for step in range(20):
        alone = np.asarray(choose(SAMPLE, scores[:3], np.uint32(9), np.int32(step)))
        np.testing.assert_array_equal(alone, choose(SAMPLE, scores, np.uint32(9), np.int32(step))[:3])
        np.testing.assert_array_equal(alone, choose(SAMPLE, others, np.uint32(9), np.int32(step))[:3])


def test_rows_and_steps_have_streams_of_their_own():
    """Rows of equal scores, and successive steps, draw pairs that are independent: chi-square of the 6 by 6 table of pairs."""
    scores = np.zeros((DRAWS, 6), np.float32)
    first = np.asarray(choose(SAMPLE, scores, np.uint32(4), np.int32(0)))
    second = np.asarray(choose(SAMPLE, scores, np.uint32(4), np.int32(1)))
    for left, right in ((first[:-1], first[1:]), (first, second)):
        table = np.bincount(6 * left + right, minlength=36)
        assert stats.chisquare(table).pvalue > 1e-4


def test_banned_tokens_are_never_drawn():
    rng = np.random.default_rng(1)
    scores = np.full((DRAWS, 1000), -np.inf, np.float32)
    allowed = rng.integers(0, 1000, (DRAWS, 2))
    np.put_along_axis(scores, allowed, rng.normal(size=(DRAWS, 2)).astype(np.float32) * 20, axis=1)
    drawn = np.asarray(choose(SAMPLE, scores, np.uint32(0), np.int32(0)))
    assert (drawn[:, None] == allowed).any(axis=1).all()


def test_a_rise_of_the_sum_by_rounding_draws_no_banned_token():
    """XLA sums long rows in a tree: there the running sum may rise, or fall, by a rounding where a weight is 0."""
    rng = np.random.default_rng(0)
    weights = (rng.random((4000, 594)) * (rng.random((4000, 594)) < 0.5)).astype(np.float32)
    sums = np.asarray(jax.jit(lambda w: jnp.cumsum(w, axis=-1))(weights))
    has_risen = (sums[:, 1:] > sums[:, :-1]) & (weights[:, 1:] == 0)
    rows = np.flatnonzero(has_risen.any(axis=1))
    before = sums[rows, has_risen[rows].argmax(axis=1)]
    drawn = np.asarray(jax.jit(_draw_index)(weights[rows], (before / sums[rows, -1])[:, None]))
    assert len(rows) > 100
    assert (weights[rows, drawn] > 0).all()


def test_greedy_takes_the_first_of_equal_scores():
    scores = np.asarray([[0, 3, 3, 1], [-1, -2, -1, -3], [-np.inf] * 4, [1, np.nan, 2, np.nan]], np.float32)
    np.testing.assert_array_equal(choose(GREEDY, scores, np.uint32(0), np.int32(0)), scores.argmax(axis=-1))


def test_a_row_that_cannot_be_drawn_from_takes_its_first_maximum():
    scores = np.asarray(
        [[-np.inf] * 4, [1, np.nan, 2, 3], [0, 1, np.inf, 2], [-np.inf, 5, -np.inf, -np.inf]], np.float32
    )
    np.testing.assert_array_equal(choose(SAMPLE, scores, np.uint32(0), np.int32(0)), [0, 1, 2, 1])


def test_states_hold_only_what_active_processors_need():
    prompt, mask = jnp.asarray([[0, 0, 5], [1, 2, 3]]), jnp.asarray([[False, False, True], [True, True, True]])
    spec, _ = make_sampling_spec(GenerationConfig(), vocab_size=8, prompt_length=3, max_new_tokens=1)
    state = init_sampling_state(spec, 8, prompt, mask)
    assert {name: value.tolist() for name, value in state.items()} == {"first": [2, 0], "prompt_lengths": [1, 3]}
    spec, _ = make_sampling_spec(
        GenerationConfig(repetition_penalty=1.1), vocab_size=8, prompt_length=3, max_new_tokens=1, frequency_penalty=0.1
    )
    state = init_sampling_state(spec, 8, prompt, mask)
    assert [np.flatnonzero(row).tolist() for row in state["seen"]] == [[5], [1, 2, 3]]
    state = update_sampling_state(spec, state, jnp.asarray([7, 3], jnp.int32))
    assert [np.flatnonzero(row).tolist() for row in state["seen"]] == [[5, 7], [1, 2, 3]]
    assert [np.flatnonzero(row).tolist() for row in state["counts"]] == [[7], [3]]
