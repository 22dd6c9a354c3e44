"""A line on the terminal that says what Python waits for: loading, tracing, compiling.

It appears when a phase has lasted a moment, and leaves nothing behind. Only for terminals, for code that hears of no phases itself
(`hfax.phases.listen`), and not if the environment has HFAX_PROGRESS=0. The commands have a display of their own, and turn it off.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

_DELAY_S = 0.7
"""Shorter phases are not shown."""

_is_on = True


def turn_off() -> None:
    """Show nothing in this process from now on."""
    global _is_on
    _is_on = False


@contextlib.contextmanager
def shown(name: str, detail: str) -> Iterator[None]:
    """Show a phase while the block lasts. A download shows nothing, since huggingface_hub draws bars meanwhile."""
    if not (_is_on and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("HFAX_PROGRESS") != "0"):
        yield
        return
    text = None if name == "download" else f"{name} {detail}"
    _LINE.add(text)
    try:
        yield
    finally:
        _LINE.remove(text)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Show no phases while the block lasts, for code that draws a bar of its own."""
    _LINE.add(None)
    try:
        yield
    finally:
        _LINE.remove(None)


class _Line:
    """The phases that run, in any thread; the last to begin is shown."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: list[str | None] = []
        self._timer: threading.Timer | None = None
        self._bar: Any = None

    def add(self, text: str | None) -> None:
        with self._lock:
            self._running.append(text)
            self._draw()

    def remove(self, text: str | None) -> None:
        with self._lock:
            self._running.remove(text)
            self._draw()

    def _draw(self) -> None:
        if not self._running or None in self._running:
            self._stop()
        elif self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=self._running[-1])
        elif self._timer is None:
            self._timer = threading.Timer(_DELAY_S, self._start)
            self._timer.daemon = True
            self._timer.start()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._timer is not threading.current_thread():
                return  # it was cancelled
            self._timer = None
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                console=Console(file=sys.stderr),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task(self._running[-1] or "", total=None)
            self._bar.start()


_LINE = _Line()
