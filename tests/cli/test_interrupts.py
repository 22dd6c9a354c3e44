"""Ctrl-C where somebody waits for it, and elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

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
