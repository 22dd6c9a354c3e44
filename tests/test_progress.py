"""The line that a terminal shows while Python waits."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hfax import progress
from hfax.phases import PhaseEvent, listen, meter, phase
from hfax.progress import Meter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr, as a terminal that shows a phase at once."""
    found = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))
    monkeypatch.setattr(progress, "_DELAY_S", 0.0)
    monkeypatch.setattr(progress, "_is_on", True)
    monkeypatch.delenv("HFAX_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return found


def shows(terminal: Terminal, text: str) -> bool:
    end = time.monotonic() + 30
    while text not in terminal.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    return text in terminal.getvalue()


def test_a_phase_is_shown_and_leaves_nothing_behind(terminal: Terminal) -> None:
    with phase("load", "a model"):
        assert shows(terminal, "load a model")
        with phase("compile", "decode[1, 64]"):
            assert shows(terminal, "compile decode[1, 64]")
    written = terminal.getvalue()
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is back
    assert written.rstrip().endswith("\x1b[2K")  # the line is erased
    assert progress._LINE._running == []


def test_a_phase_that_fails_is_taken_away(terminal: Terminal) -> None:

    def fail() -> None:
        with phase("compile", "x"):
            assert shows(terminal, "compile x")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert progress._LINE._running == []
    assert progress._LINE._bar is None


def test_phases_of_several_threads_share_the_line(terminal: Terminal) -> None:
    started, ends = threading.Barrier(3), threading.Event()

    def work(name: str) -> None:
        with phase("compile", name):
            started.wait(30)
            assert ends.wait(30)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    started.wait(30)
    assert shows(terminal, "compile ")
    ends.set()
    for thread in threads:
        thread.join(30)
    assert progress._LINE._running == []
    assert progress._LINE._bar is None


@pytest.mark.parametrize("how", ["pipe", "environment", "listener", "hidden", "off", "download"])
def test_nothing_is_shown_where_nobody_wants_it(how: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(progress._Line, "_start", lambda self: drawn.append(self))
    if how == "pipe":
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=io.StringIO()))
    elif how == "environment":
        monkeypatch.setenv("HFAX_PROGRESS", "0")
    elif how == "off":
        progress.turn_off()
    context = listen(lambda event: None) if how == "listener" else progress.hidden() if how == "hidden" else None
    name = "download" if how == "download" else "compile"
    if context is None:
        with phase(name, "x"):
            time.sleep(0.05)
    else:
        with context, phase(name, "x"):
            time.sleep(0.05)
    assert drawn == []
    assert terminal.getvalue() == ""


def test_a_short_phase_is_not_shown(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DELAY_S", 60.0)
    with phase("compile", "x"):
        pass
    assert terminal.getvalue() == ""
    assert progress._LINE._timer is None


def test_a_load_says_how_many_bytes_are_left(terminal: Terminal) -> None:
    with phase("load", "a model"):
        found = meter()
        found.expect(4_000_000_000)
        found.add(1_000_000_000)
        assert shows(terminal, "load a model 1.00 of 4.00 GB, ")
        assert shows(terminal, " s left")
        with phase("compile", "x"):
            assert meter() is not found
        assert meter() is found
    assert meter() is not found


def test_the_seconds_left_follow_from_the_bytes_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    found = Meter()
    assert str(found) == ""
    found.expect(8_000_000_000)
    assert str(found) == "0.00 of 8.00 GB"
    now = 102.0
    found.add(2_000_000_000)
    assert str(found) == "2.00 of 8.00 GB, 6 s left"
    found.add(9_000_000_000)  # tied weights that are stored twice
    assert str(found) == "8.00 of 8.00 GB, 0 s left"


def test_loading_a_model_counts_its_bytes(tmp_path: Path) -> None:
    import tiny_models

    from hfax import AutoModelForTPU

    folder = tiny_models.save(tmp_path, tiny_models.tiny_llama())
    events: list[PhaseEvent] = []
    with listen(events.append):
        model = AutoModelForTPU.from_pretrained(folder)
    (end,) = [event for event in events if event.name == "load" and event.seconds is not None]
    assert end.meter.done == end.meter.total == sum(array.nbytes for array in model.params.values())
