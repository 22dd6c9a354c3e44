"""The two programs of generation: `start` prefills the prompts and samples the first token, `advance` runs the decoding loop.

Both are pure functions of arrays, compiled by `generate`. The loop carry is one dict, the state. Request options that do not
change the program (temperature, seed, end-of-sequence ids, …) are in another dict, the request. The loop runs on the device until
every sequence has ended or `limit` tokens exist. This module does not know tokenizers, streamers or files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from hfax.generation import guidance
from hfax.generation.beam_config import BeamSpec
from hfax.generation.beam_search import draw_beams, init_beams
from hfax.generation.sampling import (
    choose_token,
    init_sampling_state,
    penalize,
    process_logits,
    update_sampling_state,
    warp,
)
from hfax.generation.sampling_config import SamplingSpec
from hfax.kv_cache.axes import rows_axis

if TYPE_CHECKING:
    from hfax.tracing.traced_model import TracedModel

State = dict[str, Any]
"""Keys: tokens [batch, capacity] int32, length () int32 (tokens in the cache), step () int32 (tokens generated), positions [batch]
or [batch, n] int32, repeated (per-token inputs of the last prompt token, reused for new tokens), finished [batch] bool,
mask [batch, …] int32, cache, sampling, and, if requested, beams (see `init_beams`), scores, logits and log_probs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """What the two programs are specialized for, besides the shapes of their arguments.

    Args:
        capacity: maximum tokens per sequence, prompt and padding included.
        num_return_sequences: sequences generated per prompt; with beam search, its beams.
        max_steps: length of the per-step outputs, if any are kept; else 0.
        keep: per-step outputs to keep: "scores" and "logits" ([max_steps, batch, vocab]), "log_probs" ([max_steps, batch]).
        sampling: which processors are active.
        guide_capacity: maximum tokens of the texts without the prompts, for classifier-free guidance; 0: there is none.
        rolls_back: tokens may be rolled back, so sliding windows keep every token and recurrent layers are not supported.
        beams: beam search; None: every sequence is continued on its own.
        cache_dtype: of the keys and values in the cache; None: the model's.
    """

    capacity: int
    num_return_sequences: int
    max_steps: int
    keep: tuple[str, ...]
    sampling: SamplingSpec
    guide_capacity: int = 0
    rolls_back: bool = False
    beams: BeamSpec | None = None
    cache_dtype: str | None = None


def start(
    model: TracedModel,
    spec: LoopSpec,
    params: Mapping[str, jax.Array],
    inputs: Mapping[str, jax.Array],
    static: Mapping[str, Any],
    request: Mapping[str, Any],
) -> State:
    """Prefill the prompts and sample the first token of each sequence.

    Args:
        model: the traced module.
        spec: what the program is specialized for.
        params: the weights.
        inputs: model inputs, [batch, …]; decoder prompts are padded on the left.
        static: forward arguments that are not traced.
        request: `seed` uint32, `pad` int32, `eos` [n] int32, `unused` [batch] bool (rows that only pad the batch to its bucket),
            `sampling`: the values of `make_sampling_spec`; with beam search `beams`: the values of `make_beam_spec`; for guidance
            `negative`: see `guidance.read_negative`.

    Returns:
        The state; "checks" holds the conditions that the host must check before continuing.
    """
    checks: dict[str, jax.Array] = {}
    of_cache = None if spec.cache_dtype is None else jnp.dtype(spec.cache_dtype)
    logits, state = read_prompts(
        model,
        params,
        inputs,
        static,
        spec.capacity,
        checks,
        keeps_windows=not spec.rolls_back,
        cache_dtype=of_cache,
    )
    seq2seq = model.traits.is_encoder_decoder
    prompt = inputs["decoder_input_ids" if seq2seq else "input_ids"].astype(jnp.int32)
    prompt_mask = jnp.ones_like(prompt) if seq2seq else inputs["attention_mask"].astype(jnp.int32)
    length = prompt.shape[1]
    state |= {"tokens": jnp.pad(prompt, ((0, 0), (0, spec.capacity - length))), "finished": request["unused"]}
    if (repeats := spec.num_return_sequences) > 1:
        repeat = lambda a, axis=0: jnp.repeat(a, repeats, axis=axis)  # noqa: E731
        cache = {name: repeat(array, rows_axis(name)) for name, array in state.pop("cache").items()}
        state, logits, prompt, prompt_mask = jax.tree.map(repeat, (state, logits, prompt, prompt_mask))
        state["cache"] = cache
    if spec.guide_capacity:
        negative = jax.tree.map(lambda a: jnp.repeat(a, repeats, axis=0), dict(request["negative"]))
        state["guide"] = guidance.read_negative(model, params, negative, spec.guide_capacity, cache_dtype=of_cache)
    is_text = (prompt_mask != 0) & (prompt >= 0)
    return begin(spec, state, logits, prompt, is_text, length, request) | {"checks": checks}


def begin(
    spec: LoopSpec,
    state: State,
    logits: jax.Array,
    prompt: jax.Array,
    is_text: jax.Array,
    length: jax.Array | int,
    request: Mapping[str, Any],
) -> State:
    """The state after the prompts were read, with the first token sampled.

    Args:
        spec: what the program is specialized for.
        state: its `tokens`, `mask`, `positions`, `cache`, `repeated` and `finished`.
        logits: [rows, vocab], of the last token.
        prompt: [rows, width] int32, what processors take for the text so far.
        is_text: [rows, width] bool, where it is.
        length: tokens in the cache.
        request: as for `start`.
    """
    state["sampling"] = init_sampling_state(spec.sampling, logits.shape[-1], prompt, is_text, length)
    state["length"], state["step"] = jnp.int32(length), jnp.int32(0)
    kept = spec.keep
    if spec.beams is not None:  # whose log-probabilities are kept with the tokens of each beam
        kept = tuple(name for name in kept if name != "log_probs")
        state["beams"] = init_beams(spec.beams, state["tokens"], request["unused"], keeps_log_probs=kept != spec.keep)
    for name in kept:
        shape = (spec.max_steps, *logits.shape[: 1 if name == "log_probs" else 2])
        state[name] = jnp.zeros(shape, jnp.float32)
    finish = propose if spec.sampling.visits_host else draw
    return finish(spec, state, logits, request)


def read_prompts(
    model: TracedModel,
    params: Mapping[str, jax.Array],
    inputs: Mapping[str, jax.Array],
    static: Mapping[str, Any],
    capacity: int,
    checks: dict[str, jax.Array],
    *,
    keeps_windows: bool = True,
    cache_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, State]:
    """Prefill the prompts; the arguments are those of `TracedModel.prefill`.

    Returns:
        Logits of the last position, [batch, vocab] float32, and the `cache`, `positions`, `mask` and `repeated` of a state.
    """
    logits, cache = model.prefill(
        params, inputs, static, capacity, checks, keeps_windows=keeps_windows, cache_dtype=cache_dtype
    )
    seq2seq = model.traits.is_encoder_decoder
    prompt = inputs["decoder_input_ids" if seq2seq else "input_ids"].astype(jnp.int32)
    prompt_mask = jnp.ones_like(prompt) if seq2seq else inputs["attention_mask"].astype(jnp.int32)
    absent = prompt_mask[:, :0] if seq2seq else prompt_mask  # an encoder without a mask gets none in decoding either
    mask = inputs["attention_mask"].astype(jnp.int32) if "attention_mask" in inputs else absent
    if not seq2seq:
        mask = jnp.pad(mask, ((0, 0), (0, capacity - mask.shape[1])), constant_values=1)
    state: State = {"positions": _next_positions(inputs, prompt_mask), "mask": mask, "cache": cache}
    state["repeated"] = {n: inputs[n][:, -1] for n in model.traits.repeated_inputs if n in inputs}
    return logits, state


def _next_positions(inputs: Mapping[str, jax.Array], prompt_mask: jax.Array) -> jax.Array:
    """Positions of the first new token, [batch] or [batch, n] int32."""
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
    """Generate tokens until `limit` exist or every sequence has ended. The state is donated."""

    def step(state: State) -> State:
        logits, state = read_token(model, spec, params, state, static)
        return draw(spec, state, logits, request)

    return jax.lax.while_loop(lambda state: is_unfinished(state, limit), step, state)


def advance_to_host(
    model: TracedModel,
    spec: LoopSpec,
    params: Mapping[str, jax.Array],
    state: State,
    static: Mapping[str, Any],
    request: Mapping[str, Any],
) -> State:
    """One step up to where the host processes the scores, see `propose`. The state is donated."""
    logits, state = read_token(model, spec, params, state, static)
    return propose(spec, state, logits, request)


def read_token(
    model: TracedModel, spec: LoopSpec, params: Mapping[str, jax.Array], state: State, static: Mapping[str, Any]
) -> tuple[jax.Array, State]:
    """Run the last token of every sequence: the next logits, [batch, vocab] float32, and the state with it in the cache."""
    tokens = jax.lax.dynamic_slice_in_dim(state["tokens"], state["length"], 1, axis=1)
    if spec.guide_capacity:
        state = state | {"guide": guidance.read_token(model, params, state["guide"], tokens, spec.guide_capacity)}
    cache = state["cache"] if spec.beams is None else model.reorder(state["cache"], state["beams"]["order"])
    logits, cache = model.decode_step(
        params,
        cache,
        tokens,
        length=state["length"],
        positions=state["positions"],
        attention_mask=state["mask"],
        capacity=spec.capacity,
        static=static,
        repeated=state["repeated"],
    )
    return logits[:, -1], state | {
        "cache": cache,
        "length": state["length"] + 1,
        "positions": state["positions"] + 1,
    }


def is_unfinished(state: State, limit: jax.Array) -> jax.Array:
    """Whether tokens remain to be generated: fewer than `limit` exist, and some sequence has not ended."""
    return (state["step"] < limit) & ~jnp.all(state["finished"])


def draw(spec: LoopSpec, state: State, logits: jax.Array, request: Mapping[str, Any]) -> State:
    """Choose the next token of every sequence from its last logits, and append it after the `length` cached tokens."""
    if spec.beams is not None:
        return draw_beams(spec.beams, spec.sampling, spec.keep, state, logits, request)
    guided = _guided(spec, state, logits, request)
    scores = process_logits(
        spec.sampling, request["sampling"], state["sampling"], guided, state["tokens"], state["step"]
    )
    return _append(spec, state, scores, logits, request)


def propose(spec: LoopSpec, state: State, logits: jax.Array, request: Mapping[str, Any]) -> State:
    """The first half of `draw`: the state with the scores that the host processes, and the logits they come from."""
    guided = _guided(spec, state, logits, request)
    scores = penalize(spec.sampling, request["sampling"], state["sampling"], guided, state["tokens"], state["step"])
    return state | {"proposed": scores, "raw": logits}


def _guided(spec: LoopSpec, state: State, logits: jax.Array, request: Mapping[str, Any]) -> jax.Array:
    return guidance.guided(logits, state["guide"], request["guidance_scale"]) if spec.guide_capacity else logits


def settle(spec: LoopSpec, state: State, scores: jax.Array, request: Mapping[str, Any]) -> State:
    """The second half of `draw`, with the scores from the host. The state is donated."""
    state = dict(state)
    del state["proposed"]
    logits = state.pop("raw")
    scores = warp(spec.sampling, request["sampling"], state["sampling"], scores, state["tokens"], state["step"])
    return _append(spec, state, scores, logits, request)


def _append(spec: LoopSpec, state: State, scores: jax.Array, logits: jax.Array, request: Mapping[str, Any]) -> State:
    step = state["step"]
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
