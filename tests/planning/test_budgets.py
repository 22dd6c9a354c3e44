"""Programs of large models within their budgets: no copies of weights, no gathers for each token, few temporaries and messages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODELS = ("llama-3-8b", "llama-3-70b", "qwen3-30b-a3b", "gemma-3-12b", "deepseek-v3", "qwen2.5-vl-7b")
TPUS = {"v5e": ("v5e:1x1", "v5e:2x4"), "v6e": ("v6e:1x1", "v6e:2x4"), "tpu7x": ("tpu7x:1x1x1", "tpu7x:2x2x1")}
GPUS = "h100:1", "h100:8", "b200:1", "b200:8"


def over_budget(model, machines, folder):
    """What is over its budget, by a process of its own, since the compilers keep their memory; and the number of programs."""
    written = folder / "found.json"
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(BENCHMARKS / "budgets.py"),
        "--models",
        model,
        "--machines",
        *machines,
    ]
    done = subprocess.run([*command, "--json-file", str(written)], capture_output=True, text=True, timeout=550)
    assert written.exists(), done.stderr[-3000:]
    found = json.loads(written.read_text())
    over = [f"{row['machine']} {row['program']}: {text}" for row in found for text in row["excesses"]]
    assert done.returncode == bool(over)
    return over, len(found)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("model", MODELS)
def test_programs_for_gpus(model, tmp_path):
    over, count = over_budget(model, GPUS, tmp_path)
    assert over == []
    assert count == 2 * 4


@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize("chip", TPUS)
@pytest.mark.parametrize("model", MODELS)
def test_programs_for_tpus(model, chip, tmp_path):
    over, count = over_budget(model, TPUS[chip], tmp_path)
    assert over == []
    assert count == 2 * 2
