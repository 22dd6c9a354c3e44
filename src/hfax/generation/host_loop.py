"""What the host does between chunks of tokens, on every backend: streamers, stop strings, ends of sequences, chunk lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from hfax.errors import InvalidInputError
from hfax.generation.generation_request import GenerationOptions

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
    """

    new_tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray | None
    logits: np.ndarray | None
    log_probs: np.ndarray | None


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


def next_chunk(last: int, seconds: float, left: int, is_streaming: bool, has_stop_strings: bool) -> int:
    """Tokens to generate before the host checks again."""
    if is_streaming:
        chunk = max(1, min(2 * last, int(last * _CHUNK_SECONDS / max(seconds, 1e-6)), _MAX_CHUNK))
    else:
        chunk = _STOP_STRING_CHUNK if has_stop_strings else left
    return min(chunk, left)


def for_streamer(ids: np.ndarray) -> Any:
    """ids as a torch tensor, which transformers' streamers take."""
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
