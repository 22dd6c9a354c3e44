"""The text and the bytes of single tokens, for log-probabilities.

A token can be a part of a character. Its text is then U+FFFD, but its bytes are those of the vocabulary: byte-level (GPT-2,
Llama 3, Qwen) or with byte fallback (`<0xF0>`, Llama 2).
"""

from __future__ import annotations

import codecs
import re
from typing import Any

_REPLACEMENT = "\ufffd"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""SentencePiece's mark for a space; decoding leaves a token's first one out."""


def _byte_level() -> dict[str, int]:
    """Byte-level BPE's characters, with their bytes: printable Latin-1 is itself, the rest is numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTES = _byte_level()


class TokenText:
    """The texts and bytes of a tokenizer's tokens.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, tuple[str, bytes]] = {}
        self._special = frozenset(getattr(tokenizer, "all_special_ids", None) or ())

    def is_special(self, token: int) -> bool:
        """Whether it is a special token."""
        return token in self._special

    def text_of(self, token: int) -> str:
        """The token decoded alone; parts of characters are U+FFFD."""
        return self._known(token)[0]

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes; those of neighbouring tokens together are the text's UTF-8."""
        return self._known(token)[1]

    def _known(self, token: int) -> tuple[str, bytes]:
        if token not in self._found:
            text = self._text(token)
            self._found[token] = text, text.encode() if _REPLACEMENT not in text else self._bytes(token, text)
        return self._found[token]

    def _text(self, token: int) -> str:
        text = self._tokenizer.decode([token])
        piece = self._piece(token) or ""
        spaces = len(piece) - len(piece.lstrip(_SPACE))
        return " " * spaces + text.lstrip(" ") if spaces and not self.is_special(token) else text

    def _bytes(self, token: int, text: str) -> bytes:
        piece = self._piece(token)
        if piece is not None and (found := _FALLBACK.fullmatch(piece)) is not None:
            return bytes([int(found[1], 16)])
        if piece is not None and all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
        return text.encode()

    def name_of(self, token: int) -> str:
        r"""The token's text, or its bytes as OpenAI writes them if it is not whole characters: `bytes:\xf0\x9f`."""
        value = self.bytes_of(token)
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)

    def _piece(self, token: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token)


class TextPlaces:
    """Where tokens begin in a text, in characters.

    Args:
        texts: the tokens' texts.
        start: the first token's place.
    """

    def __init__(self, texts: TokenText, start: int = 0) -> None:
        self._texts = texts
        self.next_place = start
        """Characters so far."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int, *, is_in_text: bool = True) -> int:
        """The next token's place; of a part of a character, that of the character.

        Args:
            token: its id.
            is_in_text: False for a special token that is left out of the text.
        """
        place = self.next_place
        if is_in_text:
            self.next_place += len(self._decoder.decode(self._texts.bytes_of(token)))
        return place
