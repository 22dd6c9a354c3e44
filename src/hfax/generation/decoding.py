"""The two programs of generation: `start` runs the prompts and draws the first token, `advance` runs the decoding loop.

Both are pure functions of arrays, compiled by `generate`. Everything a loop carries is in one dict, the state; everything a
request chooses but the program does not depend on (temperature, seed, end-of-sequence ids, …) is in another, the request. The
loop runs on the device until every sequence has ended or `limit` tokens exist. This module does not know tokenizers, streamers
or files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hfax.generation.sampling import choose_token, init_sampling_state, process_logits, update_sampling_state
from hfax.generation.sampling_config import SamplingSpec
from hfax.tracing.traced_model import TracedModel

State = dict[str, Any]
"""Keys: tokens [batch, capacity] int32, length () int32 (tokens in the cache), step () int32 (tokens drawn), positions [batch] or
[batch, n] int32, repeated (inputs of the prompts' last tokens, which new tokens have too), finished [batch] bool,
mask [batch, …] int32, cache, sampling, and, where asked for, scores, logits and log_probs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """What the two programs are made for, beside their arguments' shapes.

    Args:
        capacity: tokens a sequence can have, prompt and padding included.
        num_return_sequences: sequences drawn for each prompt.
        max_steps: length of the per-step records, if any are kept; else 0.
        keep: which records are kept: "scores" and "logits" ([max_steps, batch, vocab]), "log_probs" ([max_steps, batch]).
        sampling: which processors are active.
        rolls_back: tokens may be taken back, so windows keep every token and no layer may keep only a state.
    """

    capacity: int
    num_return_sequences: int
    max_steps: int
    keep: tuple[str, ...]
    sampling: SamplingSpec
    rolls_back: bool = False


def start(
    model: TracedModel,
    spec: LoopSpec,
    params: Mapping[str, jax.Array],
    inputs: Mapping[str, jax.Array],
    static: Mapping[str, Any],
    request: Mapping[str, Any],
) -> State:
    """Run the prompts and draw each sequence's first token.

    Args:
        model: the traced module.
        spec: what the program is made for.
        params: the weights.
        inputs: the model's inputs, [batch, …]; decoders' prompts padded on the left.
        static: forward's arguments that are not traced.
        request: `seed` uint32, `pad` int32, `eos` [n] int32, `unused` [batch] bool (rows that only fill the batch's bucket),
            `sampling`: the values of `make_sampling_spec`.

    Returns:
        The state, and under "checks" the conditions that the host must check before it goes on.
    """
    checks: dict[str, jax.Array] = {}
    logits, state = read_prompts(
        model, params, inputs, static, spec.capacity, checks, keeps_windows=not spec.rolls_back
    )
    seq2seq = model.traits.is_encoder_decoder
    prompt = inputs["decoder_input_ids" if seq2seq else "input_ids"].astype(jnp.int32)
    prompt_mask = jnp.ones_like(prompt) if seq2seq else inputs["attention_mask"].astype(jnp.int32)
    batch, length = prompt.shape
    state |= {"tokens": jnp.pad(prompt, ((0, 0), (0, spec.capacity - length))), "finished": request["unused"]}
    if (repeats := spec.num_return_sequences) > 1:
        repeat = lambda a: jnp.repeat(a, repeats, axis=0)  # noqa: E731
        state, logits, prompt, prompt_mask = jax.tree.map(repeat, (state, logits, prompt, prompt_mask))
    state["sampling"] = init_sampling_state(spec.sampling, logits.shape[-1], prompt, prompt_mask != 0)
    state["length"] = jnp.int32(length)
    state["step"] = jnp.int32(0)
    for name in spec.keep:
        shape = (spec.max_steps, batch * repeats, *(() if name == "log_probs" else (logits.shape[-1],)))
        state[name] = jnp.zeros(shape, jnp.float32)
    return draw(spec, state, logits, request) | {"checks": checks}


def read_prompts(
    model: TracedModel,
    params: Mapping[str, jax.Array],
    inputs: Mapping[str, jax.Array],
    static: Mapping[str, Any],
    capacity: int,
    checks: dict[str, jax.Array],
    *,
    keeps_windows: bool = True,
) -> tuple[jax.Array, State]:
    """Run the prompts; what `next_logits` goes on from.

    Returns:
        Logits of the last position, [batch, vocab] float32, and `cache`, `positions`, `mask` and `repeated` of a state.
    """
    logits, cache = model.prefill(params, inputs, static, capacity, checks, keeps_windows=keeps_windows)
    seq2seq = model.traits.is_encoder_decoder
    prompt = inputs["decoder_input_ids" if seq2seq else "input_ids"].astype(jnp.int32)
    prompt_mask = jnp.ones_like(prompt) if seq2seq else inputs["attention_mask"].astype(jnp.int32)
    absent = prompt_mask[:, :0] if seq2seq else prompt_mask  # an encoder without a mask gets none in decoding, too
    mask = inputs["attention_mask"].astype(jnp.int32) if "attention_mask" in inputs else absent
    if not seq2seq:
        mask = jnp.pad(mask, ((0, 0), (0, capacity - mask.shape[1])), constant_values=1)
    state: State = {"positions": _next_positions(inputs, prompt_mask), "mask": mask, "cache": cache}
    state["repeated"] = {n: inputs[n][:, -1] for n in model.traits.repeated_inputs if n in inputs}
    return logits, state


def _next_positions(inputs: Mapping[str, jax.Array], prompt_mask: jax.Array) -> jax.Array:
    """Where the first new token stands, [batch] or [batch, n] int32."""
    if "position_ids" in inputs:
        return jnp.moveaxis(inputs["position_ids"][..., -1], -1, 0).astype(jnp.int32) + 1
    return prompt_mask.sum(axis=1, dtype=jnp.int32)


def advance(
    model: TracedModel,
    spec: LoopSpec,
    params: Mapping[str, jax.Array],
    state: State,
    static: Mapping[str, Any],
    request: Mapping[str, Any],
    limit: jax.Array,
) -> State:
    """Draw tokens until `limit` exist or every sequence has ended. The state's memory is taken over."""

    def step(state: State) -> State:
        logits, cache = model.decode_step(
            params,
            state["cache"],
            jax.lax.dynamic_slice_in_dim(state["tokens"], state["length"], 1, axis=1),
            length=state["length"],
            positions=state["positions"],
            attention_mask=state["mask"],
            capacity=spec.capacity,
            static=static,
            repeated=state["repeated"],
        )
        state = state | {"cache": cache, "length": state["length"] + 1, "positions": state["positions"] + 1}
        return draw(spec, state, logits[:, -1], request)

    return jax.lax.while_loop(lambda state: is_unfinished(state, limit), step, state)


def is_unfinished(state: State, limit: jax.Array) -> jax.Array:
    """Whether there are tokens to draw: fewer than `limit` exist, and a sequence has not ended."""
    return (state["step"] < limit) & ~jnp.all(state["finished"])


def draw(spec: LoopSpec, state: State, logits: jax.Array, request: Mapping[str, Any]) -> State:
    """Choose the next token of every sequence from the logits at its end, and write it behind the `length` cached tokens."""
    step = state["step"]
    scores = process_logits(spec.sampling, request["sampling"], state["sampling"], logits, state["tokens"], step)
    token = choose_token(spec.sampling, scores, request["seed"], step)
    token = jnp.where(state["finished"], request["pad"], token).astype(jnp.int32)
    records = {"scores": scores, "logits": logits}
    if "log_probs" in spec.keep:
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        records["log_probs"] = jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0]
    for name in spec.keep:
        state[name] = jax.lax.dynamic_update_index_in_dim(state[name], records[name], step, axis=0)
    return state | {
        "tokens": jax.lax.dynamic_update_index_in_dim(state["tokens"], token, state["length"], axis=1),
        "sampling": update_sampling_state(spec.sampling, state["sampling"], token),
        "finished": state["finished"] | jnp.isin(token, request["eos"]),
        "step": step + 1,
    }
