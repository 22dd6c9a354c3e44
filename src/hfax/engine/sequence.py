"""One text that is being written: what the scheduler and the loop know of it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from hfax.engine.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a text ended; the values are OpenAI's, where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """How likely a token was.

    Args:
        token_id: the token.
        logprob: of it.
        rank: 1 for the likeliest.
        top: the likeliest tokens and their log-probabilities, the likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
    """A prompt and what was written after it.

    Args:
        request_id: of the request that it belongs to.
        index: among the request's texts.
        prompt: token ids, at least one; of encoder-decoders, of the encoder.
        params: how tokens are drawn.
        seed: of the random numbers.
        max_tokens: most new tokens.
        stop_ids: tokens that end the text.
        priority: lower ones go first.
        arrival: numbers the requests as they came.
        cache_salt: texts with another one share no pages.
        inputs: further inputs of the model's forward pass for the prompt, by name.

    Attributes:
        output: token ids written so far.
        num_computed: tokens whose keys and values are in the cache, or will be when the steps that were started are done.
        num_pending: tokens that were drawn and not yet read from the device, 0 or 1.
        pages: places of its pages in the pool.
        page_hashes: of its full pages, by which the prefix cache knows them.
        slot: of the running sequences; None while waiting.
        num_cached: tokens of the prompt that were found in the prefix cache.
        prompt_logprobs: of each token of the prompt but the first, as far as they are known.
    """

    request_id: str
    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    priority: int = 0
    arrival: int = 0
    cache_salt: str = ""
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    output: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    page_hashes: list[bytes] = dataclasses.field(default_factory=list)
    slot: int | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)

    @property
    def num_known(self) -> int:
        """Tokens that the host knows."""
        return len(self.prompt) + len(self.output)

    @property
    def num_tokens(self) -> int:
        """Tokens, those that were not read yet included."""
        return self.num_known + self.num_pending

    @property
    def is_finished(self) -> bool:
        """Whether it is written."""
        return self.finish_reason is not None

    @property
    def is_in_prompt(self) -> bool:
        """Whether more than the newest token is to be computed."""
        return self.num_computed < self.num_tokens - 1

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts sequences as they are to run."""
        return self.priority, self.arrival, self.index

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids from `start` to `end`, as far as the host knows them."""
        size = len(self.prompt)
        if start >= size:
            return self.output[start - size : end - size]
        return [*self.prompt[start:end], *self.output[: max(end - size, 0)]]
