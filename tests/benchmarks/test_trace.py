"""The tracing benchmark on two layers, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trace.py"


def test_seconds_and_shares(tmp_path: Path) -> None:
    figures = tmp_path / "trace.json"
    command = [sys.executable, str(SCRIPT), "--layers", "2", "--repeats", "2", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(figures.read_text())
    assert "2 layers: first" in done.stdout
    assert len(found["seconds"]) == 2
    assert all(0 < s < 60 for s in found["seconds"])
    assert abs(sum(found["shares"].values()) - 1) < 0.01
    assert found["shares"]["jax"] > 0.05
