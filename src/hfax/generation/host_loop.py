"""What the host does between chunks of tokens, on every backend: streamers, stop strings, ends of texts, lengths of chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from hfax.errors import InvalidInputError
from hfax.generation.generation_request import GenerationOptions

_CHUNK_SECONDS = 0.05
"""How often a streamer gets its tokens."""
_MAX_CHUNK = 64
_STOP_STRING_CHUNK = 8


class Streamer(Protocol):
    """transformers' streamer protocol."""

    def put(self, value: Any) -> None:
        """Take the prompt's ids, then each new token."""

    def end(self) -> None:
        """The text is complete."""


StopCheck = Callable[[np.ndarray], bool]
"""Gets the ids drawn for one sequence so far; whether a stop string stands in their text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What was drawn.

    Args:
        new_tokens: [sequences, steps] int32; the pad token after a sequence's end.
        lengths: [sequences], tokens drawn, the end-of-sequence token included.
        scores, logits: [steps, sequences, vocab] float32, processed and raw, or None.
        log_probs: [sequences, steps] float32 of the drawn tokens under the raw logits, or None.
    """

    new_tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray | None
    logits: np.ndarray | None
    log_probs: np.ndarray | None


def ended(
    tokens: np.ndarray, seen: int, lengths: np.ndarray, options: GenerationOptions, stop_check: StopCheck | None
) -> np.ndarray:
    """Where each sequence ended, -1 if it did not: at its first end-of-sequence token, or where a stop string is complete."""
    lengths = lengths.copy()
    is_eos = np.isin(tokens, options.eos_token_ids)
    for row in np.flatnonzero(lengths < 0):
        for column in range(seen, tokens.shape[1]):
            if is_eos[row, column] or (stop_check is not None and stop_check(tokens[row, : column + 1])):
                lengths[row] = column + 1
                break
    return lengths


def next_chunk(last: int, seconds: float, left: int, is_streaming: bool, has_stop_strings: bool) -> int:
    """Tokens to draw before the host looks again."""
    if is_streaming:
        chunk = max(1, min(2 * last, int(last * _CHUNK_SECONDS / max(seconds, 1e-6)), _MAX_CHUNK))
    else:
        chunk = _STOP_STRING_CHUNK if has_stop_strings else left
    return min(chunk, left)


def for_streamer(ids: np.ndarray) -> Any:
    """Streamers of transformers take torch tensors."""
    import torch

    return torch.from_numpy(np.asarray(ids, np.int64))


def make_stop_check(stop_strings: str | list[str] | None, tokenizer: Any) -> Callable[[np.ndarray], bool] | None:
    """A function that says whether a stop string stands in the text of the ids drawn so far; None without stop strings.

    Raises:
        InvalidInputError: no tokenizer to decode with, or an empty stop string.
    """
    if not stop_strings:
        return None
    wanted = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if tokenizer is None:
        raise InvalidInputError(
            "stop_strings were given without a tokenizer.",
            "Strings are looked for in the decoded text.",
            "Pass tokenizer=… as well.",
        )
    if any(not isinstance(s, str) or not s for s in wanted):
        raise InvalidInputError(
            f"stop_strings={wanted!r} holds an empty or non-string entry.",
            "An empty string stands in every text.",
            "Pass strings of at least one character.",
        )
    longest = max(len(s.encode()) for s in wanted)

    def check(ids: np.ndarray) -> bool:
        # A token gives at least one byte of text, so a string that the last token completes lies within as many tokens.
        text = tokenizer.decode([int(i) for i in ids[-longest - 4 :]], skip_special_tokens=False)
        return any(s in text for s in wanted)

    return check
