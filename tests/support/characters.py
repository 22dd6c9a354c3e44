"""A tokenizer of ASCII, for small random models."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace


class Characters:
    """Each character is its own token; the model needs a vocabulary of 128."""

    pad_token_id = 0

    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))
