"""From tokens to text as they come: whole characters alone, and no text that may turn out to be a stop string.

A token need not end with a character, and what a tokenizer makes of a token depends on those before it; so the last few tokens are
decoded together, and what they add to the text is given once it is whole.
"""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"
_CONTEXT = 6
"""Tokens before the new ones that are decoded with them."""


class Detokenizer:
    """The text of one sequence.

    Args:
        tokenizer: transformers'.
        prompt: the prompt's tokens, whose end decides how the first new token is written.
        stop: strings that end the text.
        keeps_stop: the text ends with the stop string; else before it.
        skip_special_tokens: special tokens are no text.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: tuple[int, ...],
        stop: tuple[str, ...],
        *,
        keeps_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._keeps_stop = keeps_stop
        self._skip = skip_special_tokens
        self._held = max((len(s) for s in stop), default=1) - 1
        self._tokens = list(prompt[-_CONTEXT:])
        self._begin, self._end = 0, len(self._tokens)
        self.text = ""
        self._given = 0
        self.offsets: list[int] = []
        """Where each token's text begins."""

    def add(self, token: int, *, is_text: bool = True) -> str | None:
        """One token more; the stop string that the text now ends with, or None.

        Args:
            token: the token.
            is_text: False for one that ends the text and is no part of it.
        """
        self.offsets.append(len(self.text))
        if not is_text:
            return None
        self._tokens.append(token)
        new = self._new_text()
        if new is None:
            return None
        return self._append(new)

    def _append(self, new: str) -> str | None:
        before = len(self.text)
        self.text += new
        for stop in self._stop:
            at = self.text.find(stop, max(before - len(stop) + 1, 0))
            if at >= 0:
                self.text = self.text[: at + len(stop) if self._keeps_stop else at]
                return stop
        return None

    def _new_text(self, *, is_last: bool = False) -> str | None:
        """What the tokens at the end add; None while they end inside of a character and others may follow."""
        before = self._decode(self._tokens[self._begin : self._end])
        after = self._decode(self._tokens[self._begin :])
        if not is_last and (len(after) <= len(before) or after.endswith(_REPLACEMENT)):
            return None
        self._begin, self._end = self._end, len(self._tokens)
        if self._begin > 4 * _CONTEXT:  # what is decoded is not needed any more
            self._tokens = self._tokens[self._begin :]
            self._end -= self._begin
            self._begin = 0
        return after[len(before) :]

    def finish(self) -> str | None:
        """The text is written: what is left of it is whole now, broken characters too. Gives the stop string that it ends with."""
        return self._append(self._new_text(is_last=True) or "")

    def take(self, *, is_finished: bool) -> str:
        """The text that was not given yet and cannot change any more."""
        end = len(self.text) if is_finished else max(len(self.text) - self._held, self._given)
        new, self._given = self.text[self._given : end], end
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
