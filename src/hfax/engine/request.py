"""A request to the engine: its prepared prompt, and what is submitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hfax.engine.grammar import Matcher
from hfax.engine.outputs import OutputDelta, RequestOutput
from hfax.engine.sampling_params import SamplingParams
from hfax.engine.sequence import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedPrompt:
    """A prompt ready to submit; created by `Engine.prepare`.

    Args:
        token_ids: the prompt's token ids.
        params: sampling options.
        inputs: further model inputs for the prompt, by name.
        matcher: the grammar matcher for structured outputs, in its initial state.
    """

    token_ids: tuple[int, ...]
    params: SamplingParams
    inputs: Mapping[str, Any]
    matcher: Matcher | None


class Request:
    """A submitted request; created by `Engine.submit`.

    Attributes:
        output: the output so far.
        sequences: one per completion.
        error: the first error, if any.
    """

    def __init__(self, output: RequestOutput, sequences: list[Sequence], abort: Callable[[Sequence], None]) -> None:
        self.output = output
        self.sequences = sequences
        self.error: Exception | None = None
        self._abort = abort

    def abort(self) -> None:
        """Abort the request; its pages are freed soon."""
        for sequence in self.sequences:
            if not sequence.is_finished:
                self._abort(sequence)

    def take(self, delta: OutputDelta, error: Exception | None) -> None:
        """Add a step's delta to the output, and the exception that ended its sequence, if any."""
        sequence, completion = self.sequences[delta.index], self.output.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if completion.logprobs is not None:
            completion.logprobs += delta.logprobs
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, sequence.num_cached)
        if delta.finish_reason is None:
            return
        if sequence.params.prompt_logprobs is not None and delta.index == 0:
            self.output.prompt_logprobs = list(sequence.prompt_logprobs)
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        if self.error is None:
            self.error = error
