"""Lines broken at spaces: a small terminal shows what was written, as the pieces arrive."""

from __future__ import annotations

import random
import re

import pytest

from hfax.cli.word_wrap import WordWrap


class Screen:
    """What a terminal of some columns shows; knows the sequences that `WordWrap` writes."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines, self.column = [""], 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[DK]|\n|[^\x1b\n]", text):
            if part == "\n":
                self.lines.append("")
                self.column = 0
            elif part.endswith("D") and len(part) > 1:
                self.column -= int(part[2:-1])
                assert self.column >= 0
            elif part == "\x1b[K":
                self.lines[-1] = self.lines[-1][: self.column]
            else:
                assert len(self.lines[-1]) == self.column < self.columns - 1, "the last column stays empty"
                self.lines[-1] += part
                self.column += 1


def shown(text: str, columns: int, sizes: random.Random | None = None) -> list[str]:
    wrap, screen = WordWrap(lambda: columns), Screen(columns)
    start = 0
    while start < len(text):
        end = start + (sizes.randint(1, 7) if sizes else 1)
        screen.write(wrap.feed(text[start:end]))
        start = end
    return screen.lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a short line", ["a short line"]),
        ("words are broken at their spaces", ["words are broken", "at their spaces"]),
        ("exactly sixteen! and more", ["exactly sixteen!", "and more"]),
        ("own\nline breaks\n\nstay", ["own", "line breaks", "", "stay"]),
        ("incomprehensibilities end", ["incomprehensibil", "ities end"]),
        ("an incomprehensibilities", ["an", "incomprehensibil", "ities"]),
    ],
)
def test_lines_break_at_spaces(text: str, lines: list[str]) -> None:
    assert [line.rstrip() for line in shown(text, 17)] == lines


@pytest.mark.parametrize("seed", range(20))
def test_no_word_is_lost_or_broken_however_the_pieces_fall(seed: int) -> None:
    draw = random.Random(seed)
    words = ["x" * draw.randint(1, 12) + str(i) for i in range(60)]
    lines = shown(" ".join(words), 24, draw)
    assert [word for line in lines for word in line.split()] == words


def test_scripts_without_spaces_fill_their_lines() -> None:
    written = WordWrap(lambda: 11).feed("日本語の文章は空白がない")
    assert written == "日本語の文\n章は空白が\nない"


def test_code_blocks_are_not_broken() -> None:
    code = "```python\nresult = function(argument, another_argument)\n```\n"
    assert WordWrap(lambda: 20).feed(code) == code
    wrap = WordWrap(lambda: 20)
    wrap.feed(code)
    assert wrap.feed("and the text after it again") == "and the text after \nit again"


def test_an_unknown_width_breaks_nothing() -> None:
    text = "word " * 100
    assert WordWrap(lambda: 0).feed(text) == text
