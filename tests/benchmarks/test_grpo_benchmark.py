"""The benchmark of GRPO runs, and its figures are in order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "grpo.py"


def test_the_reward_rises(tmp_path):
    few = ["--rounds", "1", "--steps", "20", "--learning-rate", "3e-4"]
    command = [sys.executable, SCRIPT, *few, "--json-file", tmp_path / "out.json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    rewards = found["learning"]["reward"]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert set(found["tokens_per_s"]) == {"hfax", "transformers"}
    assert found["learning"]["logp_difference"] < 0.1
