"""Text that arrives in pieces, broken at spaces where a terminal would break it within a word.

A word is shown as far as it is known. If it then passes the end of the line, it is erased there and written on the next one.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len

_FENCE = "```"
_TAB = 8


class WordWrap:
    """The line that a terminal shows last. Fenced code blocks are not broken, so they can be copied.

    Args:
        columns: gives the terminal's width; 0: unknown, and nothing is broken. The last column stays empty, since terminals
            differ in where the cursor is after it.
        column: where the text begins, in cells.
    """

    def __init__(self, columns: Callable[[], int], column: int = 0) -> None:
        self._columns = columns
        self._column = column
        self._word = ""
        self._line = ""
        self._is_code = False

    def feed(self, piece: str) -> str:
        """What to write for a piece of the text: the piece with line breaks, and with what moves a word to the next line."""
        width = self._columns() - 1
        return "".join(self._put(character, width) for character in piece)

    def _put(self, character: str, width: int) -> str:
        if character == "\n":
            self._is_code ^= self._line.lstrip().startswith(_FENCE)
            self._column, self._word, self._line = 0, "", ""
            return character
        self._line += character
        if character == "\t":
            cells = _TAB - self._column % _TAB
        else:
            cells = cell_len(character)
        if width < 1 or self._is_code or self._line.lstrip().startswith(_FENCE) or self._column + cells <= width:
            self._column += cells
            self._word = "" if character in " \t" or cells > 1 else self._word + character
            return character
        if character in " \t":
            self._column, self._word = 0, ""
            return "\n"
        moved, word_cells = self._word, cell_len(self._word)
        if cells > 1 or not 0 < word_cells < self._column or word_cells + cells > width:
            moved, word_cells = "", 0  # a word as long as the line, or a script without spaces
        self._word = "" if cells > 1 else moved + character
        self._column = word_cells + cells
        erase = f"\x1b[{word_cells}D\x1b[K" if word_cells else ""
        return f"{erase}\n{moved}{character}"
