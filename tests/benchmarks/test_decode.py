"""The decoding benchmark on a tiny model, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "decode.py"


def run(tmp_path, *options):
    """Exit status, what was printed, and the JSON's results of float32."""
    figures = tmp_path / "decode.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--small",
        "--dtype",
        "float32",
        "--runs",
        "1",
        "--json",
        str(figures),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, stdin=subprocess.DEVNULL)
    assert figures.exists(), done.stderr
    (result,) = json.loads(figures.read_text())["results"]
    return done.returncode, done.stdout, result


@pytest.mark.slow
def test_all_four_cases_write_the_same_greedy_tokens_in_float32(tmp_path):
    status, table, result = run(tmp_path)
    cases = result["cases"]
    assert list(cases) == ["hfax", "eager", "static", "recipe"]
    assert {name: case.get("failure") for name, case in cases.items()} == dict.fromkeys(cases)
    assert status == 0
    assert {case["num_tokens"] for case in cases.values()} == {64}
    assert len({case["tokens_sha256"] for case in cases.values()}) == 1, cases
    assert cases["hfax"]["num_distinct_tokens"] > 16  # a model that repeats itself would agree with anything
    for name, case in cases.items():
        assert case["tokens_per_second"] > 0
        share = case["tokens_per_second"] / result["limit_tokens_per_second"]
        assert case["share_of_bandwidth"] == pytest.approx(share, abs=1e-3)
        assert case["tokens_sha256"][:8] in next(line for line in table.splitlines() if line.startswith(name))
    assert cases["hfax"]["trace_seconds"] > 0
    assert cases["hfax"]["compile_seconds"] > 0


def test_case_that_exceeds_its_limit_is_reported_as_timed_out(tmp_path):
    status, table, result = run(tmp_path, "--cases", "eager", "--limit-s", "0.1")
    assert status == 1
    assert result["cases"] == {"eager": {"failure": "timed out after 0.1 s"}}
    assert "timed out after 0.1 s" in table
