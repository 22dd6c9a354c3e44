"""The output of several processes in one terminal: whole lines, each with the number of its process."""

from __future__ import annotations

import asyncio
import re
from typing import BinaryIO

_CHUNK = 1 << 16
_END = re.compile(rb"\r\n|\r(?!\Z)|\n")
"""Ends a line, or a state of a progress bar. A carriage return at the end of a chunk may be half of an end."""


async def copy_labelled(reader: asyncio.StreamReader, out: BinaryIO, label: str) -> None:
    """Copy a process's output until it ends, with `label` before each line. The last line is ended if it has no end.

    Args:
        reader: the process's stdout or stderr.
        out: a binary stream of this process; each line is one write.
        label: goes before each line.

    Raises:
        OSError: `out` was closed by its reader.
    """
    prefix, rest = label.encode(), b""
    while chunk := await reader.read(_CHUNK):
        searched, begin = max(len(rest) - 1, 0), 0
        rest += chunk
        for end in _END.finditer(rest, searched):
            _write(out, prefix + rest[begin : end.end()])
            begin = end.end()
        rest = rest[begin:]
    if rest:
        _write(out, prefix + rest.rstrip(b"\r") + b"\n")


def _write(out: BinaryIO, line: bytes) -> None:
    out.write(line)
    out.flush()
