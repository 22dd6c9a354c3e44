"""Ctrl-C where somebody waits for it, and elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from command_line import process_environment

from hfax.cli.interrupts import CtrlC


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_raises_inside_the_block_only():
    with CtrlC() as ctrl_c:
        with pytest.raises(KeyboardInterrupt), ctrl_c.raising():
            press()
        with ctrl_c.raising():
            pass


def test_pressed_between_blocks_raises_at_the_next_one_and_once():
    """Between reading a line and answering it, Ctrl-C once ended the whole chat."""
    with CtrlC() as ctrl_c:
        press()
        with pytest.raises(KeyboardInterrupt), ctrl_c.raising():
            pytest.fail("not raised at once")
        with ctrl_c.raising():
            pass


def test_second_press_does_not_raise_while_the_first_is_handled():
    with CtrlC() as ctrl_c:
        try:
            with ctrl_c.raising():
                press()
        except KeyboardInterrupt:
            press()
        with pytest.raises(KeyboardInterrupt), ctrl_c.raising():
            pass


def test_former_handler_comes_back():
    before = signal.getsignal(signal.SIGINT)
    with CtrlC():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_swallowed_by_c_code_raises_where_the_block_ends():
    """Ctrl-C inside a library's callback, while a model was loading, once was lost: the command ran on and exited 0."""
    with CtrlC() as ctrl_c:
        with pytest.raises(KeyboardInterrupt), ctrl_c.raising(), contextlib.suppress(KeyboardInterrupt):
            press()
        with ctrl_c.raising():
            pass


def test_error_that_ctrl_c_caused_is_ctrl_c():
    """Ctrl-C while scipy was imported once was "ImportError: initialization failed", with exit code 1."""

    def import_library():
        try:
            press()
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt), ctrl_c.raising():
        import_library()


def test_other_errors_pass():
    with CtrlC() as ctrl_c, pytest.raises(ImportError), ctrl_c.raising():
        raise ImportError("no such module")


def test_ctrl_c_in_a_string_of_code_that_an_import_runs_ends_with_130_under_python_m(tmp_path):
    """Dataclasses run strings; for CPython, an interrupt in one ends the process by SIGINT even if it was caught."""
    (tmp_path / "interrupted.py").write_text(
        "import signal\n"
        "from hfax.cli import app\n"
        "def run():\n"
        "    try:\n"
        "        exec('signal.raise_signal(signal.SIGINT)')\n"
        "    except KeyboardInterrupt:\n"
        "        return 130\n"
        "app.run = run\n"
        "app.main()\n"
    )
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, env=process_environment(), check=False)
    assert done.returncode == 130
