"""The host's loop around a request's programs, on every backend: from checked prompts to generated tokens.

Runs a `DecodingLoop` in chunks of tokens; in between, it passes tokens to a streamer, looks for stop strings and ends of sequences,
and chooses the next chunk's length. It does not know JAX and torch_xla: a state is read and written through its loop, as numpy
arrays on the host.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from hfax.errors import InvalidInputError
from hfax.generation.generation_request import GenerationOptions, Prompts
from hfax.generation.host_processors import TextSoFar
from hfax.generation.stopping import CriteriaCheck

_CHUNK_SECONDS = 0.05
"""Target interval between updates of a streamer, in seconds."""
_MAX_CHUNK = 64
_STOP_STRING_CHUNK = 8


class Streamer(Protocol):
    """transformers' streamer protocol."""

    def put(self, value: Any) -> None:
        """Receive the prompt ids, then each new token."""

    def end(self) -> None:
        """Signal the end of generation."""


StopCheck = Callable[[np.ndarray], bool]
"""Takes the ids generated so far for one sequence; returns whether their text contains a stop string."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """The generated tokens.

    Args:
        new_tokens: [sequences, steps] int32; the pad token after a sequence's end.
        lengths: [sequences], generated tokens, the end-of-sequence token included.
        scores, logits: [steps, sequences, vocab] float32, processed and raw, or None.
        log_probs: [sequences, steps] float32 of the generated tokens under the raw logits, or None.
        state: the last state of the loop.
    """

    new_tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray | None
    logits: np.ndarray | None
    log_probs: np.ndarray | None
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What the host reads of a state between chunks.

    Args:
        num_steps: tokens generated so far for each sequence.
        tokens: [rows, capacity] int: the padded prompts, then the generated tokens.
        finished: [rows] bool; rows that only pad the batch are finished from the start.
    """

    num_steps: int
    tokens: np.ndarray
    finished: np.ndarray


class DecodingLoop(Protocol):
    """The programs of one request on one backend. Only the loop knows what is in its states."""

    @property
    def unwatched_chunk(self) -> int | None:
        """Tokens to generate at once without streamer and stop strings; None: all that are left."""
        ...

    def start(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Prefill the prompts and sample the first tokens; returns the state."""
        ...

    def advance(self, state: dict[str, Any], limit: int) -> dict[str, Any]:
        """Generate tokens until `limit` exist; a loop may stop earlier if every sequence has ended. Consumes `state`."""
        ...

    def read(self, state: dict[str, Any]) -> Progress:
        """Wait for the device and copy what the host looks at."""
        ...

    def with_finished(self, state: dict[str, Any], finished: np.ndarray) -> dict[str, Any]:
        """The state with other end flags, [rows] bool."""
        ...

    def agree(self, value: Any) -> Any:
        """The value of process 0, if processes share the model."""
        ...

    def record(self, state: dict[str, Any], name: str) -> np.ndarray | None:
        """A per-step output of `GenerationOptions.keep`, [steps or more, rows, …] float32, or None if it is not kept."""
        ...


def run_generation(
    loop: DecodingLoop,
    inputs: Mapping[str, Any],
    prompts: Prompts,
    options: GenerationOptions,
    *,
    streamer: Streamer | None,
    stop_check: StopCheck | None,
) -> Generated:
    """Generate until every sequence has ended.

    Args:
        loop: the request's programs.
        inputs: inputs of `loop.start`.
        prompts: checked and padded prompts.
        options: generation options.
        streamer: gets the prompt and every new token; single sequence only.
        stop_check: returns whether to end a sequence.

    Raises:
        InvalidInputError: a streamer was passed for several sequences.
    """
    sequences = len(prompts.given) * (options.config.num_return_sequences or 1)
    if streamer is not None:
        _check_streamer(sequences)
    state = loop.start(inputs)
    if streamer is not None:
        streamer.put(for_streamer(streamer, prompts.given))
    first, most = prompts.padded_length, options.max_new_tokens
    lengths = np.full(sequences, -1, np.int64)
    stopping, repeats = options.stopping, options.config.num_return_sequences or 1
    criteria = CriteriaCheck(stopping, TextSoFar(prompts.given, first, repeats)) if stopping.criteria else None
    seen, chunk, started = 0, 1, time.perf_counter()
    while True:
        progress = loop.read(state)
        steps = progress.num_steps
        tokens = progress.tokens[:sequences, first : first + steps]
        lengths = ended(tokens, seen, lengths, options, stop_check)
        if criteria is not None:
            lengths = criteria.ended(progress.tokens, seen, steps, lengths, loop.record(state, "scores"))
        stopped = (lengths >= 0) & ~progress.finished[:sequences]
        if streamer is not None:
            for column in range(seen, steps if lengths[0] < 0 else int(lengths[0])):
                streamer.put(for_streamer(streamer, tokens[:, column]))
        is_complete = steps >= most or bool((lengths >= 0).all()) or stopping.is_past_deadline
        seconds, left = time.perf_counter() - started, most - steps
        unwatched = left if loop.unwatched_chunk is None else loop.unwatched_chunk
        is_timed = streamer is not None or stopping.deadline is not None
        chunk = next_chunk(chunk, seconds, left, unwatched, is_timed, stop_check is not None)
        chunk = min(chunk, stopping.chunk or chunk)
        # processes that share a model follow process 0, whatever their own clocks and streamers say
        is_complete, chunk, lengths, stopped = loop.agree((is_complete, chunk, lengths, stopped))
        if is_complete:
            break
        if stopped.any():
            finished = progress.finished.copy()
            finished[:sequences] |= stopped
            state = loop.with_finished(state, finished)
        seen, started = steps, time.perf_counter()
        state = loop.advance(state, steps + chunk)
    if streamer is not None:
        streamer.end()
    return _collect(loop, state, tokens, np.where(lengths < 0, steps, lengths), options.pad_token_id)


def _check_streamer(sequences: int) -> None:
    if sequences > 1:
        raise InvalidInputError(
            f"streamer was passed for {sequences} sequences.",
            "A streamer handles one sequence.",
            "Generate one sequence at a time, or remove streamer.",
        )


def _collect(
    loop: DecodingLoop, state: dict[str, Any], tokens: np.ndarray, lengths: np.ndarray, pad_token_id: int
) -> Generated:
    """The result: `tokens`, [sequences, steps], and the loop's records, cut off at the longest of `lengths`, [sequences]."""
    sequences, steps = len(lengths), int(lengths.max())
    past_end = np.arange(steps)[None] >= lengths[:, None]

    def record(name: str) -> np.ndarray | None:
        kept = loop.record(state, name)
        return None if kept is None else kept[:steps, :sequences]

    log_probs = record("log_probs")
    return Generated(
        new_tokens=np.where(past_end, pad_token_id, tokens[:, :steps]).astype(np.int32),
        lengths=lengths,
        scores=record("scores"),
        logits=record("logits"),
        log_probs=None if log_probs is None else np.where(past_end, 0.0, log_probs.T),
        state=state,
    )


def ended(
    tokens: np.ndarray, seen: int, lengths: np.ndarray, options: GenerationOptions, stop_check: StopCheck | None
) -> np.ndarray:
    """The length of each sequence up to its first end-of-sequence token or complete stop string; -1 if it has not ended."""
    lengths = lengths.copy()
    is_eos = np.isin(tokens, options.eos_token_ids)
    for row in np.flatnonzero(lengths < 0):
        for column in range(seen, tokens.shape[1]):
            if is_eos[row, column] or (stop_check is not None and stop_check(tokens[row, : column + 1])):
                lengths[row] = column + 1
                break
    return lengths


def next_chunk(last: int, seconds: float, left: int, unwatched: int, is_timed: bool, has_stop_strings: bool) -> int:
    """Tokens to generate before the host looks again, at most `left`; `unwatched` without streamer, time and stop strings."""
    if is_timed:
        chunk = max(1, min(2 * last, int(last * _CHUNK_SECONDS / max(seconds, 1e-6)), _MAX_CHUNK))
    else:
        chunk = _STOP_STRING_CHUNK if has_stop_strings else unwatched
    return min(chunk, left)


def for_streamer(streamer: Streamer, ids: np.ndarray) -> Any:
    """ids as a torch tensor, which transformers' streamers take; as they are for one that has `takes_arrays`."""
    if getattr(streamer, "takes_arrays", False):
        return ids
    import torch

    return torch.from_numpy(np.asarray(ids, np.int64))


def make_stop_check(stop_strings: str | list[str] | None, tokenizer: Any) -> Callable[[np.ndarray], bool] | None:
    """A function that returns whether the text of the ids generated so far contains a stop string; None without stop strings.

    Raises:
        InvalidInputError: there is no tokenizer to decode with, or a stop string is empty.
    """
    if not stop_strings:
        return None
    wanted = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if tokenizer is None:
        raise InvalidInputError(
            "stop_strings requires a tokenizer.",
            "Stop strings are matched in the decoded text.",
            "Pass tokenizer=….",
        )
    if any(not isinstance(s, str) or not s for s in wanted):
        raise InvalidInputError(
            f"stop_strings={wanted!r} has an empty or non-string entry.",
            "An empty string matches every text.",
            "Pass strings of at least one character.",
        )
    longest = max(len(s.encode()) for s in wanted)

    def check(ids: np.ndarray) -> bool:
        # A token decodes to at least one byte, so a stop string completed by the last token spans at most as many tokens as bytes.
        text = tokenizer.decode([int(i) for i in ids[-longest - 4 :]], skip_special_tokens=False)
        return any(s in text for s in wanted)

    return check
