"""The instructions that XLA's GPU compiler and NVIDIA's assembler make of the kernels for packed weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_schedules.py"

MOST = {
    # instructions a weight: of one row, of eight
    "int8": (4.8, 5.2),
    "int8 in groups of 32": (7.3, 6.3),
    "int4": (3.8, 5.6),
    "int4 in groups of 32": (4.5, 6.9),
    "fp8": (5.9, 7.7),
    "fp4": (5.9, 8.2),
    "fp4 in groups of 16": (6.4, 9.4),
}


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("gpu_compiler", "gpu_assembler")
@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_a_weight_takes_few_instructions(gpu, tmp_path):
    written = tmp_path / "found.json"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--gpus", gpu, "--json-file", str(written)]
    subprocess.run(command, check=True, timeout=300)
    found = json.loads(written.read_text())
    assert {(row["weights"], row["rows"]) for row in found} == {(form, rows) for form in MOST for rows in (1, 8)}
    assert all(row["spilled_bytes"] == 0 for row in found)
    over = [row for row in found if row["instructions"] > MOST[row["weights"]][row["rows"] == 8]]
    assert over == []
