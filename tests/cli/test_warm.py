"""`hfax warm`: what it makes, `hfax generate` and `hfax serve` find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import servers
from command_line import run_process

_PROMPT = "Return a new list"
_STORED = "All of these programs were on the disk already."


def test_generate_compiles_nothing_afterwards_and_doctor_knows_why(tmp_path: Path) -> None:
    """With the same options; others make programs of their own."""
    home = {"HFAX_HOME": str(tmp_path)}
    sampled = ("--max-new-tokens", "24", "--temperature", "0.7", "--stop", "END", "--kv-cache-dtype", "fp8")
    first = run_process("warm", "demo", "--prompt-lengths", "16", *sampled, "--json", **home)
    assert first.code == 0, first.err
    assert len(json.loads(first.out)["compiled"]) == 2
    assert _STORED in run_process("warm", "demo", "--prompt-lengths", "9", *sampled, **home).out
    done = run_process("generate", "demo", _PROMPT, *sampled, "--seed", "1", **home)
    assert (done.code, "compile" in done.err, "trace" in done.err) == (0, False, False)
    assert "2 of 2 programs on the disk can be used" in run_process("doctor", "demo", "--programs", **home).out
    other = run_process("doctor", "demo", "--programs", **home, XLA_FLAGS="--xla_cpu_enable_fast_math=false").out
    assert "0 of 2 programs" in other
    assert "differs in XLA_FLAGS" in other
    greedy = run_process("generate", "demo", _PROMPT, "--max-new-tokens", "24", "--temperature", "0", **home)
    assert "compile" in greedy.err


@pytest.mark.sweep
def test_a_server_compiles_nothing_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path))
    options = ("--max-model-len", "128", "--max-num-seqs", "4")
    done = run_process("warm", "demo", "--for-server", *options, HFAX_HOME=str(tmp_path))
    assert done.code == 0, done.err
    assert "programs compiled and stored" in done.out
    made = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    with servers.started("demo", *options) as (_, client, _lines):
        body = {"model": "demo", "prompt": _PROMPT, "max_tokens": 5, "temperature": 0.5}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == made
