"""Compiled programs on disk: found again, never trusted blindly, never in the way."""

import logging
import os
import pickle
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from hfax.programs import program_files, versions
from hfax.programs.program_cache import ProgramCache, compiling_ahead
from hfax.programs.program_files import program_folder
from hfax.sharding.layout import Layout


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path))
    monkeypatch.delenv("HFAX_PROGRAM_CACHE", raising=False)
    return tmp_path


def _double(calls: list[int], cache: ProgramCache, size: int = 3) -> Any:
    """The program that doubles; `calls` gets an entry for each trace."""

    def function(x: jax.Array) -> tuple[jax.Array, str]:
        calls.append(size)
        return x * 2, "a note"

    return cache.get("double", "key", function, (jnp.ones(size),))


def _cache(key: str = "model") -> ProgramCache:
    return ProgramCache({"model": key}, Layout.on(jax.devices()[0]))


def _files() -> list[Path]:
    return sorted(program_folder().glob("*.program"))


def test_second_object_neither_traces_nor_compiles() -> None:
    calls: list[int] = []
    _double(calls, _cache())
    again = _double(calls, _cache())
    assert calls == [3]
    assert again.run(jnp.arange(3.0)).tolist() == [0, 2, 4]
    assert again.note == "a note"


def test_other_shapes_models_and_settings_are_other_programs() -> None:
    calls: list[int] = []
    _double(calls, _cache())
    _double(calls, _cache(), size=4)
    _double(calls, _cache("another model"))
    with jax.default_matmul_precision("high"):
        _double(calls, _cache())
    torch.set_float32_matmul_precision("medium")
    try:
        _double(calls, _cache())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(calls) == len(_files()) == 5


@pytest.mark.parametrize("damage", [b"", b"not a pickle", pickle.dumps(("wrong",))])
def test_damaged_file_is_compiled_again(damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    _double(calls, _cache())
    (file,) = _files()
    file.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert _double(calls, _cache()).run(jnp.ones(3)).tolist() == [2, 2, 2]
    assert calls == [3, 3]
    assert "will be recompiled" in caplog.text
    _double(calls, _cache())
    assert calls == [3, 3]


def test_truncated_file_is_compiled_again() -> None:
    calls: list[int] = []
    _double(calls, _cache())
    (file,) = _files()
    file.write_bytes(file.read_bytes()[:-100])
    assert _double(calls, _cache()).run(jnp.ones(3)).tolist() == [2, 2, 2]


def test_files_are_for_their_owner_alone() -> None:
    _double([], _cache())
    assert stat.S_IMODE(program_folder().stat().st_mode) == 0o700
    assert stat.S_IMODE(_files()[0].stat().st_mode) & 0o077 == 0


def test_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFAX_PROGRAM_CACHE", "0")
    _double([], _cache())
    assert not program_folder().exists()


def test_what_was_unused_for_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _double([], _cache("old"))
    (old,) = _files()
    os.utime(old, (1, 1))
    _double([], _cache("middle"))
    monkeypatch.setattr(program_files, "_MAX_BYTES", old.stat().st_size * 2 + 1000)
    _double([], _cache("new"))
    assert len(_files()) == 2
    assert not old.exists()


def test_a_folder_that_cannot_be_written_costs_a_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    program_folder().parent.mkdir(exist_ok=True)
    program_folder().write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert _double([], _cache()).run(jnp.ones(3)).tolist() == [2, 2, 2]
    assert "program not cached" in caplog.text


def test_a_writer_that_died_leaves_nothing_that_is_read() -> None:
    program_folder().mkdir(parents=True)
    orphan = program_folder() / ".writing-dead"
    orphan.write_bytes(b"half")
    os.utime(orphan, (1, 1))
    _double([], _cache())
    assert not orphan.exists()


def test_programs_outlive_edits_of_what_traces_nothing(tmp_path: Path) -> None:
    root = tmp_path / "hfax"
    for name in ("kernels/linear.py", "server/app.py", "doctor.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("first")
    source_digest = versions.source_digest.__wrapped__
    first = source_digest(root)
    (root / "server" / "app.py").write_text("second")
    (root / "doctor.py").write_text("second")
    assert source_digest(root) == first
    (root / "kernels" / "linear.py").write_text("second")
    assert source_digest(root) != first


def test_a_program_knows_which_inputs_no_result_depends_on() -> None:
    """Not those that are computed with in vain, either; and it still knows when it comes from disk."""

    def function(weight: jax.Array, inputs: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        jax.jit(jnp.sin)(inputs["in_vain"])
        return inputs["read"] * weight, None

    args = jnp.float32(2), {name: jnp.ones(3) for name in ("unread", "read", "in_vain")}
    for cache in (_cache(), _cache()):
        assert cache.get("product", "key", function, args, inputs_at=1).unread == ("in_vain", "unread")
    assert len(_files()) == 1


def test_programs_are_compiled_ahead_and_not_run() -> None:
    """The second program takes the first's abstract results, and calls find both programs."""
    calls: list[int] = []
    cache = _cache()
    with compiling_ahead():
        first = _double(calls, cache)
        found = first.run(jnp.ones(3))
        assert isinstance(found, jax.ShapeDtypeStruct)
        second = cache.get("sum", "key", lambda x: (x.sum(), None), (found,))
        assert second.run(found).shape == ()
    assert len(_files()) == 2
    assert first.run(jnp.arange(3.0)).tolist() == [0, 2, 4]
    again = _double(calls, cache)
    assert calls == [3]
    total = cache.get("sum", "key", lambda x: pytest.fail("traced again"), (again.run(jnp.arange(3.0)),))
    assert float(total.run(again.run(jnp.arange(3.0)))) == 6
    with compiling_ahead():  # found in memory, and on disk
        assert isinstance(_double(calls, cache).run(jnp.ones(3)), jax.ShapeDtypeStruct)
        assert isinstance(_double(calls, _cache()).run(jnp.ones(3)), jax.ShapeDtypeStruct)


def test_threads_that_ask_for_one_program_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    cache = _cache()
    compiles = threading.Event()
    goes_on = threading.Event()
    own = jax.stages.Lowered.compile

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiles.set()
        assert goes_on.wait(60)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(_double, calls, cache)
        assert compiles.wait(60)
        second = threads.submit(_double, calls, cache)
        goes_on.set()
        assert first.result(60) is second.result(60)
    assert calls == [3]


def test_a_program_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this thread and in those that compile ahead; who waits for it hears of it."""
    cache = _cache()

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", fails)
        with pytest.raises(ValueError, match="no compiler"):
            _double([], cache)
        with pytest.raises(ValueError, match="no compiler"), compiling_ahead():
            _double([], cache)
    assert _double([], cache).run(jnp.ones(3)).tolist() == [2, 2, 2]
