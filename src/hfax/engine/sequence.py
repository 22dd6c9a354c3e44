"""The state of one sequence, shared by the scheduler and the engine loop."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from hfax.engine.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sequence ended; "stop" and "length" are the OpenAI API's values."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token's log-probability.

    Args:
        token_id: the token id.
        logprob: its log-probability.
        rank: its rank; 1 is the most likely token.
        top: ids and log-probabilities of the top tokens, most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
    """A prompt and its generated tokens.

    Args:
        request_id: id of the sequence's request.
        index: index among the request's sequences.
        prompt: token ids, at least one; the encoder input for encoder-decoder models.
        params: sampling options.
        seed: random seed.
        max_tokens: maximum new tokens.
        stop_ids: tokens that end the sequence.
        priority: lower values run first.
        arrival: the request's arrival number.
        cache_salt: sequences with different salts share no pages.
        client: whose sequence it is; those of clients with fewer running sequences start first.
        inputs: further model inputs for the prompt, by name.

    Attributes:
        output: generated token ids.
        num_computed: tokens with keys and values in the cache, counting dispatched steps.
        num_pending: sampled tokens not yet read from the device, 0 or 1.
        pages: indices of its pages in the pool.
        page_hashes: prefix cache hashes of its full pages.
        slot: its slot while running; None while waiting.
        num_waited: steps in which it was next and could not start.
        num_cached: prompt tokens found in the prefix cache.
        prompt_logprobs: log-probabilities of the prompt tokens read so far, except the first.
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
    client: str = ""
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    output: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    page_hashes: list[bytes] = dataclasses.field(default_factory=list)
    slot: int | None = None
    num_waited: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)

    @property
    def num_known(self) -> int:
        """Number of tokens known to the host."""
        return len(self.prompt) + len(self.output)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including those not yet read from the device."""
        return self.num_known + self.num_pending

    @property
    def is_finished(self) -> bool:
        """Whether the sequence is finished."""
        return self.finish_reason is not None

    @property
    def is_in_prompt(self) -> bool:
        """Whether the sequence is in prefill."""
        return self.num_computed < self.num_tokens - 1

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: priority, then arrival."""
        return self.priority, self.arrival, self.index

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids from `start` to `end` that are known to the host."""
        size = len(self.prompt)
        if start >= size:
            return self.output[start - size : end - size]
        return [*self.prompt[start:end], *self.output[: max(end - size, 0)]]
