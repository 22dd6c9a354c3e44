"""Why a program was not found on disk: the log names what differs from the most similar one."""

import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hfax.programs import program_cache, program_files
from hfax.programs.program_cache import ProgramCache
from hfax.programs.program_files import program_folder
from hfax.programs.program_records import read_records
from hfax.sharding.layout import Layout

_MODEL = {"class": "LlamaForCausalLM", "config": json.dumps({"hidden_size": 64, "more": "x" * 80}), "patches": "none"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path))
    monkeypatch.delenv("HFAX_PROGRAM_CACHE", raising=False)


def _make(caplog: pytest.LogCaptureFixture, model: dict[str, str] = _MODEL, size: int = 3, name: str = "double") -> str:
    """Ask for a program in a cache of its own; what the log says of it."""
    caplog.clear()
    cache = ProgramCache(model, Layout.on(jax.devices()[0]))
    with caplog.at_level(logging.INFO, "hfax"):
        cache.get(name, "options", lambda x: (x * 2, None), (jnp.ones(size),))
    return "\n".join(r.getMessage() for r in caplog.records if "is made" in r.getMessage())


def test_a_miss_names_what_differs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no program of this name and size" in _make(caplog)
    assert _make(caplog) == ""
    assert "differs in config" in _make(caplog, {**_MODEL, "config": "y" * 80})
    assert "differs in patches (none, now of mine)" in _make(caplog, {**_MODEL, "patches": "of mine"})
    assert "differs in shapes" in _make(caplog, size=4)
    monkeypatch.setattr(program_cache, "environment_parts", lambda device: {"jax": "9.9", "source of hfax": "z" * 64})
    text = _make(caplog)
    assert f"jax ({jax.__version__}, now 9.9)" in text
    assert ", source of hfax" in text


def test_records_leave_with_their_programs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_files, "_MAX_BYTES", 1)
    _make(caplog)
    _make(caplog, size=4)
    assert not list(program_folder().glob("*.json"))


def test_records_that_cannot_be_read_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    _make(caplog)
    (record,) = program_folder().glob("*.json")
    (program_folder() / "broken.json").write_text("{")
    (program_folder() / "broken.program").write_text("")
    (program_folder() / "alone.json").write_text(record.read_text())
    assert [found.name for found in read_records(program_folder())] == ["double"]
    record.unlink()
    assert _make(caplog) == "", "the program is found without its record"
