"""A bar on the terminal that says how many of a server's programs are compiled."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from hfax.engine.engine import Engine

_REFRESH_S = 0.2


class ConsoleHandler(logging.Handler):
    """Writes log records to a console, above a bar that is shown there."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's text as it is."""
        try:
            self._console.out(self.format(record), highlight=False)
        except Exception:
            self.handleError(record)


class CompilationBar:
    """Shows how far an engine's background compilation is, and disappears at its end.

    Nothing is shown where the console is no terminal, or if the environment has HFAX_PROGRESS=0.

    Args:
        console: where the bar is drawn, and where everything else is written meanwhile.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> CompilationBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()

    def show(self, engine: Engine) -> None:
        """Show the bar while the engine compiles programs in the background."""
        if engine.num_programs_left and self._console.is_terminal and os.environ.get("HFAX_PROGRESS") != "0":
            self._thread = threading.Thread(target=self._draw, args=(engine,), name="hfax-compilation-bar")
            self._thread.start()

    def _draw(self, engine: Engine) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("compiling programs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        total = engine.num_programs_left
        with Progress(
            *columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as bar:
            task = bar.add_task("", total=total)
            while (left := engine.num_programs_left) and not self._is_closing.wait(_REFRESH_S):
                bar.update(task, completed=total - left)
