"""The answer's text on stdout, next to the phases on stderr when both are one terminal.

Text of a model is not trusted: on a terminal its control characters (colours, cursor moves, titles) are left out.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from hfax.cli.phase_display import PhaseDisplay

_UNSAFE = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


class AnswerOutput:
    """Writes one answer to stdout.

    Args:
        phases: told when the answer begins and ends.
        prompt: shown dim before the answer on a terminal; never written elsewhere.
    """

    def __init__(self, phases: PhaseDisplay, prompt: str = "") -> None:
        self._phases, self._prompt = phases, prompt
        self._is_terminal = sys.stdout.isatty()
        self._has_begun = False
        self._last = "\n"

    def write(self, piece: str) -> None:
        """Write a piece of text at once."""
        if self._is_terminal:
            piece = piece.translate(_UNSAFE)
        if not piece:
            return
        if not self._has_begun:
            self._begin()
        sys.stdout.write(piece)
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
