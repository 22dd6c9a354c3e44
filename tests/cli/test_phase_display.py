"""Phases on stderr."""

from __future__ import annotations

import io

from rich.console import Console

from hfax.cli.phase_display import PhaseDisplay
from hfax.phases import phase


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=100)


def test_finished_phases_are_plain_lines_with_their_seconds():
    console = plain_console()
    display = PhaseDisplay(console)
    with display.following("starting"), phase("trace", "prefill[1, 64]"):
        pass
    assert console.file.getvalue() == "trace prefill[1, 64]: 0.00 s\n"
    assert set(display.seconds) == {"trace"}


def test_transient_phases_leave_no_line_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    display = PhaseDisplay(console, is_transient=True)
    with display.following("starting"), phase("compile", "decode[1, 64]"):
        pass
    written = console.file.getvalue()
    assert "compile decode[1, 64]" in written  # the spinner
    assert "compile decode[1, 64]: " not in written
    assert display.seconds["compile"] > 0
    plain = plain_console()
    with PhaseDisplay(plain, is_transient=True).following("starting"), phase("compile", "decode[1, 64]"):
        pass
    assert "compile decode[1, 64]: " in plain.file.getvalue()


def test_seconds_add_up_over_blocks():
    display = PhaseDisplay(plain_console())
    for _ in range(2):
        with display.following("starting"), phase("compile", "x"):
            pass
    assert display.seconds["compile"] > 0


def test_phases_within_an_answer_wait_for_its_end():
    console = plain_console()
    display = PhaseDisplay(console)
    with display.following("starting"):
        display.answering()
        with phase("compile", "decode"):
            pass
        assert console.file.getvalue() == ""
        display.answered()
        assert "compile decode" in console.file.getvalue()


def test_terminal_is_left_clean_after_a_phase_that_failed():
    """A phase that raises sends no end event; its spinner must stop all the same, and the cursor come back."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    try:
        with PhaseDisplay(console).following("starting"), phase("compile", "decode"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    written = console.file.getvalue()
    assert "compile decode" in written
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")


def test_nothing_is_heard_after_the_block():
    console = plain_console()
    with PhaseDisplay(console).following("starting"):
        pass
    with phase("load", "x"):
        pass
    assert console.file.getvalue() == ""
