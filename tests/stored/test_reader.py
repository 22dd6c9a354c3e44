"""Reading weights ahead: every order of asking gets every tensor, in bounded memory, and closing ends it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from hfax.load.source import resolve_checkpoint
from hfax.stored import reader as reading
from hfax.stored.reader import WeightReader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_models.tiny_llama().save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.mark.parametrize("most", [1, 40_000, 1 << 30])
def test_tensors_come_in_any_order_and_few_are_held(folder: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOST_BYTES", most)
    for seed in range(5):
        reader = WeightReader(resolve_checkpoint(folder))
        assert len(reader.files) > 2
        names = [(index, name) for index, file in enumerate(reader.files) for name in file.tensors]
        random.Random(seed).shuffle(names)
        reader.start()
        for index, name in names:
            np.testing.assert_array_equal(reader.read(index, name), reader.files[index].read(name))
            largest = max(info.end - info.begin for file in reader.files for info in file.tensors.values())
            assert 0 <= reader._held <= max(most, 0) + 2 * largest
        assert reader._held == 0


def test_closing_lets_waiting_threads_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOST_BYTES", 1)
    reader = WeightReader(resolve_checkpoint(folder))
    reader.start()
    futures = list(reader._found.values())
    reader.close()
    assert all(future.cancelled() or future.exception(timeout=60) is not None for future in futures)
