"""The engine's public API: many concurrent prompts in, completions out.

Connects a model, a scheduler, a runner and the engine loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from hfax.engine.background import BackgroundCompilation
from hfax.engine.config import EngineConfig, limits_of
from hfax.engine.core import EngineCore, Entry, dead_error
from hfax.engine.detokenizer import Detokenizer
from hfax.engine.grammar import GrammarCompiler
from hfax.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
from hfax.engine.page_layout import read_page_layout, store_page_layout
from hfax.engine.paged_runner import PagedRunner
from hfax.engine.pages import PageAllocator
from hfax.engine.request import PreparedPrompt, Request
from hfax.engine.runner import Runner, TokenDrawer
from hfax.engine.sampling_params import SamplingParams
from hfax.engine.scheduler import Scheduler
from hfax.engine.sequence import Sequence
from hfax.engine.slot_runner import SlotRunner
from hfax.errors import (
    InvalidInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hfax.generation.generation_request import as_ids_tuple
from hfax.kv_cache.dtypes import cache_dtype_of
from hfax.programs.batch_invariance import why_not
from hfax.programs.program_cache import compiling_ahead

if TYPE_CHECKING:
    from pathlib import Path

    from hfax.backends.jax.model import JaxModel

logger = logging.getLogger(__name__)

Prompt = str | Many[int]


class Engine:
    """Continuous batching over one model.

    Args:
        model: a model from `AutoModelForTPU.from_pretrained`, on the JAX backend.
        tokenizer: for text prompts and completions; None: token ids in and out.
        config: engine configuration; None: the defaults.
        on_step: called in the loop's thread after each step with its seconds and token count.

    Raises:
        UnsupportedModelError: the model does not support autoregressive generation.
        InvalidInputError: the configuration has a value out of range.
        UnsupportedOptionError: `batch_invariant` is not available for this model or on this device.
        OutOfMemoryError: the KV cache of a single sequence does not fit.

    Examples:
        >>> with Engine(model, tokenizer) as engine:
        ...     params = SamplingParams(max_tokens=4, ignore_eos=True)
        ...     outputs = engine.generate(["Once upon a time", "def main():"], params)
        >>> [len(output.outputs[0].token_ids) for output in outputs]
        [4, 4]
    """

    def __init__(
        self,
        model: JaxModel,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        on_step: Callable[[float, int], None] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config or EngineConfig()
        _require_writer(model)
        parts = model.parts
        self._described_weights = _described(parts.weights)
        self.vocab_size = parts.num_logits()
        self.limits = limits_of(self.config, parts.context)
        self._is_encoder_decoder = parts.traced.traits.is_encoder_decoder
        name = cache_dtype_of(self.config.kv_cache_dtype)
        dtype = self._cache_dtype = None if name is None else jnp.dtype(name)
        layout, self._why_slots = read_page_layout(parts, self.limits, self.config.block_size, dtype)
        self.is_paged = layout is not None
        if self.config.batch_invariant:
            why = why_not(parts.layout)
            if why is None and self._why_slots is not None:
                why = f"It requires a paged KV cache: {self._why_slots}"
            if why is not None:
                raise UnsupportedOptionError(
                    "batch_invariant is not available.", why, "Leave it out (docs/serving.md)."
                )
        if layout is not None:
            runner = PagedRunner(
                parts,
                self.limits,
                layout,
                num_pages=self.config.num_blocks,
                is_batch_invariant=self.config.batch_invariant,
            )
            pages = PageAllocator(runner.num_pages, layout.page_size, keeps_prefixes=self.config.enable_prefix_caching)
            self._runner: Runner = runner
            if pages.num_pages * pages.page_size < self.limits.max_model_len:
                raise InvalidInputError(
                    f"num_blocks={pages.num_pages} of {pages.page_size} tokens each are too few for {self.limits.max_model_len}.",
                    "The KV cache must hold at least one sequence of max_model_len tokens.",
                    "Increase num_blocks, or reduce max_model_len.",
                )
        else:
            logger.info("no paged KV cache, one slot per sequence: %s", self._why_slots)
            self._runner, pages = SlotRunner(model, parts, self.limits, dtype), None
        self._drawer = TokenDrawer(parts, self.limits, is_batch_invariant=self.config.batch_invariant)
        self.pages = pages
        self.core = EngineCore(
            Scheduler(self.limits, pages), self._runner, self._drawer, vocab_size=self.vocab_size, on_step=on_step
        )
        self.stop_token_ids = as_ids_tuple(model.default_option("eos_token_id"))
        self.grammars = (
            GrammarCompiler(tokenizer, self.vocab_size, self.stop_token_ids) if tokenizer is not None else None
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_started = False
        self._is_closed = False
        self._background: BackgroundCompilation | None = None

    def warm_up(self, *, in_background: bool = False) -> None:
        """Compile the engine's programs, on one device side by side, and run them, so no request waits for compilation.

        Takes seconds to minutes the first time; programs are cached on disk.

        Args:
            in_background: return once the programs that can serve any request are there, and compile the others in a thread
                (`num_programs_left`). Until then, steps may compute more rows than they need. Over the devices of several
                processes, all programs are compiled first.
        """
        in_background = in_background and not self.model.parts.layout.spans_processes
        if in_background:
            self._runner.use_fewest()
            self._drawer.use_fewest()
        with compiling_ahead():
            self._run_every_program()
        self._runner.reset()
        self._drawer.reset()
        logits = self._run_every_program()
        started = time.perf_counter()  # once more, with all programs compiled
        jax.block_until_ready(self._runner.warm_up(self._drawer.newest))
        self.core.slowest_step_s = time.perf_counter() - started
        self._drawer.reset()
        if in_background:
            self._background = BackgroundCompilation(self._runner, self._drawer, logits)

    def update_weights(self) -> None:
        """Use the weights that the model has now, for example after `TrainStep.update_model`.

        They are read where they are, without a copy. Cached prefixes of prompts are dropped; nothing is compiled again.

        Raises:
            EngineBusyError: requests are running, whose KV cache is that of the weights before.
            InvalidInputError: the model's arrays have other names, shapes or dtypes than when the engine was made.
        """
        weights = self.model.parts.weights
        then, now = self._described_weights, _described(weights)
        if then != now:
            differing = sorted(str(name) for name, _ in set(then.items()) ^ set(now.items()))
            raise InvalidInputError(
                f"The model's arrays have changed in more than their numbers: {differing[0]}.",
                "The engine's programs take arrays of the same names, shapes and dtypes.",
                "Create another engine for this model.",
            )

        def update() -> None:
            self._runner.update_weights(weights)
            if self.pages is not None:
                self.pages.forget()

        self.core.while_idle(update)

    def store(self, folder: Path) -> dict[str, str]:
        """Write all programs so far, and the layout of the KV cache, into a bundle's folder of programs.

        Args:
            folder: the folder.

        Returns:
            Names of the programs by file.
        """
        parts = self.model.parts
        store_page_layout(folder, parts, self.limits, self.config.block_size, self._cache_dtype)
        return parts.programs.store(folder)

    def _run_every_program(self) -> list[jax.Array]:
        found = self._runner.warm_up(self._drawer.newest)
        for logits in found:
            self._drawer.warm_up(logits)
        return found

    @property
    def num_programs_left(self) -> int:
        """Number of sets of programs that are being compiled in the background."""
        return 0 if self._background is None else self._background.num_left

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, *, inputs: Mapping[str, Any] | None = None
    ) -> PreparedPrompt:
        """Do the host-side work: tokenize and validate the prompt, compile the grammar. Thread-safe; may be slow.

        Args:
            prompt: text or token ids; the encoder input for encoder-decoder models.
            params: sampling options; None: the defaults.
            inputs: further model inputs for the prompt (`pixel_values`, …), from the model's processor.

        Raises:
            InvalidInputError: the prompt is empty, too long, or has ids outside the vocabulary; or the grammar is invalid.
            UnsupportedOptionError: the model or its tokenizer does not support an option in `params`.
        """
        params = params or SamplingParams()
        ids = self.encode(prompt)
        self._check(ids, params, inputs)
        matcher = None
        if params.structured_outputs is not None:
            if self.grammars is None:
                raise UnsupportedOptionError(
                    "structured_outputs requires a tokenizer.",
                    "It constrains text, and the engine has no tokenizer.",
                    "Create the engine with Engine(model, tokenizer).",
                )
            matcher = self.grammars.compile(params.structured_outputs)
        return PreparedPrompt(token_ids=ids, params=params, inputs=dict(inputs or {}), matcher=matcher)

    def submit(
        self,
        prompt: Prompt | PreparedPrompt,
        params: SamplingParams | None = None,
        listener: Callable[[OutputDelta], None] | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        client: str = "",
        inputs: Mapping[str, Any] | None = None,
    ) -> Request:
        """Submit a request.

        Args:
            prompt: text, token ids, or a `PreparedPrompt`, which already contains `params` and `inputs`.
            params: sampling options; None: the defaults.
            listener: called with each delta in the engine's thread; the last completion's final delta ends the request.
            request_id: the request's id; None: a generated one.
            priority: lower values run first.
            cache_salt: requests with different salts share no cached pages.
            client: whose request it is. Among waiting requests of one priority, those of the clients with the fewest running
                sequences start first.
            inputs: further model inputs for the prompt (`pixel_values`, …), from the model's processor.

        Raises:
            InvalidInputError: the prompt is empty, too long, or has ids outside the vocabulary; or the grammar is invalid.
            UnsupportedOptionError: the model or its tokenizer does not support an option in `params`.
            EngineBusyError: the waiting queue is full.
            EngineDeadError: the engine was closed or has failed.
        """
        request, entries = self._open(
            prompt,
            params,
            listener,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            client=client,
            inputs=inputs,
        )
        self._start([request], entries)
        return request

    def _open(
        self,
        prompt: Prompt | PreparedPrompt,
        params: SamplingParams | None,
        listener: Callable[[OutputDelta], None] | None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        client: str = "",
        inputs: Mapping[str, Any] | None = None,
    ) -> tuple[Request, list[Entry]]:
        """A request and its sequences, which nothing runs yet."""
        prepared = prompt if isinstance(prompt, PreparedPrompt) else self.prepare(prompt, params, inputs=inputs)
        ids, params, matcher = prepared.token_ids, prepared.params, prepared.matcher
        with self._lock:
            self._require_alive()
            number = next(self._numbers)
        name = request_id or f"request-{number}"
        seed = random.getrandbits(32) if params.seed is None else params.seed
        sequences = [
            Sequence(
                request_id=name,
                index=index,
                prompt=ids,
                params=params,
                seed=seed,
                max_tokens=self._max_tokens(ids, params),
                stop_ids=frozenset(params.stop_token_ids)
                | (frozenset() if params.ignore_eos else frozenset(self.stop_token_ids)),
                priority=priority,
                arrival=number,
                cache_salt=cache_salt,
                client=client,
                inputs=prepared.inputs,
            )
            for index in range(params.n)
        ]
        output = RequestOutput(
            request_id=name,
            prompt_token_ids=ids,
            outputs=[
                CompletionOutput(index=i, logprobs=None if params.logprobs is None else []) for i in range(params.n)
            ],
        )
        request = Request(output, sequences, self.core.abort)

        def hear(delta: OutputDelta, error: Exception | None) -> None:
            request.take(delta, error)
            if listener is not None:
                listener(delta)

        entries = [
            Entry(
                sequence=sequence,
                listener=hear,
                detokenizer=self._detokenizer(sequence),
                matcher=None if matcher is None else matcher.copy(),
            )
            for sequence in sequences
        ]
        return request, entries

    def _start(self, requests: Many[Request], entries: Many[Entry]) -> None:
        """Queue the sequences of requests, all or none."""
        self.core.add(entries, max_waiting=self.limits.max_waiting)
        if not self.core.is_alive:  # the loop ended in the meantime and will not take the entries
            for request in requests:
                request.abort()
            raise dead_error(self.core.failure)

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate completions for prompts, batched; blocks until all are finished.

        All begin at once, so steps and batches, and with seeds the tokens, are the same in every run if nothing else runs.

        Args:
            prompts: one prompt or a list; each is text or a list of token ids.
            params: one `SamplingParams` for all prompts, or one per prompt.

        Returns:
            One output per prompt, in order.

        Raises:
            HfaxError: a request failed; the first error.
        """
        many = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            all_params = [params or SamplingParams()] * len(many)
        else:
            all_params = list(params)
        if len(all_params) != len(many):
            raise InvalidInputError(
                f"{len(many)} prompts and {len(all_params)} sampling params.",
                "Their numbers must match, unless all prompts share one SamplingParams.",
                "Pass one SamplingParams, or one per prompt.",
            )
        done: queue.Queue[None] = queue.Queue()
        texts = sum(p.n for p in all_params)

        def hear(delta: OutputDelta) -> None:
            if delta.finish_reason is not None:
                done.put(None)

        opened = [self._open(prompt, each, hear) for prompt, each in zip(many, all_params, strict=True)]
        requests = [request for request, _ in opened]
        self._start(requests, [entry for _, entries in opened for entry in entries])
        try:
            for _ in range(texts):
                done.get()
        except BaseException:
            for request in requests:
                request.abort()
            raise
        for request in requests:
            if request.error is not None:
                raise request.error
        return [request.output for request in requests]

    def stream(
        self, prompt: Prompt | PreparedPrompt, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[OutputDelta]:
        """Stream the deltas of one request. Leaving the loop aborts the request.

        Args:
            prompt: text, token ids, or a `PreparedPrompt`.
            params: sampling options; None: the defaults.
            **options: further arguments of `submit`.
        """
        deltas: queue.Queue[OutputDelta] = queue.Queue()
        request = self.submit(prompt, params, deltas.put, **options)
        left = len(request.sequences)
        try:
            while left:
                delta = deltas.get()
                left -= delta.finish_reason is not None
                yield delta
            if request.error is not None:
                raise request.error
        finally:
            request.abort()

    async def astream(
        self, prompt: Prompt | PreparedPrompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[OutputDelta]:
        """The asyncio version of `stream`."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[OutputDelta] = asyncio.Queue()

        def hear(delta: OutputDelta) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, delta)

        request = self.submit(prompt, params, hear, **options)
        left = len(request.sequences)
        try:
            while left:
                delta = await deltas.get()
                left -= delta.finish_reason is not None
                yield delta
            if request.error is not None:
                raise request.error
        finally:
            request.abort()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the engine, and abort unfinished requests."""
        self._is_closed = True
        if self._background is not None:
            self._background.stop()
        self.core.close(timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Convert a prompt to token ids.

        Raises:
            InvalidInputError: the prompt is text but there is no tokenizer, or it is neither text nor token ids.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInputError(
                    "The prompt is text.",
                    "The engine has no tokenizer.",
                    "Pass token ids, or create the engine with Engine(model, tokenizer).",
                )
            return tuple(self.tokenizer(prompt)["input_ids"])
        try:
            return tuple(int(token) for token in prompt)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"The prompt is neither text nor a list of token ids ({error}).",
                "The engine accepts only these two types.",
                "Pass a string or a list of ints.",
            ) from error

    def _check(self, ids: tuple[int, ...], params: SamplingParams, inputs: Mapping[str, Any] | None) -> None:
        longest = self.limits.max_model_len
        if not ids:
            raise InvalidInputError(
                "The prompt is empty.", "Generation needs at least one prompt token.", "Pass a non-empty prompt."
            )
        highest = self.model.vocabulary_size or self.vocab_size
        if bad := [token for token in ids if not 0 <= token < highest]:
            raise InvalidInputError(
                f"Token id {bad[0]} is outside the vocabulary of size {highest}.",
                "The model has no embedding for it.",
                "Pass token ids from the model's tokenizer.",
            )
        room = 0 if self._is_encoder_decoder or params.max_tokens == 0 else 1
        if len(ids) + room > longest:
            raise InvalidInputError(
                f"The prompt has {len(ids)} tokens; the limit is {longest}, including at least one new token.",
                "max_model_len bounds prompt plus completion.",
                "Shorten the prompt.",
            )
        if params.max_tokens is not None and not self._is_encoder_decoder and len(ids) + params.max_tokens > longest:
            raise InvalidInputError(
                f"The prompt has {len(ids)} tokens and max_tokens={params.max_tokens}; the limit is {longest} tokens.",
                "max_model_len bounds prompt plus completion.",
                f"Set max_tokens to at most {longest - len(ids)}, or shorten the prompt.",
            )
        named = [*params.logit_bias, *params.stop_token_ids, *params.suppress_tokens]
        if bad := [token for token in named if not 0 <= token < self.vocab_size]:
            raise InvalidInputError(
                f"Token id {bad[0]} is outside the vocabulary of size {self.vocab_size}.",
                "logit_bias, stop_token_ids and suppress_tokens take token ids.",
                "Remove this token id.",
            )
        if params.stop and self.tokenizer is None:
            raise InvalidInputError(
                "Stop strings require a tokenizer.",
                "They are matched in decoded text, and the engine has no tokenizer.",
                "Pass stop_token_ids instead.",
            )
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            raise InvalidInputError(
                "max_tokens=0 generates nothing.",
                "It is only useful with prompt_logprobs.",
                "Set max_tokens to at least 1.",
            )
        if params.prompt_logprobs is not None and not self.is_paged:
            raise UnsupportedOptionError(
                f"prompt_logprobs is not supported for {type(self.model).__name__}: {self._why_slots}",
                "Without a paged KV cache, prefill keeps only the last logits.",
                "Call the model directly, and compute log-probabilities from its logits.",
            )
        if inputs and self.is_paged:
            raise UnsupportedOptionError(
                f"The model does not accept {', '.join(inputs)}.",
                "Its only input is token ids.",
                "Remove these inputs.",
            )

    def _max_tokens(self, ids: tuple[int, ...], params: SamplingParams) -> int:
        if self._is_encoder_decoder:
            room = self.limits.max_model_len - 1
        else:
            room = self.limits.max_model_len - len(ids)
        return room if params.max_tokens is None else min(params.max_tokens, max(room, 0))

    def _detokenizer(self, sequence: Sequence) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        params = sequence.params
        return Detokenizer(
            self.tokenizer,
            () if self._is_encoder_decoder else sequence.prompt,
            params.stop,
            keeps_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _require_alive(self) -> None:
        """Start the loop on the first request; raise if the engine is dead."""
        if not self._is_started and not self._is_closed:
            self._is_started = True
            self.core.start()
        if self._is_closed or not self.core.is_alive:
            raise dead_error(self.core.failure)


def _require_writer(model: Any) -> None:
    if getattr(type(model), "backend", None) != "jax":
        raise UnsupportedOptionError(
            f"The engine got a {type(model).__name__}.",
            "The engine supports only the JAX backend.",
            'Load the model with backend="jax".',
        )
    if not model.can_generate() or model.has_own_generate:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not support autoregressive generation.",
            "The engine generates token by token.",
            "Call the model directly, or its generate().",
        )


def _described(weights: Mapping[str, jax.Array]) -> dict[str, str]:
    """Structures, shapes and dtypes of arrays by name."""
    return {name: str(jax.tree.map(jax.typeof, array)) for name, array in weights.items()}


def _as_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    return [many] if many and all(isinstance(p, int) for p in many) else many
