"""A benchmark's subjects, each in a process of its own: the benchmark calls itself with `--subject`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def run_subject(script: str, given: list[str], home: str) -> dict[str, Any]:
    """What a benchmark prints as its last line, JSON, for one subject.

    Args:
        script: the benchmark's file.
        given: the values of `--subject`.
        home: `HFAX_HOME` of the process, where programs are stored.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, "--subject", *given],
        env={**os.environ, "HFAX_HOME": home},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
