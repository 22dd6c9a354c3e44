"""The benchmark of packed weights' quality runs, and its figures are in order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quantization.py"


def test_fewer_bits_are_worse(tmp_path):
    few = ["--texts", "3", "--length", "64", "--calibration-rows", "16"]
    command = [sys.executable, SCRIPT, *few, "--json-file", tmp_path / "out.json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    full, int8, int4 = (results[name] for name in ("full", "int8", "int4"))
    assert full["logit_error"] == 0
    assert full["same_likeliest"] == 1
    assert 0 < int8["logit_error"] < int4["logit_error"] < 0.5
    assert 0 < int8["divergence_nats"] < int4["divergence_nats"]
    assert full["megabytes"] > int8["megabytes"] > int4["megabytes"]
    for method in ("gptq", "awq"):
        assert int8["logit_error"] < results[method]["logit_error"] < int4["logit_error"]
    cache = results["kv_cache"]
    assert abs(cache["perplexity"] / full["perplexity"] - 1) < 0.01
    assert 0 < abs(cache["perplexity_fp8"] / cache["perplexity"] - 1) < 0.05
    assert 0.8 < cache["same_likeliest"] < 1
    assert "perplexity" in done.stdout
