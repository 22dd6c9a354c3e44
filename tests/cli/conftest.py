"""Checkpoints on disk, one cache for all tests of this folder, and `hfax` in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from command_line import Finished
from tiny_checkpoints import save_classifier, save_language_model

from hfax.cli.app import run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A causal language model with a chat template."""
    return save_language_model(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def base_checkpoint(tmp_path_factory) -> Path:
    """The same model, without a chat template."""
    return save_language_model(tmp_path_factory.mktemp("checkpoints") / "base", chat_template=None)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory) -> Path:
    """A sequence classifier with labels of its own."""
    return save_classifier(tmp_path_factory.mktemp("checkpoints") / "classifier")


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory) -> Path:
    """hfax's caches: programs that one test compiles serve the next."""
    return tmp_path_factory.mktemp("hfax_home")


@pytest.fixture(autouse=True)
def _clean_environment(shared_home, monkeypatch) -> None:
    monkeypatch.setenv("HFAX_HOME", str(shared_home))
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("HFAX_DEBUG", "FORCE_COLOR", "NO_COLOR", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hfax_here(capfd, monkeypatch) -> Callable[..., Finished]:
    """Run a command line in this process, with a pipe's text for stdin."""

    def call(*arguments: object, stdin: str = "") -> Finished:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        code = run([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return Finished(code, out, err)

    return call
