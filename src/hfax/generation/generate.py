"""`generate` on JAX: a request's two programs, as `host_loop` runs them.

Turns checked prompts into arguments of the programs, and their state into host arrays. The host syncs with the device only between
chunks of tokens: without a streamer and stop strings there is one chunk. This module does not know how a program is traced or where
it is cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfax.errors import UnsupportedOptionError
from hfax.generation.beam_config import make_beam_spec, num_beams, rows_per_prompt
from hfax.generation.beam_loop import BeamProgress, run_beam_search
from hfax.generation.decoding import LoopSpec, State, advance, advance_to_host, settle, start
from hfax.generation.generation_request import GenerationOptions, Prompts
from hfax.generation.host_loop import Generated, Progress, Streamer, make_stop_check, run_generation
from hfax.generation.host_processors import HostProcessors, TextSoFar
from hfax.generation.kept_cache import KeptCache, keep, resume
from hfax.generation.processor_set import with_custom
from hfax.generation.sampling_config import make_sampling_spec
from hfax.generation.speculation import advance_with_drafts
from hfax.launch.together import agree
from hfax.programs.buckets import Buckets, capacity_bucket
from hfax.programs.checks import raise_failed, raise_unread
from hfax.programs.program_cache import Program, ProgramCache
from hfax.sharding.layout import Layout, to_host

if TYPE_CHECKING:
    from hfax.tracing.traced_model import TracedModel


def open_loop(
    model: TracedModel,
    programs: ProgramCache,
    params: Mapping[str, jax.Array],
    layout: Layout,
    prompts: Prompts,
    options: GenerationOptions,
    *,
    static: Mapping[str, Any],
    vocab_size: int,
    buckets: Buckets,
) -> tuple[GenerationLoop, dict[str, jax.Array]]:
    """The programs of a request, compiled when they first run, and the inputs of the prefill program.

    Args:
        model: the traced module.
        programs: the program cache of the model.
        params: the weights.
        layout: devices and shardings.
        prompts: checked and padded prompts.
        options: generation options.
        static: forward arguments that are not arrays.
        vocab_size: vocabulary size of the logits.
        buckets: how the cache capacity is rounded up.
    """
    sampling, values = make_sampling_spec(
        options.config,
        vocab_size=vocab_size,
        prompt_length=prompts.padded_length,
        max_new_tokens=options.max_new_tokens,
        **options.extra_sampling,
    )
    rows = prompts.num_padded_rows
    drafts = 0 if options.speculation is None else options.speculation.num_tokens + 1
    tokens = prompts.padded_length + options.max_new_tokens + drafts
    if prompts.kept is not None:
        _check_kept(options, prompts.kept)
        tokens = max(tokens, int(prompts.inputs["length"]) + prompts.inputs["new"].shape[1], prompts.kept.capacity)
    capacity = buckets.capacity(*prompts.padded_shape, tokens)
    beams, beam_values = make_beam_spec(
        options.config,
        num_eos=len(options.eos_token_ids),
        max_new_tokens=options.max_new_tokens,
        capacity=capacity,
    )
    sampling, values = with_custom(
        sampling,
        values,
        options.custom,
        prompts=rows,
        sequences=rows_per_prompt(options.config),
        capacity=capacity,
        vocab_size=vocab_size,
        prompt_length=prompts.padded_length,
        max_new_tokens=options.max_new_tokens,
    )
    spec = LoopSpec(
        capacity=capacity,
        guide_capacity=_guide_capacity(options),
        rolls_back=options.speculation is not None,
        num_return_sequences=rows_per_prompt(options.config),
        max_steps=options.max_new_tokens if options.keep else 0,
        keep=options.keep,
        sampling=sampling,
        beams=beams,
        cache_dtype=options.cache_dtype,
    )
    unused = np.arange(rows) >= len(prompts.given)
    request = {
        "seed": np.uint32(options.seed & 0xFFFFFFFF),
        "pad": np.int32(options.pad_token_id),
        "eos": np.asarray(options.eos_token_ids, np.int32),
        "unused": unused,
        "sampling": values,
        **({"beams": beam_values} if beams is not None else {}),
    }
    if options.negative is not None:
        request |= {"negative": dict(options.negative), "guidance_scale": np.float32(options.config.guidance_scale)}
    request = layout.put(request)
    inputs = layout.put_rows(prompts.inputs) if prompts.kept is None else layout.put(prompts.inputs)
    host = None
    if options.custom.waits_for_host:
        repeats = options.config.num_return_sequences or 1
        text = TextSoFar(prompts.given, prompts.padded_length, repeats)
        host = HostProcessors(options.custom, text, repeats, vocab_size)
    parts = (model, programs, params, spec, static, prompts.static, request, layout, options)
    return GenerationLoop(*parts, host, prompts.kept), inputs


def run_loop(
    loop: GenerationLoop,
    inputs: dict[str, jax.Array],
    prompts: Prompts,
    options: GenerationOptions,
    *,
    streamer: Streamer | None,
    tokenizer: Any,
) -> Generated:
    """Generate until every sequence has ended, by beam search where the options say so.

    Args:
        loop: from `open_loop`.
        inputs: from `open_loop`.
        prompts: checked and padded prompts.
        options: generation options.
        streamer: gets the prompt and every new token; single sequence only.
        tokenizer: required with `stop_strings`.

    Raises:
        InvalidInputError: a streamer was passed for several sequences, or stop strings without a tokenizer.
        UnsupportedOptionError: a streamer was passed with beam search.
    """
    if num_beams(options.config) > 1:
        return run_beam_search(loop, inputs, prompts, options, streamer=streamer)
    check = make_stop_check(options.config.stop_strings, tokenizer)
    return run_generation(loop, inputs, prompts, options, streamer=streamer, stop_check=check)


def _check_kept(options: GenerationOptions, kept: KeptCache) -> None:
    """Raise `UnsupportedOptionError` for options that need more of a text than its cache, or another cache."""
    dtype = options.cache_dtype
    if dtype is not None and not any(array.dtype == dtype for array in kept.state["cache"].values()):
        raise UnsupportedOptionError(
            "kv_cache_dtype beside past_key_values of another dtype.",
            "A cache is continued in the dtype that it has.",
            "Pass kv_cache_dtype with the first call of a conversation.",
        )
    reasons = {
        "prompt_lookup_num_tokens or assistant_model": options.speculation is not None,
        "guidance_scale": options.negative is not None,
        "num_beams": (options.config.num_beams or 1) > 1,
        "num_return_sequences": (options.config.num_return_sequences or 1) > 1,
    }
    for name in (name for name, is_given in reasons.items() if is_given):
        raise UnsupportedOptionError(
            f"past_key_values beside {name}.", "Each text in the cache is continued once.", "Remove one of the two."
        )


def _guide_capacity(options: GenerationOptions) -> int:
    if options.negative is None:
        return 0
    return capacity_bucket(options.negative["input_ids"].shape[1] + options.max_new_tokens)


class GenerationLoop:
    """The programs of one request: a `DecodingLoop`."""

    unwatched_chunk = None
    """The program itself notices that every sequence has ended."""

    def __init__(
        self,
        model: TracedModel,
        programs: ProgramCache,
        params: Mapping[str, jax.Array],
        spec: LoopSpec,
        static: Mapping[str, Any],
        prompt_static: Mapping[str, Any],
        request: Mapping[str, Any],
        layout: Layout,
        options: GenerationOptions,
        host: HostProcessors | None = None,
        kept: KeptCache | None = None,
    ) -> None:
        self._host, self._kept = host, kept
        self._speculation, self._draft = options.speculation, options.draft
        self._model, self._programs, self._params = model, programs, dict(params)
        self._spec, self._static, self._request, self._layout = spec, dict(static), request, layout
        self._prompt_static = dict(prompt_static)
        self._advance: Program | None = None

    @property
    def capacity(self) -> int:
        """Cache capacity, in tokens."""
        return self._spec.capacity

    @property
    def visits_host(self) -> bool:
        """Whether the host computes between the programs."""
        return self._host is not None

    def agree(self, value: Any) -> Any:
        """The value of process 0, if the model spans several processes."""
        return agree(value) if self._layout.spans_processes else value

    def read(self, state: State) -> Progress:
        """Implements `DecodingLoop`."""
        return Progress(
            num_steps=int(to_host(state["step"])),
            tokens=to_host(state["tokens"]),
            finished=to_host(state["finished"]),
        )

    def read_beams(self, state: State) -> BeamProgress:
        """Implements `BeamLoop`."""
        beams = state["beams"]
        return BeamProgress(
            num_steps=int(to_host(state["step"])),
            is_complete=bool(to_host(state["finished"]).all()),
            scores=to_host(beams["ended_scores"]),
            texts={name: to_host(array) for name, array in beams["ended"].items()},
        )

    def with_finished(self, state: State, finished: np.ndarray) -> State:
        """Implements `DecodingLoop`."""
        return state | {"finished": self._layout.put_like(finished, state["finished"])}

    def record(self, state: State, name: str) -> np.ndarray | None:
        """Implements `DecodingLoop`."""
        return to_host(state[name]) if name in state else None

    def keep(self, generated: Generated, prompts: Prompts) -> KeptCache | None:
        """The cache of a finished call, for the next one; None if there is none that could be continued."""
        state, further = generated.state, self._speculation is not None or self._spec.guide_capacity > 0
        if further or not self._model.traits.has_usable_cache or "tokens" not in state or "beams" in state:
            return None
        given = np.repeat(prompts.given, self._spec.num_return_sequences, axis=0)
        ids = np.concatenate([given, generated.new_tokens], axis=1)
        padding = prompts.padded_length - prompts.given.shape[1]
        return keep(dict(state), ids, padding=padding, model_key=self._model.key)

    def start(self, inputs: Mapping[str, jax.Array]) -> State:
        """Prefill the prompts and sample the first tokens.

        Raises:
            OutOfMemoryError: the KV cache does not fit.
        """
        if self._host is not None:
            self._ask(None, 0)
        if self._kept is not None:
            return self._resume(self._kept, inputs)
        main = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        assert main is not None
        name = f"prefill{list(main.shape)}"
        static = {**self._static, **self._prompt_static}
        args = (self._params, dict(inputs), self._request)
        program = self._programs.get(
            name,
            (self._spec, static),
            lambda params, inputs, request: (
                start(self._model, self._spec, params, inputs, static, request),
                None,
            ),
            args,
            inputs_at=1,
        )
        raise_unread(program.unread, inputs, self._model.traits)
        state = program.run(*args)
        raise_failed(state.pop("checks"))
        state = self._settle(state) if self._spec.sampling.visits_host else state
        if self._speculation is not None:
            state["rounds"] = self._layout.put(np.int32(0))
        if self._draft is not None:
            state["draft_cache"] = self._read_by_draft(inputs)
        return state

    def _resume(self, kept: KeptCache, inputs: Mapping[str, jax.Array]) -> State:
        """`start` after a cache: read the new tokens only."""
        args = (self._params, dict(kept.state), dict(inputs), self._request)
        program = self._programs.get(
            f"prefill{list(inputs['new'].shape)} after a cache",
            (self._spec, self._static),
            lambda params, held, inputs, request: (
                resume(self._model, self._spec, params, held, inputs, self._static, request),
                None,
            ),
            args,
        )
        state = program.run(*args)
        return self._settle(state) if self._spec.sampling.visits_host else state

    def _read_by_draft(self, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The draft model's cache after the prompts."""
        assert self._draft is not None
        draft, params = self._draft
        args = (dict(params), dict(inputs))
        program = self._programs.get(
            f"prefill{list(inputs['input_ids'].shape)} of the assistant",
            (self._spec.capacity, draft.key),
            lambda params, inputs: (
                draft.prefill(params, inputs, {}, self._spec.capacity, keeps_windows=False)[1],
                None,
            ),
            args,
        )
        return program.run(*args)

    def advance(self, state: State, limit: int) -> State:
        """Generate tokens until `limit` exist or every sequence has ended."""
        if self._speculation is not None:
            return self._advance_with_drafts(state, limit)
        if self._host is not None:
            return self._advance_with_host(state, limit)
        return self._advance_on_device(state, limit)

    def _advance_with_host(self, state: State, limit: int) -> State:
        """`advance` with the caller's Python before every token."""
        assert self._host is not None
        while True:
            progress = self.read(state)
            if progress.num_steps >= limit or progress.finished.all():
                return state
            self._ask(progress.tokens, progress.num_steps)
            if self._spec.sampling.visits_host:
                state = self._settle(self._propose(state))
            else:
                state = self._advance_on_device(state, progress.num_steps + 1)

    def _ask(self, tokens: np.ndarray | None, steps: int) -> None:
        """Put what the host derives from the text so far into the request."""
        assert self._host is not None
        values, rows = self._request["sampling"], len(self._request["unused"]) * self._spec.num_return_sequences
        found = self.agree(self._host.values(tokens, steps, rows))
        placed = {name: self._layout.put_like(array, values[name]) for name, array in found.items()}
        self._request = {**self._request, "sampling": {**values, **placed}}

    def _propose(self, state: State) -> State:
        args = (self._params, state, self._request)
        if self._advance is None:
            batch, capacity = state["tokens"].shape
            self._advance = self._programs.get(
                f"decode[{batch}, {capacity}] up to the scores",
                (self._spec, self._static),
                lambda params, state, request: (
                    advance_to_host(self._model, self._spec, params, state, self._static, request),
                    None,
                ),
                args,
                donate=(1,),
                is_step=True,
            )
        return self._advance.run(*args)

    def _settle(self, state: State) -> State:
        """The state after the host has processed the scores and the device has chosen the tokens."""
        assert self._host is not None
        progress, scores = self.read(state), to_host(state["proposed"])
        scores = self.agree(self._host.process(progress.tokens, progress.num_steps, scores))
        args = (state, self._layout.put_like(scores, state["proposed"]), self._request)
        program = self._programs.get(
            f"choose{list(state['tokens'].shape)}",
            (self._spec,),
            lambda state, scores, request: (settle(self._spec, state, scores, request), None),
            args,
            donate=(0,),
        )
        return program.run(*args)

    def _advance_on_device(self, state: State, limit: int) -> State:
        args = (self._params, state, self._request, self._layout.put(np.int32(limit)))
        if self._advance is None:
            batch, capacity = state["tokens"].shape
            self._advance = self._programs.get(
                f"decode[{batch}, {capacity}]",
                (self._spec, self._static),
                lambda params, state, request, limit: (
                    advance(self._model, self._spec, params, state, self._static, request, limit),
                    None,
                ),
                args,
                donate=(1,),
                is_loop=True,
            )
        return self._advance.run(*args)

    def _advance_with_drafts(self, state: State, limit: int) -> State:
        draft, draft_params = self._draft or (None, {})
        speculation = self._speculation
        assert speculation is not None
        limit_array = self._layout.put(np.int32(limit))
        args = (self._params, dict(draft_params), state, self._request, limit_array)
        if self._advance is None:
            self._advance = self._programs.get(
                f"decode[1, {state['tokens'].shape[1]}], {speculation.num_tokens} draft tokens",
                (self._spec, self._static, speculation, draft and draft.key),
                lambda params, draft_params, state, request, limit: (
                    advance_with_drafts(
                        self._model,
                        self._spec,
                        speculation,
                        params,
                        state,
                        self._static,
                        request,
                        limit,
                        draft,
                        draft_params,
                    ),
                    None,
                ),
                args,
                donate=(2,),
                is_loop=True,
            )
        return self._advance.run(*args)
