"""Beam search on the device, as pure functions of a state: transformers' `GenerationMixin._beam_search`.

In each step every beam of a prompt is scored with every next token, and the best continuations of all its beams are looked at:
those that end their text compete for a place among the ended ones, the best of the others are the next beams. The programs of
`decoding` run it; nothing here knows models. The order of equal scores is that of their indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hfax.generation.beam_config import BeamSpec
from hfax.generation.sampling import process_logits, update_sampling_state
from hfax.generation.sampling_config import SamplingSpec

_LOWEST = -1.0e9
"""Score of a beam or an ended text that is not there yet."""

Texts = dict[str, jax.Array]
"""Arrays with an entry for each token of each text, [batch, texts, capacity]: `tokens` int32; `parents` int32, the row of the beam
that the token was appended to, -1 where there is none; `log_probs` float32, if they are kept."""


def init_beams(spec: BeamSpec, tokens: jax.Array, unused: jax.Array, *, keeps_log_probs: bool) -> dict[str, Any]:
    """The state of beam search before the first step.

    Args:
        spec: number of beams.
        tokens: [batch · beams, capacity] int32, the prompts of each beam.
        unused: [batch] bool, rows that only pad the batch.
        keeps_log_probs: keep the log-probability of each token.

    Returns:
        `scores` [batch, beams] float32, the sum of each beam's log-probabilities; `order` [batch, beams] int32, the beam of the
        last step that each continues; `texts` of the beams, without their tokens; `ended`, the best ended texts, with
        `ended_scores` [batch, beams] and `is_ended` [batch, beams] bool; `can_improve` [batch] bool, whether a beam may still get
        a better score than an ended text.
    """
    batch, beams = unused.shape[0], spec.num_beams
    shape = (batch, beams, tokens.shape[1])
    index = jnp.broadcast_to(jnp.arange(beams, dtype=jnp.int32), shape[:2])
    texts = {"parents": jnp.full(shape, -1, jnp.int32)}
    if keeps_log_probs:
        texts["log_probs"] = jnp.zeros(shape, jnp.float32)
    return {
        # the beams of a prompt are the same, so only one of them may be continued
        "scores": jnp.where(index == 0, 0.0, _LOWEST).astype(jnp.float32),
        "order": index,
        "texts": texts,
        "ended": texts | {"tokens": tokens.reshape(shape)},
        "ended_scores": jnp.full(shape[:2], _LOWEST, jnp.float32),
        "is_ended": jnp.zeros(shape[:2], bool),
        "can_improve": ~unused,
    }


def draw_beams(
    spec: BeamSpec,
    sampling: SamplingSpec,
    keep: tuple[str, ...],
    state: dict[str, Any],
    logits: jax.Array,
    request: Mapping[str, Any],
) -> dict[str, Any]:
    """Continue the beams of every prompt by a token, as `decoding.draw` continues sequences.

    Args:
        spec: number of beams and candidates.
        sampling: the active processors, and whether to sample.
        keep: per-step outputs to keep, as in `decoding.LoopSpec`.
        state: as in `decoding`, with `beams` from `init_beams`. Its rows are beams, prompt by prompt.
        logits: [batch · beams, vocab].
        request: as in `decoding.start`, with `beams`: the values of `make_beam_spec`.
    """
    beams, values, step = state["beams"], request["beams"], state["step"]
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    scores = process_logits(sampling, request["sampling"], state["sampling"], log_probs, state["tokens"], step)
    for name, record in (("scores", scores), ("logits", logits)):
        if name in keep:
            state[name] = jax.lax.dynamic_update_index_in_dim(state[name], record, step, axis=0)
    totals, parent, token = _best_continuations(spec, sampling, scores, beams["scores"], request["seed"], step)
    is_end = jnp.isin(token, request["eos"]) | (step + 1 >= values["max_new_tokens"])
    row = parent + spec.num_beams * jnp.arange(len(parent), dtype=jnp.int32)[:, None]
    new = {"tokens": token, "parents": row}
    if "log_probs" in keep:
        new["log_probs"] = log_probs[row, token]
    texts = beams["texts"] | {"tokens": state["tokens"].reshape(beams["ended"]["tokens"].shape)}
    at = state["length"]
    running, picked = jax.lax.top_k(totals + is_end * _LOWEST, spec.num_beams)
    chosen = {name: jnp.take_along_axis(a, picked, axis=1) for name, a in new.items()}
    order = jnp.take_along_axis(parent, picked, axis=1)
    going_on = _continued(texts, order, chosen, at)
    beams = beams | _with_ended(spec, beams, texts, totals, parent, new, is_end, request, step, at)
    beams |= {"scores": running, "order": order}
    beams["can_improve"] = _can_improve(beams, values, step + 1)
    tokens = going_on.pop("tokens").reshape(state["tokens"].shape)
    memory = jax.tree.map(lambda a: a[chosen["parents"].reshape(-1)], state["sampling"])
    is_complete = _is_complete(beams, is_end, values, request["unused"])
    return state | {
        "tokens": tokens,
        "beams": beams | {"texts": going_on},
        "sampling": update_sampling_state(sampling, memory, chosen["tokens"].reshape(-1)),
        "finished": jnp.broadcast_to(is_complete, state["finished"].shape),
        "step": step + 1,
    }


def _best_continuations(
    spec: BeamSpec,
    sampling: SamplingSpec,
    scores: jax.Array,
    running: jax.Array,
    seed: jax.Array,
    step: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The candidates of each prompt, best first: their summed scores, the beams they continue and their tokens, [batch, n] each.

    With sampling, candidates are drawn without replacement, with probabilities in proportion to the exponential of their sums: the
    largest of the sums with Gumbel noise (1903.06059).
    """
    batch, beams = running.shape
    totals = scores + running.reshape(-1, 1)
    keys = totals
    if sampling.do_sample:
        noise = jax.vmap(lambda prompt: _gumbel(seed, prompt, step, (beams, scores.shape[-1])))(jnp.arange(batch))
        keys = totals + noise.reshape(totals.shape)
    # the best of each beam first, so that the vocabulary's axis stays as it is sharded
    most = min(spec.num_candidates, scores.shape[-1])
    best, token = jax.lax.top_k(keys, most)
    _, place = jax.lax.top_k(best.reshape(batch, -1), min(spec.num_candidates, beams * most))
    token = jnp.take_along_axis(token.reshape(batch, -1), place, axis=1)
    parent = place // most
    row = parent + beams * jnp.arange(batch)[:, None]
    chosen, by_score = jax.lax.top_k(totals[row, token], place.shape[1])
    return chosen, jnp.take_along_axis(parent, by_score, axis=1), jnp.take_along_axis(token, by_score, axis=1)


def _gumbel(seed: jax.Array, prompt: jax.Array, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Noise of a prompt and a step, the same in every batch."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, prompt), step), shape, jnp.float32)


def _continued(texts: Texts, source: jax.Array, new: Texts, at: jax.Array, is_new: jax.Array | bool = True) -> Texts:
    """Texts taken from `texts`, [batch, n] of indices, with a new token in column `at` where `is_new`, [batch, n]."""
    is_there = (jnp.arange(texts["tokens"].shape[-1]) == at) & jnp.asarray(is_new)[..., None]
    return {
        name: jnp.where(is_there, new[name][..., None], jnp.take_along_axis(array, source[..., None], axis=1))
        for name, array in texts.items()
    }


def _with_ended(
    spec: BeamSpec,
    beams: Mapping[str, Any],
    texts: Texts,
    totals: jax.Array,
    parent: jax.Array,
    new: Texts,
    is_end: jax.Array,
    request: Mapping[str, Any],
    step: jax.Array,
    at: jax.Array,
) -> dict[str, Any]:
    """The best ended texts, of those before and of the candidates that end now.

    Only the first `num_beams` candidates may end: the others are there to be continued.
    """
    values, count = request["beams"], spec.num_beams
    ends = is_end & (jnp.arange(is_end.shape[1]) < count)
    is_full = beams["is_ended"].all(axis=1, keepdims=True) & values["ends_when_full"]
    scores = totals / values["divisors"][step + 1]
    for barred in (is_full, ~beams["can_improve"][:, None], ~ends):
        scores = scores + barred * _LOWEST
    scores, place = jax.lax.top_k(jnp.concatenate([beams["ended_scores"], scores], axis=1), count)
    # ended texts come before the beams' texts, which the candidates continue
    is_new, candidate = place >= count, jnp.maximum(place - count, 0)
    source = jnp.where(is_new, count + jnp.take_along_axis(parent, candidate, axis=1), place)
    pool = {name: jnp.concatenate([beams["ended"][name], array], axis=1) for name, array in texts.items()}
    appended = {name: jnp.take_along_axis(a, candidate, axis=1) for name, a in new.items()}
    return {
        "ended": _continued(pool, source, appended, at, is_new),
        "ended_scores": scores,
        "is_ended": jnp.take_along_axis(jnp.concatenate([beams["is_ended"], ends], axis=1), place, axis=1),
    }


def _can_improve(beams: Mapping[str, Any], values: Mapping[str, jax.Array], length: jax.Array) -> jax.Array:
    """Whether the best beam of each prompt, of `length` new tokens, may still get a better score than the worst ended text."""
    longest = jnp.where(values["hopes_for_longest"], values["max_new_tokens"], length)
    best = beams["scores"][:, :1] / values["divisors"][longest]
    worst = jnp.where(beams["is_ended"], beams["ended_scores"].min(axis=1, keepdims=True), _LOWEST)
    return beams["can_improve"] & (best > worst).any(axis=1)


def _is_complete(
    beams: Mapping[str, Any], is_end: jax.Array, values: Mapping[str, jax.Array], unused: jax.Array
) -> jax.Array:
    """Whether the search is over for all prompts: a scalar bool."""
    are_full = (beams["is_ended"] | unused[:, None]).all() & values["ends_when_full"]
    return ~beams["can_improve"].any() | are_full | (is_end | unused[:, None]).all()
