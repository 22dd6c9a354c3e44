"""Streaming detokenization for `model.generate`.

Implements transformers' streamer protocol (`put`, `end`). transformers' TextStreamer decodes only the new tokens, which loses the
space before the first word with many tokenizers, and holds text back until a space. This one decodes with the preceding tokens,
and emits every piece as soon as its characters are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_TAIL = 8
"""Prompt tokens to decode as context, so the first piece has the right leading space."""
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """A streamer for one sequence.

    Args:
        tokenizer: the tokenizer for decoding.
        prompt_ids: the prompt's token ids; empty for an encoder-decoder.
        write: called with each piece of text. Not called before the second token (or the end), since the decoding loop is
            compiled after the first.
        should_stop: checked at each `put`, which raises KeyboardInterrupt if it returns True.

    Attributes:
        token_ids: token ids so far, including special tokens.
        pieces: pieces of text so far.
    """

    takes_arrays = True
    """The loop passes ids as numpy arrays instead of torch tensors."""

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        write: Callable[[str], None] = lambda piece: None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self._tokenizer, self._write, self._should_stop = tokenizer, write, should_stop
        self._ids = list(prompt_ids[-_TAIL:])
        self._start, self._read = 0, len(self._ids)
        self._has_prompt = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    def put(self, value: Any) -> None:
        """Receive the prompt (first call), then new tokens: an array or tensor of one sequence's ids."""
        if self._should_stop():
            raise KeyboardInterrupt
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.add(value.reshape(-1).tolist())

    def add(self, ids: Sequence[int]) -> None:
        """Append new tokens."""
        for token in ids:
            self.token_ids.append(int(token))
            self._ids.append(int(token))
            if len(self.token_ids) > 1:
                self._give(is_last=False)

    def end(self) -> None:
        """Flush text that was held back."""
        self._give(is_last=True)

    def _give(self, *, is_last: bool) -> None:
        known, full = self._decode(self._ids[self._start : self._read]), self._decode(self._ids[self._start :])
        if len(full) <= len(known) or (full.endswith(_UNFINISHED) and not is_last):
            return
        self._start, self._read = self._read, len(self._ids)
        piece = full[len(known) :]
        self.pieces.append(piece)
        self._write(piece)

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def decode_answer(tokenizer: Any, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
    """Decode a complete output to the same text that a stream would give."""
    stream = TextStream(tokenizer, prompt_ids)
    stream.add(new_ids)
    stream.end()
    return stream.text
