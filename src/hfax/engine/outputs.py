"""The engine's outputs: completions with their finish reasons."""

from __future__ import annotations

import dataclasses

from hfax.engine.sequence import FinishReason, TokenLogprob


@dataclasses.dataclass(kw_only=True)
class CompletionOutput:
    """One completion.

    Args:
        index: index among the request's completions.
        text: the text so far; "" without a tokenizer.
        token_ids: the token ids so far, including the stop token.
        logprobs: log-probabilities of the tokens, if requested.
        finish_reason: equal to "stop", "length", "abort" or "error"; None while running.
        stop_reason: the stop string or stop token that ended it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclasses.dataclass(kw_only=True)
class RequestOutput:
    """A request's completions.

    Args:
        request_id: the request's id.
        prompt_token_ids: the prompt's token ids.
        outputs: `SamplingParams.n` completions.
        prompt_logprobs: log-probabilities of the prompt tokens except the first, if requested.
        num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether all completions are finished."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputDelta:
    """One step's addition to one completion.

    Args:
        index: index among the request's completions.
        text: new text.
        token_ids: new token ids.
        logprobs: log-probabilities of the new tokens, if requested.
        finish_reason: why the completion ended; set only in its last delta.
        stop_reason: the stop string or stop token that ended it; set only in its last delta.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
