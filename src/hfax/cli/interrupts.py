"""Ctrl-C as something to stop a reply or drop a line with, and not the program.

Python raises KeyboardInterrupt between any two instructions: also between reading a line and answering it, or inside a
`finally`. `CtrlC` raises it only where somebody waits for it, and remembers it elsewhere.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Self


class CtrlC:
    """A handler of SIGINT for the main thread, installed while used as a context manager."""

    def __init__(self) -> None:
        self.was_pressed = False
        """Since `raising` was last entered. KeyboardInterrupt from inside a callback of C code gets lost ("Exception
        ignored in"), so that whoever loops should look here as well."""
        self._is_open = False
        self._is_pending = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Ctrl-C raises KeyboardInterrupt in this block, once; pressed since the last block, it does so at once.

        If C code swallows it or makes another error of it (as when a library is being imported), it is raised again
        where the block ends.
        """
        try:
            self.was_pressed, self._is_open = False, True
            if self._is_pending:
                self._is_pending = False
                raise KeyboardInterrupt
            yield
            if self.was_pressed:
                raise KeyboardInterrupt
        except Exception:
            if self.was_pressed:
                raise KeyboardInterrupt from None
            raise
        finally:
            self._is_open = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.was_pressed = True
        if self._is_open:
            self._is_open = False  # here, since the block's own `finally` may be what this interrupts
            raise KeyboardInterrupt
        self._is_pending = True
