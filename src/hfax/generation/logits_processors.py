"""Logits processors as pure functions on the device, and the order in which they run.

They match transformers' (`generation/logits_process.py`) for an unpadded prompt. Padding is ignored: a pad token does not count as
seen, no n-gram or word matches across it, and lengths exclude it, so a row gets the same scores in a left-padded batch as on its
own. Scores tied at the top-k, top-p or typical-p threshold are all kept. Nothing here knows models, caches or random numbers.

The algorithms follow measurements on XLA's CPU backend inside a loop, for a vocabulary of 151936 (µs per row): a sort 25000,
`lax.top_k` 180 unless its result is sliced (then XLA no longer recognises it and sorts: 22000), one masked sum 25.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from hfax.generation.sampling_config import SamplingSpec

_NEVER = -jnp.inf
_INT32 = jnp.iinfo(jnp.int32)
_LARGEST = jnp.finfo(jnp.float32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The decoding state that processors read.

    Args:
        spec: the active processors.
        values: their parameters, from `make_sampling_spec`.
        state: their state, from `init_sampling_state`.
        tokens: [batch, capacity] int32: the left-padded prompt, then the generated tokens.
        step: scalar int32, tokens generated so far.
        end: scalar int32, number of filled columns of `tokens`.
        lengths: [batch] int32, real tokens of each row, prompt and generated.
    """

    spec: SamplingSpec
    values: Mapping[str, jax.Array]
    state: Mapping[str, jax.Array]
    tokens: jax.Array
    step: jax.Array
    end: jax.Array
    lengths: jax.Array


Processor = Callable[[jax.Array, DecodeStep], jax.Array]
"""From scores [batch, vocab] float32 to scores of the same shape."""


def add_sequence_bias(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Add the bias of a sequence to its last token where the text ends with its other tokens."""
    matches = _ends_with(at, at.values["sequence_bias_prefixes"])
    bias = jnp.where(matches, at.values["sequence_bias"], 0.0)
    return scores.at[:, at.values["sequence_bias_last"]].add(bias, mode="drop")


def penalize_repetition(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Divide positive scores of prompt and generated tokens by the penalty, multiply negative ones (CTRL, 1909.05858)."""
    penalty = at.values["repetition_penalty"]
    return jnp.where(at.state["seen"], jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


def favour_encoder_tokens(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Multiply positive scores of the encoder's tokens by the penalty, divide negative ones: `encoder_repetition_penalty`."""
    ids, penalty = _encoder_ids(scores, at), at.values["encoder_repetition_penalty"]
    is_read = jnp.zeros(scores.shape, bool).at[jnp.arange(len(ids))[:, None], ids].set(True, mode="drop")
    return jnp.where(is_read, jnp.where(scores < 0, scores / penalty, scores * penalty), scores)


def ban_encoder_ngrams(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Ban tokens that follow the last `encoder_no_repeat_ngram_size - 1` tokens anywhere in what the encoder reads."""
    size, ids = at.spec.encoder_no_repeat_ngram_size, _encoder_ids(scores, at)
    repeats = (jnp.arange(ids.shape[1])[None] + size - 1 < ids.shape[1]) & (at.lengths >= size - 1)[:, None]
    for offset in range(size - 1):
        last = jax.lax.dynamic_index_in_dim(at.tokens, jnp.maximum(at.end - size + 1 + offset, 0), axis=1)
        repeats &= jnp.roll(ids, -offset, axis=1) == last
    following = jnp.where(repeats, jnp.roll(ids, -(size - 1), axis=1), scores.shape[-1])
    return scores.at[jnp.arange(len(ids))[:, None], following].set(_NEVER, mode="drop")


def _encoder_ids(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """[batch, length] int32; the vocabulary's size at padding."""
    ids = at.values["encoder_ids"]
    return jnp.repeat(ids, scores.shape[0] // len(ids), axis=0)


def penalize_generated(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Presence and frequency penalty as in vLLM and OpenAI: on generated tokens, after the repetition penalty."""
    counts = at.state["counts"]
    return scores - at.values["frequency_penalty"] * counts - at.values["presence_penalty"] * (counts > 0)


def ban_repeated_ngrams(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Ban tokens that followed an earlier occurrence of the last `no_repeat_ngram_size - 1` tokens."""
    size, tokens = at.spec.no_repeat_ngram_size, at.tokens
    first = at.state["first"][:, None]
    index = jnp.arange(tokens.shape[1])[None]
    repeats = (index >= first) & (index + size - 1 < at.end)
    for offset in range(size - 1):
        last = jax.lax.dynamic_index_in_dim(tokens, at.end - size + 1 + offset, axis=1)
        repeats &= jnp.roll(tokens, -offset, axis=1) == last
    following = jnp.where(repeats, jnp.roll(tokens, -(size - 1), axis=1), scores.shape[-1])
    rows = jnp.arange(tokens.shape[0])[:, None]
    return scores.at[rows, following].set(_NEVER, mode="drop")


def ban_words(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Ban the last token of each bad word where the text ends with its other tokens."""
    limits = jnp.where(_ends_with(at, at.values["bad_words_ids_prefixes"]), _NEVER, jnp.inf)
    return scores.at[:, at.values["bad_words_ids_last"]].min(limits, mode="drop")


def hold_back_end(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Ban the end-of-sequence tokens while a row has fewer tokens than `min_length`, or fewer new ones than `min_new_tokens`."""
    is_short = (at.lengths < at.values["min_length"]) | (at.step < at.values["min_new_tokens"])
    limits = jnp.where(is_short, _NEVER, jnp.inf)[:, None]
    return scores.at[:, at.values["min_length_eos"]].min(limits, mode="drop")


def keep_allowed(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Keep what `prefix_allowed_tokens_fn` allows; where all of that is banned for every sequence of a prompt, allow it anyway."""
    allowed = at.values["allowed"]  # [prompts, sequences, vocab]
    limits = jnp.where(allowed, 0.0, _NEVER)
    kept = scores.reshape(allowed.shape) + limits
    is_impossible = jnp.isneginf(kept.max(axis=-1, keepdims=True)).all(axis=1, keepdims=True)
    return jnp.where(is_impossible, limits, kept).reshape(scores.shape)


def force_first(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Allow only the forced token after a prompt of a single token."""
    return _force(scores, at.values["forced_bos_token_id"], at.lengths == 1)


def force_end(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Allow only the forced tokens at the last step."""
    return _force(scores, at.values["forced_eos_token_id"], at.step == at.values["last_step"])


def remove_invalid(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Replace NaN by 0 and infinities by the largest finite values."""
    return jnp.nan_to_num(scores, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)


def hasten_end(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Raise end-of-sequence scores exponentially past a start length: `exponential_decay_length_penalty`."""
    excess = jnp.maximum(at.step - at.values["decay_start"], 0)
    eos = at.values["decay_eos"]
    ends = scores.at[:, eos].get(mode="fill", fill_value=0.0)
    raised = jnp.minimum(jnp.abs(ends) * jnp.expm1(excess * at.values["decay_log_factor"]), _LARGEST)
    return scores.at[:, eos].add(jnp.where(jnp.isfinite(ends), raised, 0.0), mode="drop")


def suppress(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Ban tokens at every step."""
    return scores.at[:, at.values["suppress_tokens"]].set(_NEVER, mode="drop")


def suppress_at_begin(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Ban tokens at the first step, or at the second if the first was forced after a prompt of one token."""
    is_forced = (at.state["prompt_lengths"] <= 1) & ("forced_bos_token_id" in at.spec.active)
    limits = jnp.where(at.step == is_forced, _NEVER, jnp.inf)[:, None]
    return scores.at[:, at.values["begin_suppress_tokens"]].min(limits, mode="drop")


def pair_timestamps(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Whisper's timestamp rules (2212.04356): paired, non-decreasing, a bounded first one, forced where likelier than text."""
    begin, steps = at.values["timestamp_begin"], at.step
    ids, columns = jnp.arange(scores.shape[-1])[None], jnp.arange(at.tokens.shape[1])[None]
    is_time = ids >= begin
    times = (columns >= at.end - steps) & (columns < at.end) & (at.tokens >= begin)
    before = [jax.lax.dynamic_index_in_dim(at.tokens, jnp.maximum(at.end - n, 0), axis=1) >= begin for n in (1, 2)]
    is_last, is_pair = (steps >= 1) & before[0], (steps < 2) | before[1]
    place = jnp.where(times, columns, -1).max(axis=1, keepdims=True)
    newest = jnp.take_along_axis(at.tokens, jnp.maximum(place, 0), axis=1)
    lowest = jnp.where(place < 0, begin, jnp.where(is_last & ~is_pair, newest, newest + 1))
    banned = (ids == begin - 1) | (is_time & (ids < lowest)) | (is_last & is_pair & is_time)
    banned |= is_last & ~is_pair & (ids < at.values["timestamp_text_end"])
    banned |= (steps == 0) & (~is_time | (ids > begin + at.values["timestamp_max_initial"]))
    scores = jnp.where(banned, _NEVER, scores)
    all_times = jax.nn.logsumexp(jnp.where(is_time, scores, _NEVER), axis=-1, keepdims=True)
    best_text = jnp.where(is_time, _NEVER, scores).max(axis=-1, keepdims=True)
    return jnp.where((all_times > best_text) & ~is_time, _NEVER, scores)


def divide_by_temperature(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Flatten (above 1) or sharpen (below) the distribution."""
    return scores / at.values["temperature"]


def keep_top_h(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Keep the most likely of 100 tokens while their entropy sums to at most `top_h` of the whole (2509.02510)."""
    candidates = jax.lax.top_k(scores, min(100, scores.shape[-1]))[0]
    log_probs = jax.nn.log_softmax(candidates, axis=-1)
    terms = jnp.where(log_probs == _NEVER, 0.0, -jnp.exp(log_probs) * log_probs)
    total = terms.sum(axis=-1, keepdims=True)
    is_kept = (jnp.cumsum(terms, axis=-1) <= at.values["top_h"] * total) & (candidates > _NEVER)
    kept = jnp.where(is_kept, candidates, jnp.inf).min(axis=-1, keepdims=True)
    return _at_least(scores, jnp.minimum(kept, scores.max(axis=-1, keepdims=True)))


def keep_top_k(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Keep the `top_k` highest scores."""
    return _at_least(scores, _top_k_border(_candidates(scores, at), at))


def keep_highest(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """As `keep_top_k`, for any `top_k`: the threshold is found by bisection."""
    keys = ~_ordered_keys(scores)
    border = _smallest_border(keys, jnp.ones_like(scores), at.values["top_k"].astype(jnp.float32))
    return jnp.where(keys <= border, scores, _NEVER)


def keep_top_k_top_p(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Keep the `top_k` highest scores, and of those the smallest set with at least `top_p` of their probability.

    The threshold is found among the candidates; only the total mass is summed over the vocabulary, since it includes every token
    tied with the last candidate.
    """
    candidates = _candidates(scores, at)
    border = _top_k_border(candidates, at)
    scores = _at_least(scores, border)
    highest = scores.max(axis=-1, keepdims=True)
    mass = jnp.exp(scores - highest).sum(axis=-1, keepdims=True)
    weights = jnp.exp(jnp.where(candidates < border, _NEVER, candidates) - highest)
    above = jnp.cumsum(weights, axis=-1) - weights
    kept = jnp.where(above < at.values["top_p"] * mass, candidates, jnp.inf)
    return _at_least(scores, jnp.maximum(border, jnp.minimum(kept.min(axis=-1, keepdims=True), highest)))


def keep_top_p(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Keep the smallest set of highest scores with at least `top_p` of the probability (nucleus sampling, 1904.09751)."""
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    keys = ~_ordered_keys(scores)
    border = _smallest_border(keys, weights, at.values["top_p"] * weights.sum(axis=-1, keepdims=True))
    return jnp.where(keys <= border, scores, _NEVER)


def keep_min_p(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Keep tokens with at least `min_p` times the probability of the most likely token."""
    return _at_least(scores, scores.max(axis=-1, keepdims=True) + at.values["log_min_p"])


def keep_typical(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Keep the tokens with information content closest to the entropy, up to `typical_p` of the probability (2202.00666)."""
    log_probs = jax.nn.log_softmax(scores, axis=-1)
    probabilities = jnp.exp(log_probs)
    keys = _ordered_keys(jnp.abs(-log_probs - _entropy(log_probs)))
    border = _smallest_border(keys, probabilities, at.values["typical_p"])
    if at.spec.min_tokens_to_keep > 1:
        border = jnp.maximum(border, ~_highest(~keys, at.spec.min_tokens_to_keep))
    return jnp.where(keys <= border, scores, _NEVER)


def keep_epsilon(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Keep tokens with a probability of at least `epsilon_cutoff`, and the most likely token (2210.15191)."""
    return _keep_likely(scores, jax.nn.log_softmax(scores, axis=-1), jnp.log(at.values["epsilon_cutoff"]))


def keep_eta(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Like `keep_epsilon`, with a cutoff that decreases with entropy (2210.15191)."""
    log_probs = jax.nn.log_softmax(scores, axis=-1)
    log_epsilon = jnp.log(at.values["eta_cutoff"])
    return _keep_likely(scores, log_probs, jnp.minimum(log_epsilon, 0.5 * log_epsilon - _entropy(log_probs)))


def add_watermark(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Raise the tokens of each row's green list, which the host draws (2301.10226)."""
    return scores + at.values["watermark"]


def renormalize(scores: jax.Array, at: DecodeStep) -> jax.Array:
    """Turn scores into log-probabilities."""
    return jax.nn.log_softmax(scores, axis=-1)


PROCESSORS: Mapping[str, Processor] = {
    "sequence_bias": add_sequence_bias,
    "encoder_repetition_penalty": favour_encoder_tokens,
    "repetition_penalty": penalize_repetition,
    "presence_frequency_penalty": penalize_generated,
    "no_repeat_ngram_size": ban_repeated_ngrams,
    "encoder_no_repeat_ngram_size": ban_encoder_ngrams,
    "bad_words_ids": ban_words,
    "min_length": hold_back_end,
    "prefix_allowed_tokens": keep_allowed,
    "forced_bos_token_id": force_first,
    "forced_eos_token_id": force_end,
    "remove_invalid_values": remove_invalid,
    "exponential_decay_length_penalty": hasten_end,
    "suppress_tokens": suppress,
    "begin_suppress_tokens": suppress_at_begin,
    "timestamps": pair_timestamps,
    "temperature": divide_by_temperature,
    "top_h": keep_top_h,
    "top_k": keep_top_k,
    "top_k_top_p": keep_top_k_top_p,
    "top_p": keep_top_p,
    "min_p": keep_min_p,
    "typical_p": keep_typical,
    "epsilon_cutoff": keep_epsilon,
    "eta_cutoff": keep_eta,
    "watermark": add_watermark,
    "renormalize_logits": renormalize,
}
"""In the order of transformers' `_get_logits_processor`."""

FILTERS = frozenset({"top_k_top_p", "top_p", "min_p", "epsilon_cutoff", "eta_cutoff"})
"""Processors that keep the tokens of the highest scores, at least one. (`top_k` is as large as it must be, and typical sampling
keeps the most typical ones.)"""


def keep_at_least(scores: jax.Array, filtered: jax.Array, at: DecodeStep) -> jax.Array:
    """Scores that a filter left, [batch, vocab], and the `min_tokens_to_keep` highest ones that it got."""
    if (count := at.spec.min_tokens_to_keep) == 1:
        return filtered
    return jnp.where(scores >= _highest(scores, count), scores, filtered)


def _highest(values: jax.Array, count: int) -> jax.Array:
    """The value of rank `count` of each row, [batch, 1]."""
    return jax.lax.top_k(values, min(count, values.shape[-1]))[0].min(axis=-1, keepdims=True)


def _force(scores: jax.Array, ids: jax.Array, where: jax.Array) -> jax.Array:
    forced = jnp.full_like(scores, _NEVER).at[:, ids].set(0.0, mode="drop")
    return jnp.where(where[..., None], forced, scores)


def _ends_with(at: DecodeStep, prefixes: jax.Array) -> jax.Array:
    """Whether each row ends with each of `prefixes` ([words, width] int32, left-padded with -1): [batch, words]."""
    width = prefixes.shape[1]
    positions = at.end - width + jnp.arange(width)
    tail = jnp.take(at.tokens, jnp.clip(positions, 0, at.tokens.shape[1] - 1), axis=1)
    tail = jnp.where(positions[None] >= at.state["first"][:, None], tail, -2)
    return jnp.all((prefixes[None] == -1) | (prefixes[None] == tail[:, None]), axis=-1)


def _at_least(scores: jax.Array, border: jax.Array) -> jax.Array:
    return jnp.where(scores < border, _NEVER, scores)


def _keep_likely(scores: jax.Array, log_probs: jax.Array, cutoff: jax.Array) -> jax.Array:
    highest = scores.max(axis=-1, keepdims=True)
    return jnp.where((log_probs < cutoff) & (scores < highest), _NEVER, scores)


def _entropy(log_probs: jax.Array) -> jax.Array:
    terms = jnp.where(log_probs == _NEVER, 0.0, jnp.exp(log_probs) * log_probs)
    return -terms.sum(axis=-1, keepdims=True)


def _candidates(scores: jax.Array, at: DecodeStep) -> jax.Array:
    return jax.lax.top_k(scores, min(at.spec.num_candidates, scores.shape[-1]))[0]


def _top_k_border(candidates: jax.Array, at: DecodeStep) -> jax.Array:
    """The lowest of the first `top_k` candidates, without slicing them: see the measurements at the top of the file."""
    counted = jnp.where(jnp.arange(candidates.shape[-1]) < at.values["top_k"], candidates, jnp.inf)
    return counted.min(axis=-1, keepdims=True)


def _ordered_keys(numbers: jax.Array) -> jax.Array:
    """int32 keys with the same order and ties as the float32 values."""
    bits = jax.lax.bitcast_convert_type(jnp.where(numbers == 0, 0.0, numbers), jnp.int32)
    return bits ^ ((bits >> 31) & _INT32.max)


def _smallest_border(keys: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The smallest threshold at which the weights of all keys up to it sum to at least `wanted`, by bisection instead of a sort.

    Args:
        keys: [batch, n] int32.
        weights: [batch, n] float32, non-negative.
        wanted: [batch, 1] or scalar float32.

    Returns:
        [batch, 1] int32; the largest int32 where rounding keeps the total below `wanted`.
    """

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        is_enough = jnp.where(keys <= middle, weights, 0.0).sum(axis=-1, keepdims=True) >= wanted
        return jnp.where(is_enough, low, middle + 1), jnp.where(is_enough, middle, high)

    shape = (keys.shape[0], 1)
    bounds = (jnp.full(shape, _INT32.min, jnp.int32), jnp.full(shape, _INT32.max, jnp.int32))
    return jax.lax.fori_loop(0, 32, halve, bounds)[1]
