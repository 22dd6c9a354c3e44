"""The examples of docstrings, run as doctests, with a small model at hand."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from transformers import AutoTokenizer

import hfax


def _examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for info in pkgutil.walk_packages(hfax.__path__, "hfax."):
        source = Path(info.module_finder.path, f"{info.name.rpartition('.')[2]}.py")  # pyright: ignore
        if info.ispkg:
            source = source.with_suffix("") / "__init__.py"
        if ">>>" in source.read_text():
            module = importlib.import_module(info.name)
            yield from (test for test in finder.find(module) if test.examples)


EXAMPLES = {test.name: test for test in _examples()}


def test_there_are_examples_and_none_is_skipped() -> None:
    assert len(EXAMPLES) >= 8
    skipped = [name for name, test in EXAMPLES.items() if any("SKIP" in e.source for e in test.examples)]
    assert skipped == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_it_says(name: str, tmp_path: Path) -> None:
    model = hfax.AutoModelForTPU.from_pretrained("demo", dtype="float32")
    names: dict[str, Any] = {
        **{name: getattr(hfax, name) for name in hfax.__all__},
        **{"hfax": hfax, "jax": jax, "np": np, "optax": optax, "nnx": nnx},
        "model": model,
        "tokenizer": AutoTokenizer.from_pretrained(model.folder, padding_side="left"),
        "ids": np.array([[5, 6, 7, 8]], np.int32),
        "folder": tmp_path / "run",
    }
    EXAMPLES[name].globs = names
    said: list[str] = []
    failed = doctest.DocTestRunner(verbose=False).run(EXAMPLES[name], out=said.append)
    assert failed.failed == 0, "".join(said)
