"""Writes the generated text to stdout, coordinated with the phase display on stderr if both share a terminal.

Model output is untrusted: control characters (colours, cursor movement, titles) are removed on a terminal.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.text import Text

from hfax.cli.phase_display import PhaseDisplay
from hfax.cli.word_wrap import WordWrap

_UNSAFE = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


class AnswerOutput:
    """Writes one completion to stdout.

    Args:
        phases: notified when the completion starts and ends.
        prompt: shown dimmed before the completion on a terminal; omitted elsewhere.
        wraps_words: break lines at spaces on a terminal.
    """

    def __init__(self, phases: PhaseDisplay, prompt: str = "", *, wraps_words: bool = False) -> None:
        self._phases, self._prompt = phases, prompt
        self._is_terminal = sys.stdout.isatty()
        self._wrap = WordWrap(_columns) if wraps_words and self._is_terminal else None
        self._has_begun = False
        self._last = "\n"

    def write(self, piece: str) -> None:
        """Write a piece of text immediately."""
        if self._is_terminal:
            piece = piece.translate(_UNSAFE)
        if not piece:
            return
        if not self._has_begun:
            self._begin()
        sys.stdout.write(self._wrap.feed(piece) if self._wrap else piece)
        sys.stdout.flush()
        self._last = piece[-1]

    def finish(self) -> None:
        """End the last line."""
        if not self._has_begun:
            self._begin()
        if self._last != "\n":
            sys.stdout.write("\n")
        sys.stdout.flush()
        self._phases.answered()

    def _begin(self) -> None:
        self._has_begun = True
        self._phases.answering()
        if self._is_terminal and self._prompt:
            Console(highlight=False).print(Text(self._prompt.translate(_UNSAFE), style="dim"), end="", soft_wrap=True)
            self._last = self._prompt[-1]


def _columns() -> int:
    """The width of the terminal on stdout; 0 if it does not say."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0
