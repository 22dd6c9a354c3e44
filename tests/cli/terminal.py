"""`hfax` at a pseudo-terminal: what a person sees and types."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from typing import Self

from command_line import INTERRUPTIBLE_COMMAND, process_environment

_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes the pseudo-terminal the one whose Ctrl-C reaches the process, then becomes it. (`pty.fork` would fork a process
in which JAX runs threads.)"""


class Terminal:
    """One process and its terminal, for use in a `with`.

    Args:
        arguments: of the command.
        columns: the terminal's width; 0: it does not say.

    Attributes:
        seen: output behind what was waited for.
    """

    def __init__(self, *arguments: object, columns: int = 0) -> None:
        self._fd, theirs = pty.openpty()
        if columns:
            termios.tcsetwinsize(theirs, (24, columns))
        command = [sys.executable, "-c", _TAKE_TERMINAL, *INTERRUPTIBLE_COMMAND, *map(str, arguments)]
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self._process = subprocess.Popen(command, **streams, env=process_environment(), start_new_session=True)
        os.close(theirs)
        self.seen = ""

    def wait_for(self, pattern: str, timeout_s: float = 60) -> str:
        """Read until the pattern appears behind what was waited for before; returns the text up to its end."""
        end = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen)):
            if not self._read(max(0, end - time.monotonic())):  # no `assert`: with `python -O` nothing would be read
                raise AssertionError(f"{pattern!r} did not appear in {self.seen!r}")
            if self._process.poll() is not None and not re.search(pattern, self.seen):
                raise AssertionError(f"ended before {pattern!r}: {self.seen!r}")
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def exit_code(self, timeout_s: float = 30) -> int:
        """Read until the process ends."""
        end = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < end:
            self._read(0.1)
        if self._process.poll() is None:
            raise AssertionError(f"did not end: {self.seen!r}")
        self._read(0)
        return self._process.returncode

    def close(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, timeout_s: float) -> bool:
        """Whether anything came, or the process has closed its side."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        with contextlib.suppress(OSError):  # Linux: the other side is closed
            self.seen += os.read(self._fd, 65536).decode(errors="replace")
        return True
