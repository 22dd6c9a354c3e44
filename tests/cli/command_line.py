"""Running `hfax` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import hfax

COMMAND = [sys.executable, "-W", "error", "-m", "hfax.cli"]
"""Every warning is an error."""


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
    """Run one command line with pipes for all three streams."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env=process_environment(**environment),
    )
    return Finished(done.returncode, done.stdout, done.stderr)
