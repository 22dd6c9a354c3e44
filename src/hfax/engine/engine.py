"""The engine as its users have it: prompts in, texts out, many at once.

Ties a model, a scheduler, a runner and the loop together. What each does is in its own module; here are the ways to ask.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from typing import Any

import jax

from hfax.backends.base_model import as_ids_tuple
from hfax.backends.jax.model import JaxModel
from hfax.engine.core import EngineCore, Entry, Update
from hfax.engine.detokenizer import Detokenizer
from hfax.engine.grammar import GrammarCompiler, Matcher
from hfax.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
from hfax.engine.paged_runner import PagedRunner
from hfax.engine.pages import PageAllocator
from hfax.engine.runner import TokenDrawer
from hfax.engine.sampling_params import SamplingParams
from hfax.engine.scheduler import Limits, Scheduler
from hfax.engine.sequence import Sequence
from hfax.engine.slot_runner import SlotRunner
from hfax.errors import (
    EngineDeadError,
    InvalidInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hfax.generation.overrides import has_own_generate

logger = logging.getLogger(__name__)

_DEFAULT_LENGTH = 8192
"""Tokens of a sequence where neither the model nor the user sets a bound; a longer context is cut to it unless asked for."""

Prompt = str | Many[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine is set up.

    Args:
        max_num_seqs: sequences at once.
        max_model_len: tokens of a sequence, prompt and text; None: the model's context, at most 8,192.
        max_num_batched_tokens: tokens of a step; longer prompts are computed in parts.
        max_waiting: sequences that may wait; None: any number.
        block_size: tokens of a block of the KV cache; None: what fits the platform.
        num_blocks: of the KV cache; None: what all sequences can need, or what the memory holds.
        enable_prefix_caching: equal beginnings of prompts are computed once.
    """

    max_num_seqs: int = 32
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_waiting: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedPrompt:
    """A prompt that can be submitted without further work; made by `Engine.prepare`.

    Args:
        token_ids: of the prompt.
        params: how tokens are drawn.
        inputs: further inputs of the model for the prompt, by name.
        matcher: of structured outputs, at the beginning of the text.
    """

    token_ids: tuple[int, ...]
    params: SamplingParams
    inputs: Mapping[str, Any]
    matcher: Matcher | None


class Request:
    """A prompt that is being answered; made by `Engine.submit`.

    Attributes:
        output: what is written so far.
        sequences: one for each text.
        error: what failed, if something did.
    """

    def __init__(self, output: RequestOutput, sequences: list[Sequence], abort: Callable[[Sequence], None]) -> None:
        self.output = output
        self.sequences = sequences
        self.error: Exception | None = None
        self._abort = abort

    def abort(self) -> None:
        """End it; its pages are free soon."""
        for sequence in self.sequences:
            if not sequence.is_finished:
                self._abort(sequence)

    def take(self, update: Update) -> OutputDelta:
        """Add a step's update to the output."""
        sequence = update.sequence
        completion = self.output.outputs[sequence.index]
        completion.text += update.text
        completion.token_ids += update.tokens
        if completion.logprobs is not None:
            completion.logprobs += update.logprobs
        if sequence.params.prompt_logprobs is not None and update.is_last and sequence.index == 0:
            self.output.prompt_logprobs = list(sequence.prompt_logprobs)
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, sequence.num_cached)
        if update.is_last:
            assert sequence.finish_reason is not None
            completion.finish_reason = sequence.finish_reason
            completion.stop_reason = update.stop
            if update.error is not None and self.error is None:
                self.error = update.error
        return OutputDelta(
            index=sequence.index,
            text=update.text,
            token_ids=update.tokens,
            logprobs=update.logprobs,
            finish_reason=sequence.finish_reason if update.is_last else None,
            stop_reason=update.stop,
        )


class Engine:
    """Continuous batching over one model.

    Args:
        model: of `AutoModelForTPU.from_pretrained`, on the JAX backend.
        tokenizer: for prompts that are texts, and for texts that are written; None: token ids in and out.
        config: how it is set up.
        on_step: called in the loop's thread after each step, with its seconds and the tokens that it computed.

    Raises:
        UnsupportedModelError: the model does not write one token after the other.
        OutOfMemoryError: the cache of one sequence does not fit.

    Example:
        >>> engine = Engine(model, tokenizer)  # doctest: +SKIP
        >>> outputs = engine.generate(["Once upon a time", "def main():"], SamplingParams(max_tokens=32))  # doctest: +SKIP
        >>> outputs[0].outputs[0].text  # doctest: +SKIP
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
        self.vocab_size = parts.vocab_size
        self.limits = _limits(self.config, parts.context)
        self.is_paged, self._why_slots = True, ""
        self._runner: PagedRunner | SlotRunner
        self._is_encoder_decoder = parts.traced.traits.is_encoder_decoder
        try:
            runner = PagedRunner(parts, self.limits, page_size=self.config.block_size, num_pages=self.config.num_blocks)
            pages = PageAllocator(runner.num_pages, runner.page_size, keeps_prefixes=self.config.enable_prefix_caching)
            if pages.num_pages * pages.page_size < self.limits.max_model_len:
                raise InvalidInputError(
                    f"num_blocks={pages.num_pages} of {pages.page_size} tokens hold no sequence of {self.limits.max_model_len}.",
                    "A sequence alone must fit.",
                    "Pass more blocks, or a smaller max_model_len.",
                )
            self._runner = runner
        except UnsupportedModelError as error:
            self.is_paged, self._why_slots, pages = False, error.what, None
            logger.info("sequences get slots instead of pages: %s", error.what)
            self._runner = SlotRunner(model, parts, self.limits)
        self._drawer = TokenDrawer(parts, self.limits)
        self.pages = pages
        self.core = EngineCore(
            Scheduler(self.limits, pages), self._runner, self._drawer, vocab_size=self.vocab_size, on_step=on_step
        )
        self.stop_token_ids = as_ids_tuple(model.generation_config.eos_token_id)
        self.grammars = (
            GrammarCompiler(tokenizer, self.vocab_size, self.stop_token_ids) if tokenizer is not None else None
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_started = False
        self._is_closed = False

    def warm_up(self) -> None:
        """Make every program, so that no request waits for one. Costs seconds the first time; programs are kept on disk."""
        for logits in self._runner.warm_up(self._drawer.newest):
            self._drawer.warm_up(logits)
        started = time.perf_counter()  # once more, with every program at hand
        jax.block_until_ready(self._runner.warm_up(self._drawer.newest))
        self.core.slowest_step_s = time.perf_counter() - started
        self._drawer.reset()

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, *, inputs: Mapping[str, Any] | None = None
    ) -> PreparedPrompt:
        """Do what needs no device: tokenize the prompt, check it, compile the grammar. Safe from any thread; may take long.

        Args:
            prompt: text, or token ids; of encoder-decoders, what the encoder reads.
            params: how tokens are drawn; None: the defaults.
            inputs: further inputs of the model for the prompt (`pixel_values`, …), as its processor made them.

        Raises:
            InvalidInputError: the prompt is empty, too long, or has ids outside of the vocabulary; a schema cannot be used.
            UnsupportedOptionError: the model or its tokenizer cannot do what `params` ask for.
        """
        params = params or SamplingParams()
        ids = self.encode(prompt)
        self._check(ids, params, inputs)
        matcher = None
        if params.structured_outputs is not None:
            if self.grammars is None:
                raise UnsupportedOptionError(
                    "structured_outputs were given to an engine without a tokenizer.",
                    "They constrain text, not token ids.",
                    "Pass Engine(model, tokenizer).",
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
        inputs: Mapping[str, Any] | None = None,
    ) -> Request:
        """Start a request.

        Args:
            prompt: text, or token ids, as `prepare` takes them; or what it made, which then has `params` and `inputs` in it.
            params: how tokens are drawn; None: the defaults.
            listener: called with each delta, in the engine's thread; the last delta of the last text ends the request.
            request_id: a name for it.
            priority: lower ones go first.
            cache_salt: requests with different salts share no cached pages.
            inputs: as of `prepare`.

        Raises:
            InvalidInputError: see `prepare`.
            UnsupportedOptionError: likewise.
            EngineBusyError: the waiting queue is full.
            EngineDeadError: the engine is closed or failed.
        """
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

        def hear(update: Update) -> None:
            delta = request.take(update)
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
        self.core.add(entries, max_waiting=self.limits.max_waiting)
        if not self.core.is_alive:  # it ended in between, and hears nobody
            request.abort()
            raise _dead(self.core.failure)
        return request

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, as many at once as fit; blocks until all are written.

        Args:
            prompts: texts or lists of token ids, or one of them.
            params: for all of them, or one for each.

        Returns:
            In the order of the prompts.

        Raises:
            HfaxError: the first request that failed.
        """
        many = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            all_params = [params or SamplingParams()] * len(many)
        else:
            all_params = list(params)
        if len(all_params) != len(many):
            raise InvalidInputError(
                f"{len(many)} prompts and {len(all_params)} sampling params.",
                "Each prompt has its own, or all share one.",
                "Pass as many.",
            )
        done: queue.Queue[None] = queue.Queue()
        texts = sum(p.n for p in all_params)

        def hear(delta: OutputDelta) -> None:
            if delta.finish_reason is not None:
                done.put(None)

        requests: list[Request] = []
        try:
            for prompt, each in zip(many, all_params, strict=True):
                requests.append(self.submit(prompt, each, hear))
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
        """The deltas of one request as they come. Leaving the loop ends the request.

        Args:
            prompt: see `submit`.
            params: likewise.
            **options: likewise.
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
        """`stream` for asyncio."""
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
        """End the engine; what still runs is aborted."""
        self._is_closed = True
        self.core.close(timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
            InvalidInputError: a text without a tokenizer, or something that is neither.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInputError(
                    "The prompt is a text.",
                    "The engine has no tokenizer.",
                    "Pass token ids, or Engine(model, tokenizer).",
                )
            return tuple(self.tokenizer(prompt)["input_ids"])
        try:
            return tuple(int(token) for token in prompt)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"The prompt is no text and no list of token ids ({error}).",
                "It is read as one of them.",
                "Pass one of them.",
            ) from error

    def _check(self, ids: tuple[int, ...], params: SamplingParams, inputs: Mapping[str, Any] | None) -> None:
        longest = self.limits.max_model_len
        if not ids:
            raise InvalidInputError(
                "The prompt is empty.", "A text is written after at least one token.", "Pass a prompt."
            )
        highest = self.model.vocabulary_size or self.vocab_size
        if bad := [token for token in ids if not 0 <= token < highest]:
            raise InvalidInputError(
                f"Token id {bad[0]} is outside of the vocabulary of {highest}.",
                "There is no embedding for it.",
                "Pass the tokenizer's ids.",
            )
        room = 0 if self._is_encoder_decoder or params.max_tokens == 0 else 1
        if len(ids) + room > longest:
            raise InvalidInputError(
                f"The prompt has {len(ids)} tokens; the model's context holds {longest}, of which one at least is for the text.",
                "The context cannot grow.",
                "Shorten the prompt.",
            )
        if params.max_tokens is not None and not self._is_encoder_decoder and len(ids) + params.max_tokens > longest:
            raise InvalidInputError(
                f"The prompt has {len(ids)} tokens and max_tokens={params.max_tokens}; the model's context holds {longest}.",
                "Both must fit together.",
                f"Ask for at most {longest - len(ids)} tokens, or shorten the prompt.",
            )
        named = [*params.logit_bias, *params.stop_token_ids, *params.suppress_tokens]
        if bad := [token for token in named if not 0 <= token < self.vocab_size]:
            raise InvalidInputError(
                f"Token id {bad[0]} is outside of the vocabulary of {self.vocab_size}.",
                "logit_bias and stop_token_ids name tokens.",
                "Leave it out.",
            )
        if params.stop and self.tokenizer is None:
            raise InvalidInputError(
                "Stop strings were given to an engine without a tokenizer.",
                "They are looked for in the text.",
                "Pass stop_token_ids.",
            )
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            raise InvalidInputError(
                "max_tokens=0 asks for nothing.", "Without prompt_logprobs there is no result.", "Ask for a token."
            )
        if params.prompt_logprobs is not None and not self.is_paged:
            raise UnsupportedOptionError(
                f"prompt_logprobs of {type(self.model).__name__}: {self._why_slots}",
                "Its prompts are read whole, and only the last logits are kept.",
                "Call the model itself.",
            )
        if inputs and self.is_paged:
            raise UnsupportedOptionError(
                f"The model takes no {', '.join(inputs)}.", "It reads token ids.", "Leave them out."
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
        """The loop starts with the first request."""
        if not self._is_started and not self._is_closed:
            self._is_started = True
            self.core.start()
        if self._is_closed or not self.core.is_alive:
            raise _dead(self.core.failure)


def _dead(failure: BaseException | None) -> EngineDeadError:
    why = "It was closed." if failure is None else f"Its loop failed: {type(failure).__name__}."
    return EngineDeadError("The engine does not run.", why, "Make a new one.")


def _require_writer(model: Any) -> None:
    if not isinstance(model, JaxModel):
        raise UnsupportedOptionError(
            f"The engine got a {type(model).__name__}.",
            "Steps are compiled by JAX.",
            'Load the model with backend="jax".',
        )
    if not model.can_generate() or has_own_generate(model.module):
        raise UnsupportedModelError(
            f"{type(model.module).__name__} does not write one token after the other.",
            "The engine batches texts token by token.",
            "Call the model itself, or its generate().",
        )


def _limits(config: EngineConfig, context: int | None) -> Limits:
    longest = config.max_model_len or min(context or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    if context is not None and longest > context:
        raise InvalidInputError(
            f"max_model_len={longest} is above the model's context of {context}.",
            "It has no positions beyond.",
            f"Pass at most {context}.",
        )
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise InvalidInputError(f"{name}={value}.", "It must be positive.", f"Change {name}.")
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_model_len=longest,
        max_waiting=config.max_waiting,
    )


def _as_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    return [many] if many and all(isinstance(p, int) for p in many) else many
