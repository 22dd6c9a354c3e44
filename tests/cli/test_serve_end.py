"""How `hfax serve` ends while programs are being compiled."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from command_line import process_environment
from terminal import Terminal

_SCRIPT = """
import sys, threading, time
from hfax.cli.serve import _leave_compilation
threading.Thread(target=time.sleep, args=(120,), name=sys.argv[1], daemon=sys.argv[1] == "another").start()
print("before", end="")
_leave_compilation(3)
print(", after")
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hfax-background-compile", (3, "before")),
        ("hfax-compile_0", (3, "before")),
        ("another", (0, "before, after\n")),
    ],
)
def test_the_process_does_not_wait_for_a_compilation(name: str, expected: tuple[int, str]) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, name], capture_output=True, text=True, env=process_environment(), timeout=100
    )
    assert (done.returncode, done.stdout) == expected
    assert time.monotonic() - began < 100


def test_a_terminal_shows_how_many_programs_are_compiled(tmp_path, monkeypatch) -> None:
    """A bar below the log, which is gone at the end, with the cursor shown again."""
    monkeypatch.setenv("HFAX_HOME", str(tmp_path))  # nothing is compiled yet
    monkeypatch.setenv("HFAX_PROGRESS", "1")
    with Terminal("serve", "demo", "--port", "0", "--max-model-len", "256", columns=100) as terminal:
        terminal.wait_for("compiling programs", timeout_s=300)
        terminal.wait_for(r"\d/\d+")
        terminal.wait_for(r"programs for .+ are ready \(\d of \d+\)", timeout_s=120)
        terminal.type("\x03")
        assert terminal.exit_code() == 0
        assert "\x1b[?25h" in terminal.seen
