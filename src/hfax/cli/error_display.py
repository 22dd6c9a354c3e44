"""Error display and logging for the command line.

Everything here goes to stderr; stdout is reserved for the commands' output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfax.errors import HfaxError

_QUIET_LOGGERS = ("transformers", "huggingface_hub", "jax", "torchax")
_verbose = False


def make_console() -> Console:
    """Create a console on the current stderr, without automatic highlighting."""
    return Console(stderr=True, highlight=False)


def is_debugging() -> bool:
    """Whether errors are shown with tracebacks: with `-v`, or with HFAX_DEBUG set."""
    return _verbose or os.environ.get("HFAX_DEBUG", "") not in ("", "0")


def show_error(error: HfaxError) -> None:
    """Show an error's three parts: aligned and coloured on a terminal, otherwise one per line."""
    console = make_console()
    if not console.is_terminal:
        console.print(Text(f"Error: {error}"), soft_wrap=True)
        return
    parts = Table.grid(padding=(0, 1))
    parts.add_column(justify="right", no_wrap=True)
    parts.add_column(overflow="fold")
    parts.add_row(Text("Error", style="bold red"), Text(error.what, style="bold"))
    parts.add_row(Text("Why", style="yellow"), Text(error.why))
    parts.add_row(Text("Fix", style="green"), Text(error.fix))
    console.print(parts)


@contextlib.contextmanager
def reporting(verbose: bool) -> Iterator[None]:
    """Configure logging on stderr while a command runs.

    Args:
        verbose: show hfax's log, library warnings, and tracebacks. Otherwise the libraries are silenced; anything users
            need to know is an `HfaxError`.

    Logging is restored on exit; the traceback setting stays, so errors that leave the block still show one.
    """
    global _verbose
    _verbose = verbose
    hfax_logger, handler = logging.getLogger("hfax"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    levels = {name: logging.getLogger(name).level for name in (*_QUIET_LOGGERS, "hfax")}
    with warnings.catch_warnings():
        if verbose:
            hfax_logger.addHandler(handler)
            hfax_logger.setLevel(logging.INFO)
        else:
            for name in _QUIET_LOGGERS:
                logging.getLogger(name).setLevel(logging.ERROR)
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
        try:
            yield
        finally:
            hfax_logger.removeHandler(handler)
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
