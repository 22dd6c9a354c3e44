"""Parses chat input, line by line, into messages and commands.

Turns lines into `Said` and `Command`. Lines enclosed in lines of three double quotes form one message, as do lines continued with a
trailing backslash. This module does not execute commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

from hfax.cli.interrupts import CtrlC

_FENCE = '"""'
_PROMPT, _CONTINUATION = "> ", ". "

ReadLine = Callable[[str], str]
"""Shows a prompt and reads a line without its newline; raises EOFError at end of input, LineDropped after Ctrl-C."""


class LineDropped(Exception):
    """The user discarded the current input with Ctrl-C."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Said:
    """A message for the model."""

    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A line such as `/save talk.json`: the name without its slash, and the rest of the line."""

    name: str
    argument: str


def read_entries(read_line: ReadLine) -> Iterator[Said | Command]:
    """Yield messages and commands until end of input; empty lines are skipped.

    End of input closes an open fence. To send a message that starts with a slash, put it in a fence.
    """
    with contextlib.suppress(EOFError):
        while True:
            try:
                entry = _read_entry(read_line)
            except LineDropped:
                continue
            if isinstance(entry, Command) or entry.text.strip():
                yield entry


def _read_entry(read_line: ReadLine) -> Said | Command:
    line = read_line(_PROMPT)
    if line.strip().startswith(_FENCE):
        return Said(text=_read_fenced(line.strip().removeprefix(_FENCE), read_line))
    if line.startswith("/"):
        name, _, argument = line[1:].strip().partition(" ")
        return Command(name=name, argument=argument.strip())
    return Said(text=_read_continued(line, read_line))


def _read_fenced(first: str, read_line: ReadLine) -> str:
    if first.endswith(_FENCE):
        return first.removesuffix(_FENCE)
    lines = [first] if first else []
    with contextlib.suppress(EOFError):
        while not (line := read_line(_CONTINUATION)).rstrip().endswith(_FENCE):
            lines.append(line)
        if last := line.rstrip().removesuffix(_FENCE):
            lines.append(last)
    return "\n".join(lines)


def _read_continued(line: str, read_line: ReadLine) -> str:
    lines = []
    with contextlib.suppress(EOFError):
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = read_line(_CONTINUATION)
        lines.append(line)
    return "\n".join(lines)


def is_interactive() -> bool:
    """Whether stdin is a terminal."""
    return sys.stdin.isatty()


def make_line_reader(console: Console, ctrl_c: CtrlC) -> ReadLine:
    """Create a line reader: with line editing and history on a terminal, otherwise plain and without prompts.

    Ctrl-C at a prompt discards the current message; with plain input it propagates.
    """
    if not is_interactive():
        return lambda prompt: _read_plain_line(ctrl_c)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() line editing, and history with the arrow keys)

    def read_line(prompt: str) -> str:
        try:
            if sys.stdout.isatty():
                with ctrl_c.raising():
                    return input(_coloured(prompt) if console.color_system else prompt)
            console.print(Text(prompt, style="bold green"), end="")
            return _read_plain_line(ctrl_c)
        except KeyboardInterrupt:
            console.print(Text("\n(Ctrl-D or /exit to exit)", style="dim"))
            raise LineDropped from None
        except EOFError:
            console.print()
            raise

    return read_line


def _coloured(prompt: str) -> str:
    """Bold green; \\001 and \\002 tell readline that the codes between them have no width."""
    return f"\001\033[1;32m\002{prompt}\001\033[0m\002"


def _read_plain_line(ctrl_c: CtrlC) -> str:
    with ctrl_c.raising():
        line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
