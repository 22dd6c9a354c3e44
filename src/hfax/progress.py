"""A line on the terminal that says what Python waits for: loading, tracing, compiling.

It appears when a phase has lasted a moment, and leaves nothing behind. Only for terminals, for code that hears of no phases itself
(`hfax.phases.listen`), and not if the environment has HFAX_PROGRESS=0. The commands have a display of their own, and turn it off.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_DELAY_S = 0.7
"""Shorter phases are not shown."""

_is_on = True


def turn_off() -> None:
    """Show nothing in this process from now on."""
    global _is_on
    _is_on = False


class Meter:
    """How many bytes of a phase's work are done. Thread-safe."""

    def __init__(self) -> None:
        self.total = 0
        """Bytes of the whole work; 0 while that is unknown."""
        self.done = 0
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def expect(self, total: int) -> None:
        """The work has begun, and has `total` bytes."""
        with self._lock:
            self.total, self.done, self._started = total, 0, time.monotonic()

    def add(self, num_bytes: int) -> None:
        """So many more bytes are done."""
        with self._lock:
            self.done = min(self.done + num_bytes, self.total)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end, if it goes on as fast as so far; None while that is unknown."""
        seconds = time.monotonic() - self._started
        return None if not self.done or seconds < _DELAY_S else seconds * (self.total - self.done) / self.done

    def __str__(self) -> str:
        if not self.total:
            return ""
        left = self.seconds_left
        end = "" if left is None else f", {left:.0f} s left"
        return f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB{end}"


def open_bar(console: Console, text: Callable[[], str], *, style: str = "") -> Progress:
    """A line with a spinner, a text that may change at any time, and the seconds so far; `stop()` erases it."""
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
    from rich.text import Text

    class Current(ProgressColumn):
        """The text."""

        def render(self, task: Task) -> Text:
            """The text as it is now."""
            return Text(text(), style=style)

    bar = Progress(
        SpinnerColumn(style=style),
        Current(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.add_task("", total=None)
    bar.start()
    return bar


@contextlib.contextmanager
def shown(name: str, detail: str, meter: Meter) -> Iterator[None]:
    """Show a phase while the block lasts, with the bytes that are done. A download shows nothing: huggingface_hub draws bars."""
    if not (_is_on and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("HFAX_PROGRESS") != "0"):
        yield
        return
    text = None if name == "download" else lambda: " ".join(filter(None, (name, detail, str(meter))))
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
        self._running: list[Callable[[], str] | None] = []
        self._timer: threading.Timer | None = None
        self._bar: Any = None

    def add(self, text: Callable[[], str] | None) -> None:
        with self._lock:
            self._running.append(text)
            self._draw()

    def remove(self, text: Callable[[], str] | None) -> None:
        with self._lock:
            self._running.remove(text)
            self._draw()

    def _draw(self) -> None:
        if not self._running or None in self._running:
            self._stop()
        elif self._bar is None and self._timer is None:
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

        with self._lock:
            if self._timer is not threading.current_thread():
                return  # it was cancelled
            self._timer = None
            self._bar = open_bar(Console(file=sys.stderr), self._text)

    def _text(self) -> str:
        last = next(iter(self._running[-1:]), None)  # without the lock: `_stop` waits for the thread that draws
        return "" if last is None else last()


_LINE = _Line()
