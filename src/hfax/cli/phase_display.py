"""Shows downloads, loads, traces and compilations on stderr while they run, and adds up their seconds.

Turns the events of `hfax.phases` into lines. It never writes to stdout; while an answer is being written (`answering`),
finished phases wait, so that they do not fall into the middle of a line.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from hfax.phases import PhaseEvent, listen


class PhaseDisplay:
    """One verb's view of the phases.

    Args:
        console: on stderr. A terminal gets a spinner with a running clock, anything else only the finished lines.

    Attributes:
        seconds: wall-clock seconds by phase name, added up.
    """

    def __init__(self, console: Console) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._console = console
        self._spinner: Progress | None = None
        self._running: list[tuple[str, str]] = []
        self._waiting: list[Text] = []
        self._is_answering = False
        self._activity = ""

    @contextlib.contextmanager
    def following(self, activity: str) -> Iterator[None]:
        """Show the phases of the block; whatever ends it, the terminal is left as it was.

        Args:
            activity: what goes on between the phases, for the spinner.
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
        """An answer starts on stdout: no spinner from here on, and lines wait until `answered`."""
        self._stop_spinner()
        self._is_answering = True

    def answered(self) -> None:
        """The answer's last line is complete: show what was held back."""
        self._is_answering = False
        for line in self._waiting:
            self._console.print(line, soft_wrap=True)
        self._waiting.clear()

    def _on_event(self, event: PhaseEvent) -> None:
        key = (event.name, event.detail)
        if event.seconds is None:
            self._running.append(key)
        else:
            if key in self._running:
                self._running.remove(key)
            self.seconds[event.name] += event.seconds
            self._show(Text(f"{event.name} {event.detail}: {event.seconds:.2f} s", style="dim"))
        self._spin()

    def _show(self, line: Text) -> None:
        if self._is_answering:
            self._waiting.append(line)
        else:
            self._console.print(line, soft_wrap=True)

    def _spin(self) -> None:
        """Show the innermost phase, or the activity; but nothing beside huggingface_hub's own bars."""
        self._stop_spinner()
        is_download = any(name == "download" for name, _ in self._running)
        if self._is_answering or is_download or not self._console.is_terminal:
            return
        self._spinner = Progress(
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}", style="cyan", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._spinner.add_task(" ".join(self._running[-1]) if self._running else self._activity, total=None)
        self._spinner.start()

    def _stop_spinner(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None
