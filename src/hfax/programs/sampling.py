"""From logits to the next token, on the device: score processors and random draws as pure functions.

The processors are those of transformers (`generation/logits_process.py`), in its order and with its meaning for a prompt without
padding. Padding never counts: a pad token is not a seen token, no n-gram reaches into it, and lengths are those of the real
prompt, so a row gives the same in a left-padded batch as alone. Where scores tie at the border of top-k or top-p, all tied tokens
stay. Nothing here knows models or caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hfax.programs.sampling_config import SamplingSpec

_NEVER = -jnp.inf

SamplingState = dict[str, jax.Array]


def init_sampling_state(
    spec: SamplingSpec, vocab_size: int, prompt: jax.Array, prompt_mask: jax.Array
) -> SamplingState:
    """What the processors remember, as far as active ones need it.

    Args:
        spec: the active processors.
        vocab_size: of the logits.
        prompt: [batch, length] int32, padded on the left.
        prompt_mask: [batch, length] bool.

    Returns:
        `first` and `prompt_lengths` [batch] int32; `seen` [batch, vocab] bool; `counts` [batch, vocab] int32 of drawn tokens.
    """
    rows = jnp.arange(prompt.shape[0])[:, None]
    state = {
        "first": jnp.argmax(prompt_mask, axis=1).astype(jnp.int32),
        "prompt_lengths": prompt_mask.sum(axis=1, dtype=jnp.int32),
    }
    if "repetition_penalty" in spec.active:
        state["seen"] = jnp.zeros((prompt.shape[0], vocab_size), bool).at[rows, prompt].max(prompt_mask)
    if "presence_penalty" in spec.active:
        state["counts"] = jnp.zeros((prompt.shape[0], vocab_size), jnp.int32)
    return state


def update_sampling_state(spec: SamplingSpec, state: SamplingState, tokens: jax.Array) -> SamplingState:
    """The state after `tokens` [batch] were drawn."""
    rows = jnp.arange(tokens.shape[0])
    state = dict(state)
    if "seen" in state:
        state["seen"] = state["seen"].at[rows, tokens].set(True)
    if "counts" in state:
        state["counts"] = state["counts"].at[rows, tokens].add(1)
    return state


def process_logits(
    spec: SamplingSpec,
    values: Mapping[str, jax.Array],
    state: SamplingState,
    logits: jax.Array,
    tokens: jax.Array,
    step: jax.Array,
) -> jax.Array:
    """Scores of the next token.

    Args:
        spec: the active processors.
        values: their numbers, from `make_sampling_spec`.
        state: what they remember.
        logits: [batch, vocab].
        tokens: [batch, capacity] int32: the padded prompt, then the drawn tokens.
        step: scalar int32, how many tokens were drawn.

    Returns:
        [batch, vocab] float32, minus infinity where a token cannot be drawn.
    """
    scores = logits.astype(jnp.float32)
    lengths = state["prompt_lengths"] + step
    end = values["prompt_length"] + step
    if "repetition_penalty" in spec.active:
        penalty = values["repetition_penalty"]
        scores = jnp.where(state["seen"], jnp.where(scores < 0, scores * penalty, scores / penalty), scores)
    if "presence_penalty" in spec.active:
        counts = state["counts"]
        scores = scores - values["frequency_penalty"] * counts - values["presence_penalty"] * (counts > 0)
    if spec.no_repeat_ngram_size:
        scores = _ban_repeated_ngrams(scores, tokens, state["first"], end, spec.no_repeat_ngram_size)
    if "bad_words" in spec.active:
        scores = _ban_bad_words(scores, tokens, state["first"], end, values["bad_words"], values["bad_words_last"])
    if "min_length" in spec.active:
        is_short = (lengths < values["min_length"]) | (step < values["min_new_tokens"])
        scores = jnp.where(is_short[:, None], scores.at[:, values["eos"]].set(_NEVER), scores)
    if "forced_bos_token_id" in spec.active:
        scores = _force(scores, values["forced_bos_token_id"], lengths == 1)
    if "forced_eos_token_id" in spec.active:
        scores = _force(
            scores, values["forced_eos_token_id"], jnp.broadcast_to(step == values["last_step"], lengths.shape)
        )
    if "remove_invalid_values" in spec.active:
        scores = jnp.nan_to_num(scores, nan=0.0, posinf=jnp.finfo(jnp.float32).max, neginf=jnp.finfo(jnp.float32).min)
    if "suppress_tokens" in spec.active:
        scores = scores.at[:, values["suppress_tokens"]].set(_NEVER)
    if "begin_suppress_tokens" in spec.active:
        begun = scores.at[:, values["begin_suppress_tokens"]].set(_NEVER)
        scores = jnp.where(step == values["begin_step"], begun, scores)
    if spec.do_sample:
        scores = _narrow(spec, values, scores)
    if "renormalize_logits" in spec.active:
        scores = jax.nn.log_softmax(scores, axis=-1)
    return scores


def choose_token(spec: SamplingSpec, scores: jax.Array, seed: jax.Array, step: jax.Array) -> jax.Array:
    """The next token of each row, [batch] int32.

    A row's draw depends on the seed, its index and the step alone, so it is the same whatever the other rows are. With top-k only
    the candidates take part in the draw (Gumbel-max).
    """
    if not spec.do_sample:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    base = jax.random.key(seed)
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(base, row), step))(jnp.arange(scores.shape[0]))
    if spec.top_k is None:
        return jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)
    candidates, ids = jax.lax.top_k(scores, spec.top_k)
    drawn = jax.vmap(jax.random.categorical)(keys, candidates)
    return jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0].astype(jnp.int32)


def _narrow(spec: SamplingSpec, values: Mapping[str, jax.Array], scores: jax.Array) -> jax.Array:
    """Temperature, top-k, top-p and min-p, in transformers' order."""
    if "temperature" in spec.active:
        scores = scores / values["temperature"]
    if spec.top_k is not None:
        scores = jnp.where(scores < jax.lax.top_k(scores, spec.top_k)[0][:, -1:], _NEVER, scores)
    if "top_p" in spec.active:
        ordered = (
            jax.lax.top_k(scores, spec.top_k)[0] if spec.top_k is not None else jnp.flip(jnp.sort(scores), axis=-1)
        )
        probabilities = jax.nn.softmax(ordered, axis=-1)
        above = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = (above < values["top_p"]).at[:, 0].set(True)
        border = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        scores = jnp.where(scores < border, _NEVER, scores)
    if "min_p" in spec.active:
        border = scores.max(axis=-1, keepdims=True) + jnp.log(values["min_p"])
        scores = jnp.where(scores < border, _NEVER, scores)
    return scores


def _force(scores: jax.Array, ids: jax.Array, where: jax.Array) -> jax.Array:
    """Only `ids` can be drawn in the rows where `where` [batch] holds."""
    forced = jnp.full_like(scores, _NEVER).at[:, ids].set(0.0)
    return jnp.where(where[:, None], forced, scores)


def _ban_repeated_ngrams(
    scores: jax.Array, tokens: jax.Array, first: jax.Array, end: jax.Array, size: int
) -> jax.Array:
    """Ban what followed each earlier occurrence of the last `size - 1` tokens."""
    index = jnp.arange(tokens.shape[1])[None]
    repeats = (index >= first[:, None]) & (index + size - 1 < end) & (end - size + 1 >= first[:, None])
    for offset in range(size - 1):
        last = jax.lax.dynamic_index_in_dim(tokens, end - size + 1 + offset, axis=1)
        repeats &= jnp.roll(tokens, -offset, axis=1) == last
    following = jnp.roll(tokens, -(size - 1), axis=1)
    rows = jnp.arange(tokens.shape[0])[:, None]
    banned = jnp.zeros(scores.shape, bool).at[rows, following].max(repeats)
    return jnp.where(banned, _NEVER, scores)


def _ban_bad_words(
    scores: jax.Array, tokens: jax.Array, first: jax.Array, end: jax.Array, prefixes: jax.Array, last: jax.Array
) -> jax.Array:
    """Ban the last token of each bad word whose other tokens stand at the end of the text.

    `prefixes`: [words, width] int32, -1 where a word is shorter; `last`: [words] int32.
    """
    width = prefixes.shape[1]
    positions = end - width + jnp.arange(width)
    tail = jnp.take(tokens, jnp.clip(positions, 0, tokens.shape[1] - 1), axis=1)
    tail = jnp.where(positions[None] >= first[:, None], tail, -2)
    matches = jnp.all((prefixes[None] == -1) | (prefixes[None] == tail[:, None]), axis=-1)
    limits: Any = jnp.where(matches, _NEVER, jnp.inf)
    return scores.at[:, last].min(limits)
