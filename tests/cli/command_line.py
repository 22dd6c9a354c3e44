"""Running `hfax` as a process of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import processes

import hfax

COMMAND = [sys.executable, "-W", "error", "-m", "hfax.cli"]
"""Every warning is an error."""
INTERRUPTIBLE_COMMAND = [*COMMAND[:3], "-W", "ignore::ResourceWarning", *COMMAND[3:]]
"""Ctrl-C in the middle of an import leaves importlib's own files to the garbage collector, which would warn of them."""


@dataclass(frozen=True)
class Finished:
    """What a command line left behind."""

    code: int
    out: str
    err: str


def process_environment(**more: str) -> dict[str, str]:
    """Variables for a process that finds this package, wherever it is installed."""
    source = str(Path(hfax.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "TERM": "xterm", **more}


def run_process(*arguments: object, stdin: str = "", **environment: str) -> Finished:
    """Run one command line with none of its three streams at a terminal; variables begin with HFAX_."""
    done = processes.run([*COMMAND[1:], *arguments], environment, text=stdin)
    return Finished(done.returncode, done.stdout, done.stderr)
