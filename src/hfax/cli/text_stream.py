"""Token ids into text, piece by piece, as `model.generate` hands them over.

Speaks transformers' streamer protocol (`put`, `end`). transformers' own TextStreamer decodes the new tokens alone,
which loses the space before the first word with many tokenizers, and holds text back until a space; this one decodes
with the tokens before, and gives every piece as soon as its characters are whole. It does not know where the text goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_TAIL = 8
"""Tokens of the prompt that are decoded along, so that the first piece begins as it would within the text."""
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """A streamer for one sequence.

    Args:
        tokenizer: decodes.
        prompt_ids: the tokens before the answer; empty for an encoder-decoder.
        write: gets each piece of text. It gets none before the second token (or the end), since compiling the decoding
            loop comes after the first.
        should_stop: asked at each `put`, which raises KeyboardInterrupt if so.

    Attributes:
        token_ids: drawn so far, special tokens included.
        pieces: of text, so far.
    """

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
        """Everything written so far."""
        return "".join(self.pieces)

    def put(self, value: Any) -> None:
        """Take the prompt (the first call), then new tokens: an array or tensor of ids of one sequence."""
        if self._should_stop():
            raise KeyboardInterrupt
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.add(value.reshape(-1).tolist())

    def add(self, ids: Sequence[int]) -> None:
        """Take new tokens."""
        for token in ids:
            self.token_ids.append(int(token))
            self._ids.append(int(token))
            if len(self.token_ids) > 1:
                self._give(is_last=False)

    def end(self) -> None:
        """Write what was held back."""
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
    """The text of an answer that is already complete, the same as a stream would have given."""
    stream = TextStream(tokenizer, prompt_ids)
    stream.add(new_ids)
    stream.end()
    return stream.text
