"""What a user of the engine gets: texts with the reason why they ended."""

from __future__ import annotations

import dataclasses

from hfax.engine.sequence import FinishReason, TokenLogprob


@dataclasses.dataclass(kw_only=True)
class CompletionOutput:
    """One text.

    Args:
        index: among the texts of its request.
        text: what was written, as far as it is known; "" without a tokenizer.
        token_ids: the same as tokens, the one that ended it included.
        logprobs: of the tokens, if they were asked for.
        finish_reason: equal to "stop", "length", "abort" or "error"; None while it is being written.
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
    """A request's texts.

    Args:
        request_id: of the request.
        prompt_token_ids: of the prompt.
        outputs: as many as `SamplingParams.n`.
        prompt_logprobs: of the prompt's tokens but the first, if they were asked for.
        num_cached_tokens: tokens of the prompt that did not have to be computed.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether all texts are written."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputDelta:
    """What one step added to one text.

    Args:
        index: of the text in its request.
        text: new text.
        token_ids: new tokens.
        logprobs: of these, if they were asked for.
        finish_reason: as of `CompletionOutput`; set by the last delta of the text.
        stop_reason: see `CompletionOutput`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
