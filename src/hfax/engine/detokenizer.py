"""Incremental detokenization: emits only complete characters, and holds back text that could become a stop string.

A token can end in the middle of a character, and its text depends on the tokens before it. So the last few tokens are decoded
together, and new text is emitted once it is complete.
"""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"
_CONTEXT = 6
"""Preceding tokens to decode together with the new ones."""


class Detokenizer:
    """The text of one sequence.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: the prompt's token ids; the last ones are context for decoding the first new token.
        stop: stop strings.
        keeps_stop: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
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
        """Text offset of each token."""

    def add(self, token: int, *, is_text: bool = True) -> str | None:
        """Append a token; returns the stop string that it completes, or None.

        Args:
            token: the token id.
            is_text: False for a stop token that is left out of the text.
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
        """Text added by the newest tokens; None while they end in an incomplete character."""
        before = self._decode(self._tokens[self._begin : self._end])
        after = self._decode(self._tokens[self._begin :])
        if not is_last and (len(after) <= len(before) or after.endswith(_REPLACEMENT)):
            return None
        self._begin, self._end = self._end, len(self._tokens)
        if self._begin > 4 * _CONTEXT:  # drop tokens that are already decoded
            self._tokens = self._tokens[self._begin :]
            self._end -= self._begin
            self._begin = 0
        return after[len(before) :]

    def finish(self) -> str | None:
        """Flush the remaining text, incomplete characters included; returns the stop string it completes, or None."""
        return self._append(self._new_text(is_last=True) or "")

    def take(self, *, is_finished: bool) -> str:
        """Return new text that can no longer change."""
        end = len(self.text) if is_finished else max(len(self.text) - self._held, self._given)
        new, self._given = self.text[self._given : end], end
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
