"""Speculative decoding: draft tokens are verified several at a time, since a step reads every weight once for any token count.

Each round drafts tokens, runs the model once over the current token and the drafts, and samples position by position, exactly as
`advance` does, while the sampled token equals the draft. The output is the same as without drafts, greedy or sampled with the same
seed; drafts only change the number of tokens per round. (A step of several tokens may round a sum differently from a step of one:
if two tokens tie to the last bit, either may be chosen.) Drafts come from the text itself (prompt lookup) or from a smaller model
(assisted decoding); both run on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from hfax.generation.decoding import LoopSpec, State, draw, is_unfinished
from hfax.generation.sampling import choose_token, process_logits

if TYPE_CHECKING:
    from hfax.tracing.traced_model import TracedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """How draft tokens are proposed.

    Args:
        num_tokens: draft tokens per round.
        max_ngram: longest n-gram at the end of the text that prompt lookup searches for earlier in it; 0: a model drafts.
    """

    num_tokens: int
    max_ngram: int


Drafter = Callable[[State], tuple[jax.Array, State]]
"""From the state to the draft tokens, [n] int32, and the state with the draft model's cache."""


def advance_with_drafts(
    model: TracedModel,
    spec: LoopSpec,
    speculation: Speculation,
    params: Mapping[str, jax.Array],
    state: State,
    static: Mapping[str, Any],
    request: Mapping[str, Any],
    limit: jax.Array,
    draft: TracedModel | None,
    draft_params: Mapping[str, jax.Array],
) -> State:
    """`decoding.advance` with draft tokens, for one sequence; `state["rounds"]` counts the runs of the model."""
    make_draft = (
        _prompt_lookup(speculation) if draft is None else _assistant(speculation, draft, draft_params, spec, request)
    )

    def round(state: State) -> State:
        drafts, state = make_draft(state)
        current = jax.lax.dynamic_slice_in_dim(state["tokens"], state["length"], 1, axis=1)
        logits, cache = model.decode_step(
            params,
            state["cache"],
            jnp.concatenate([current, drafts[None]], axis=1),
            length=state["length"],
            positions=state["positions"],
            attention_mask=state["mask"],
            capacity=spec.capacity,
            static=static,
            repeated=state["repeated"],
            keeps_windows=False,
        )
        state = state | {"cache": cache, "rounds": state["rounds"] + 1}

        def draw_next(carry: tuple[jax.Array, State, jax.Array]) -> tuple[jax.Array, State, jax.Array]:
            index, state, _ = carry
            state = state | {"length": state["length"] + 1, "positions": state["positions"] + 1}
            at_index = jax.lax.dynamic_index_in_dim(logits, index, axis=1, keepdims=False)
            state = draw(spec, state, at_index, request)
            drawn = jax.lax.dynamic_index_in_dim(state["tokens"][0], state["length"], keepdims=False)
            drafted = drafts[jnp.minimum(index, speculation.num_tokens - 1)]
            goes_on = (index < speculation.num_tokens) & (drawn == drafted) & is_unfinished(state, limit)
            return index + 1, state, goes_on

        _, state, _ = jax.lax.while_loop(lambda carry: carry[2], draw_next, (jnp.int32(0), state, jnp.bool_(True)))
        return state

    return jax.lax.while_loop(lambda state: is_unfinished(state, limit), round, state)


def _prompt_lookup(speculation: Speculation) -> Drafter:
    """Drafts the tokens that followed the latest earlier occurrence of the longest matching n-gram at the end of the text."""

    def make_draft(state: State) -> tuple[jax.Array, State]:
        tokens, last = state["tokens"][0], state["length"]
        places = jnp.arange(tokens.shape[0])
        run = jnp.zeros_like(places)  # length of the match that ends at each position
        same = jnp.ones_like(places, bool)
        for back in range(speculation.max_ngram):
            there = jnp.roll(tokens, back)  # the token `back` positions before each position
            same = same & (there == tokens[jnp.maximum(last - back, 0)]) & (places >= back)
            run = run + same
        run = jnp.where(places < last, run, 0)
        longest = run.max()
        place = jnp.max(jnp.where(run == longest, jnp.where(places < last, places, -1), -1))
        # assume that repetition continues: wrap around at the end of the text
        ahead = jnp.arange(speculation.num_tokens) % jnp.maximum(last - place, 1)
        return tokens[jnp.clip(place + 1 + ahead, 0, tokens.shape[0] - 1)], state

    return make_draft


def _assistant(
    speculation: Speculation,
    draft: TracedModel,
    draft_params: Mapping[str, jax.Array],
    spec: LoopSpec,
    request: Mapping[str, Any],
) -> Drafter:
    """Drafts with another model and the same random numbers, so where both are confident of the same token, they agree."""

    def make_draft(state: State) -> tuple[jax.Array, State]:
        current = jax.lax.dynamic_index_in_dim(state["tokens"][0], state["length"], keepdims=False)

        def step(carry: tuple[jax.Array, Any, jax.Array], index: jax.Array) -> tuple[Any, jax.Array]:
            token, cache, tokens = carry
            logits, cache = draft.decode_step(
                draft_params,
                cache,
                token[None, None],
                length=state["length"] + index,
                positions=state["positions"] + index,
                attention_mask=state["mask"],
                capacity=spec.capacity,
                static={},
                keeps_windows=False,
            )
            scores = process_logits(
                spec.sampling, request["sampling"], state["sampling"], logits[:, -1], tokens, state["step"] + index
            )
            drawn = choose_token(spec.sampling, scores, request["seed"], state["step"] + index).astype(jnp.int32)
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, drawn[:, None], state["length"] + index + 1, axis=1)
            return (drawn[0], cache, tokens), drawn[0]

        # one step more than drafts, so that the last draft is in the cache if it is accepted
        steps = jnp.arange(speculation.num_tokens + 1, dtype=jnp.int32)
        (_, cache, _), drawn = jax.lax.scan(step, (current, state["draft_cache"], state["tokens"]), steps)
        return drawn[:-1], state | {"draft_cache": cache}

    return make_draft
