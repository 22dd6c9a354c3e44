"""Code blocks of Markdown pages, as a reader meets them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_COMMAND_LINE = re.compile(r"^.*<<'(?P<end>\w+)'\n(?:.*\n)*?(?P=end)$|^.+$", re.MULTILINE)


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


def pages_of_docs() -> list[str]:
    """The pages of docs/, below the repository's root, but for its log, which keeps what was once."""
    folders = [ROOT / "docs" / folder for folder in ("", "guides", "concepts", "tutorial")]
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in folder.glob("*.md"))


def code_blocks(page: str, *languages: str) -> list[CodeBlock]:
    """The blocks of a page in these languages, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        CodeBlock(page=page, line=text[: found.start()].count("\n") + 1, language=found[1], text=found[2])
        for found in _BLOCK.finditer(text)
        if found[1] in languages
    ]


def command_lines(page: str) -> list[tuple[int, str]]:
    """Line and text of every command line in the shell blocks of a page.

    Continued lines and here-documents are one command line; comments and the generated synopses are left out.
    """
    found = []
    for block in code_blocks(page, "sh", "bash", "shell", "console"):
        joined = block.text.replace("\\\n", " ")
        for match in _COMMAND_LINE.finditer(joined):
            text = match[0] if "<<" in match[0] else re.sub(r"\s{2,}(#|\().*$|#.*$", "", match[0]).strip()
            if text and "[OPTIONS]" not in text:
                found.append((block.line + 1 + joined[: match.start()].count("\n"), text))
    return found


def hfax_commands(line: str) -> list[str]:
    """The `hfax …` commands of a command line, without the files that they read."""
    parts = re.split(r"\s*(?:&&|\|)\s*", line)
    return [part.partition(" < ")[0] for part in parts if part.startswith("hfax ")]
