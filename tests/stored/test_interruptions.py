"""A first start that is killed, or that several processes make at once, leaves a cache with which the next one works."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_models

import hfax

_KILLS = 8
_FULL_BYTES = 100_000
_SCRIPT = """
import json, sys
from hfax import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.argv[1])
print(json.dumps(model.generate([[5, 9, 17, 33, 60]], max_new_tokens=6).tolist()))
"""


def _begin(folder: Path, home: Path, before: str = "") -> subprocess.Popen[str]:
    source = str(Path(hfax.__file__).parents[1])
    variables = {**os.environ, "HFAX_HOME": str(home), "PYTHONPATH": source, "HFAX_CPU_KERNELS": "0"}
    command = [sys.executable, "-c", before + _SCRIPT, str(folder)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _result(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("llama"), tiny_models.tiny_llama())


def test_two_processes_fill_one_cache_at_once(folder: Path, tmp_path: Path) -> None:
    first, second = (_result(process) for process in [_begin(folder, tmp_path), _begin(folder, tmp_path)])
    assert first == second == _result(_begin(folder, tmp_path))


def test_a_first_start_with_a_full_disk_works_and_leaves_nothing_half_written(folder: Path, tmp_path: Path) -> None:
    """The programs, of 240 KB and more each, end in the middle with an OSError; the record fits."""
    full = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({_FULL_BYTES}, {_FULL_BYTES}))"
    first = _begin(folder, tmp_path / "home", before=full)
    out, err = first.communicate(timeout=300)
    assert first.returncode == 0, err
    assert err.count("program not cached") == 2
    left = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left if "kernels" not in path.parts} == {"starts"}
    expected = json.loads(out)
    assert _result(_begin(folder, tmp_path / "home")) == expected
    assert _result(_begin(folder, tmp_path / "home")) == expected


@pytest.mark.sweep
def test_a_start_that_is_killed_at_any_moment_leaves_a_cache_that_works(folder: Path, tmp_path: Path) -> None:
    """Most of the moments are near the end of a first start, where it writes."""
    began = time.perf_counter()
    expected = _result(_begin(folder, tmp_path / "whole"))
    seconds, moments = time.perf_counter() - began, random.Random(0)
    num_killed = 0
    for number in range(_KILLS):
        share = moments.random() if number % 4 == 0 else 0.6 + 0.4 * moments.random()
        process = _begin(folder, home := tmp_path / str(number))
        time.sleep(share * seconds)
        process.kill()
        process.communicate()
        num_killed += process.returncode != 0
        assert _result(_begin(folder, home)) == expected
        assert _result(_begin(folder, home)) == expected
    assert num_killed > _KILLS // 2
