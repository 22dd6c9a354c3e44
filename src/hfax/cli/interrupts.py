"""Ctrl-C handling: stops a reply or discards a line instead of ending the program.

Python can raise KeyboardInterrupt between any two instructions, even between reading a line and replying to it, or inside a
`finally`. `CtrlC` raises it only in designated blocks, and defers it elsewhere.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Self


class CtrlC:
    """A SIGINT handler for the main thread, installed while used as a context manager."""

    def __init__(self) -> None:
        self.was_pressed = False
        """Whether Ctrl-C was pressed since `raising` was last entered. KeyboardInterrupt raised in a callback from C code is
        lost ("Exception ignored in"), so loops should also check this."""
        self._is_open = False
        self._is_pending = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Let Ctrl-C raise KeyboardInterrupt once in this block; a deferred one is raised immediately.

        If C code swallows it or converts it to another error (for example during an import), it is raised again at the end of
        the block.
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
            self._is_open = False  # reset here, since the signal may interrupt the block's own `finally`
            raise KeyboardInterrupt
        self._is_pending = True
