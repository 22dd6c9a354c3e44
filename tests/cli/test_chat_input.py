"""Lines into messages and commands."""

from __future__ import annotations

import pytest

from hfax.cli.chat_input import Command, LineDropped, Said, read_entries


def entries_of(*lines: str | type[Exception]) -> list[Said | Command]:
    left = list(lines)

    def read_line(prompt: str) -> str:
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, str):
            return line
        raise line

    return list(read_entries(read_line))


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (["hello"], ["hello"]),
        (["one", "", "  ", "two"], ["one", "two"]),
        (['"""', "one", "", "two", '"""', "three"], ["one\n\ntwo", "three"]),
        (['"""one', 'two"""'], ["one\ntwo"]),
        (['"""one line"""'], ["one line"]),
        (['"""', "/reset", '"""'], ["/reset"]),
        (['"""', "left open"], ["left open"]),
        (["one\\", "two\\", "three"], ["one\ntwo\nthree"]),
        (["ends in a backslash\\"], ["ends in a backslash"]),
        (["  indented"], ["  indented"]),
        (['"""', '"""'], []),
    ],
)
def test_messages(lines, texts):
    assert [entry.text for entry in entries_of(*lines) if isinstance(entry, Said)] == texts


def test_commands():
    assert entries_of("/save my talk.json ", "/reset", "/system") == [
        Command(name="save", argument="my talk.json"),
        Command(name="reset", argument=""),
        Command(name="system", argument=""),
    ]


def test_dropped_line_takes_the_whole_message_back():
    assert entries_of('"""', "half", LineDropped, "next") == [Said(text="next")]
