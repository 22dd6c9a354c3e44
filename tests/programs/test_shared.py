"""Programs of other machines: used if the manifest vouches for them, and never opened otherwise."""

from __future__ import annotations

import json
import pickle
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from hfax import AutoModelForTPU
from hfax.errors import HfaxError, InvalidInputError
from hfax.home import hfax_home
from hfax.phases import listen
from hfax.programs.program_files import noting_uses, read_program
from hfax.programs.shared import VARIABLE, SharedFolder, find_shared, names_in, share, shared_names

_IDS = [[5, 9, 17, 33, 60]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("model"), tiny_models.random_model(tiny_models.tiny_llama_config()))


def _generate(folder: Path) -> tuple[list[int], int]:
    """Token ids, and the number of programs that were compiled for them."""
    compiled: list[Any] = []
    with listen(lambda event: compiled.append(event) if event.name == "compile" and event.seconds else None):
        ids = AutoModelForTPU.from_pretrained(folder).generate(_IDS, max_new_tokens=4, do_sample=False)
    return np.asarray(ids)[0].tolist(), len(compiled)


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "shared")
        return
    url = f"memory://{uuid.uuid4().hex}/shared"
    yield url


def _shared(folder: Path, place: str) -> tuple[SharedFolder, list[int]]:
    with noting_uses() as used:
        ids, _ = _generate(folder)
    assert {path.suffix for path in used} == {".program", ".json", ".data"}
    return share(names_in(hfax_home(), used), place), ids


def test_a_machine_with_an_empty_cache_compiles_nothing(
    home: Path, folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, ids = _shared(folder, place)
    shutil.rmtree(home)
    assert _generate(folder)[1] == 2
    shutil.rmtree(home)
    monkeypatch.setenv(VARIABLE, str(shared))
    assert _generate(folder) == (ids, 0)
    monkeypatch.delenv(VARIABLE)
    assert _generate(folder) == (ids, 0)  # they were kept
    assert shared_names("programs/") == []


def test_a_cache_that_cannot_be_written_reads_shared_programs_too(
    home: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, ids = _shared(folder, str(tmp_path / "shared"))
    monkeypatch.setenv(VARIABLE, str(shared))
    monkeypatch.setenv("HFAX_HOME", "/proc/nothing")
    assert _generate(folder) == (ids, 0)


class _Opened(Exception):
    pass


class _Bomb:
    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise _Opened


def test_files_that_are_not_what_the_manifest_says_are_not_opened(
    home: Path, folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, ids = _shared(folder, place)
    monkeypatch.setenv(VARIABLE, str(shared))
    bomb = pickle.dumps(_Bomb())
    names = shared_names("programs/")
    assert len(names) == 2
    for name in [*names, "programs/other.program"]:
        if "://" in place:
            from hfax.object_storage import RemoteFolder

            RemoteFolder(place).write(name, bomb)
        else:
            (Path(place) / name).write_bytes(bomb)
    shutil.rmtree(home)
    assert _generate(folder) == (ids, 2)
    assert find_shared("programs/other.program") is None
    assert read_program(home / "programs" / "other.program", lambda data: pickle.loads(data)) is None


def test_a_manifest_with_another_digest_is_refused(
    home: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, _ = _shared(folder, str(tmp_path / "shared"))
    manifest = tmp_path / "shared" / "programs.json"
    content = json.loads(manifest.read_text())
    content["files"]["programs/other.program"] = "0" * 64
    manifest.write_text(json.dumps(content))
    shutil.rmtree(home)
    monkeypatch.setenv(VARIABLE, str(shared))
    with pytest.raises(InvalidInputError, match="has the digest"):
        _generate(folder)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "shared"))
    with pytest.raises(InvalidInputError, match="without the digest"):
        _generate(folder)


def test_a_folder_that_is_not_reached_costs_a_warning(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'gone'}#sha256={'0' * 64}")
    assert _generate(folder)[1] == 2
    assert caplog.text.count("are not used") == 1


def test_programs_are_added_only_to_one_s_own(
    home: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one := tmp_path / "one").write_bytes(b"1")
    (two := tmp_path / "two").write_bytes(b"2")
    first = share({"programs/1.program": one}, place)
    with pytest.raises(InvalidInputError, match="holds shared programs already"):
        share({"programs/2.program": two}, place)
    with pytest.raises(InvalidInputError, match="has the digest"):
        share({"programs/2.program": two}, f"{place}#sha256={'0' * 64}")
    second = share({"programs/2.program": two}, str(first))
    monkeypatch.setenv(VARIABLE, f" {second} ,")
    assert (find_shared("programs/1.program"), find_shared("programs/2.program")) == (b"1", b"2")


def test_a_place_that_cannot_be_written_is_named(home: Path, tmp_path: Path) -> None:
    (one := tmp_path / "one").write_bytes(b"1")
    with pytest.raises(HfaxError, match="could not be written to /proc/nothing"):
        share({"programs/1.program": one}, "/proc/nothing")
