"""Displays downloads, loads, traces and compilations on stderr, and sums their durations.

Turns `hfax.phases` events into lines. Never writes to stdout; during output (`answering`), finished phases are held back so they
do not interrupt a line.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from hfax.phases import PhaseEvent, listen
from hfax.progress import Meter, open_bar


class PhaseDisplay:
    """Phase display of one command.

    Args:
        console: console on stderr. A terminal shows a spinner with elapsed time; otherwise only finished phases are printed.
        is_transient: a terminal shows a phase only while it lasts.

    Attributes:
        seconds: total wall-clock seconds by phase name.
    """

    def __init__(self, console: Console, *, is_transient: bool = False) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._console = console
        self._keeps_lines = not (is_transient and console.is_terminal)
        self._spinner: Progress | None = None
        self._running: dict[tuple[str, str], Meter] = {}
        self._waiting: list[Text] = []
        self._is_answering = False
        self._activity = ""

    @contextlib.contextmanager
    def following(self, activity: str) -> Iterator[None]:
        """Display the phases of the block; the terminal is restored however it ends.

        Args:
            activity: spinner text between phases.
        """
        self._activity = activity
        self._running.clear()
        try:
            self._spin()
            with listen(self._on_event):
                yield
        finally:
            self._stop_spinner()
            self.answered()

    def answering(self) -> None:
        """Output starts on stdout: stop the spinner, and hold lines back until `answered`."""
        self._stop_spinner()
        self._is_answering = True

    def answered(self) -> None:
        """Output is complete: print the lines held back."""
        self._is_answering = False
        for line in self._waiting:
            self._console.print(line, soft_wrap=True)
        self._waiting.clear()

    def _on_event(self, event: PhaseEvent) -> None:
        key = (event.name, event.detail)
        if event.seconds is None:
            self._running[key] = event.meter
        else:
            self._running.pop(key, None)
            self.seconds[event.name] += event.seconds
            if self._keeps_lines:
                self._show(Text(f"{event.name} {event.detail}: {event.seconds:.2f} s", style="dim"))
        self._spin()

    def _show(self, line: Text) -> None:
        if self._is_answering:
            self._waiting.append(line)
        else:
            self._console.print(line, soft_wrap=True)

    def _spin(self) -> None:
        """Show the innermost phase or the activity; nothing during downloads, which have huggingface_hub's progress bars."""
        self._stop_spinner()
        is_download = any(name == "download" for name, _ in self._running)
        if self._is_answering or is_download or not self._console.is_terminal:
            return
        text = self._activity
        meter = Meter()
        if self._running:
            (name, detail), meter = list(self._running.items())[-1]
            text = f"{name} {detail}"
        self._spinner = open_bar(self._console, lambda: f"{text} {meter}".rstrip(), style="cyan")

    def _stop_spinner(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None
