"""Stop strings: looked for in the decoded text of the ids drawn so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hfax.errors import InvalidInputError


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
