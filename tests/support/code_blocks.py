"""Code blocks of Markdown pages, as a reader meets them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeBlock:
    """A fenced block.

    Args:
        page: below the repository's root.
        line: of its first line, from 1.
        language: after the fence.
        text: inside of it.
    """

    page: str
    line: int
    language: str
    text: str

    def run(self, names: dict[str, Any], replaced: Mapping[str, str]) -> None:
        """Execute Python with these names, which it may add to, after words in its text were replaced.

        Raises:
            AssertionError: a word that is to be replaced does not stand in it.
        """
        text = self.text
        for word, stand_in in replaced.items():
            assert word in text, f"{self.page}:{self.line} has no {word!r}"
            text = text.replace(word, stand_in)
        exec(compile("\n" * self.line + text, str(ROOT / self.page), "exec"), names)


def code_blocks(page: str, *languages: str) -> list[CodeBlock]:
    """The blocks of a page in these languages, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        CodeBlock(page=page, line=text[: found.start()].count("\n") + 1, language=found[1], text=found[2])
        for found in _BLOCK.finditer(text)
        if found[1] in languages
    ]


def commands(page: str) -> list[tuple[int, str]]:
    """Line and text of every `hfax …` command in the shell blocks of a page; continued lines joined, comments left out."""
    found = []
    for block in code_blocks(page, "sh"):
        joined = block.text.replace("\\\n", " ")
        for number, line in enumerate(joined.splitlines(), start=block.line + 1):
            for part in re.split(r"\s*(?:&&|\|)\s*", re.sub(r"\s{2,}(#|\().*$|#.*$", "", line)):
                if part.startswith("hfax ") and "[OPTIONS]" not in part:
                    found.append((number, part.partition(" < ")[0]))
    return found
