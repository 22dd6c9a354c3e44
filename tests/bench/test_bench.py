"""`hfax bench` as a user runs it, on small models, and its arithmetic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
from torch_free import WITHOUT_TORCH, run_script

from hfax.bench import run as runs
from hfax.bench.spec import Case

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}


def bench(*arguments):
    return processes.run(["-m", "hfax", "bench", *arguments], timeout_s=540)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.sweep
def test_a_shape_with_random_weights_beside_its_peers(config, tmp_path):
    done = bench(
        *(config, "--dtype", "float32", "--compare", "--rounds", 2, "--tokens", 32, "--contexts", 32, "--limit-s", 300),
        *("--prompt-lengths", 64, "--json-file", tmp_path / "b.json", "--plot", tmp_path / "b.png"),
        *("--profile", tmp_path / "profile"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "b.json").read_text())
    assert list(report["subjects"]) == ["hfax", "eager", "static", "recipe"]
    texts = set()
    for name, entry in report["subjects"].items():
        decode, prefill = entry["cases"]["decode 1 x 32"], entry["cases"]["prefill 1 x 64"]
        assert len(decode["seconds"]) == 2
        assert decode["tokens_per_second"] == pytest.approx(32 / decode["median_seconds"])
        assert prefill["tokens_per_second"] > 0
        texts.add(tuple(decode["tokens_written"][:32]))
        if name != "hfax":
            assert decode["first_is_times_faster"] > 0
    assert len(texts) == 1  # all wrote the same greedy text
    hfax = report["subjects"]["hfax"]
    assert hfax["cases"]["decode 1 x 32"]["compile_seconds"] > 0
    assert 0 < hfax["cases"]["decode 1 x 32"]["share_of_bandwidth"] < 2
    assert report["read_bandwidth"] > 1e9
    assert report["warm_start_seconds"] > 0
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert "static" in done.stdout


@pytest.mark.sweep
def test_a_subject_that_fails_is_reported_and_the_others_go_on(tmp_path):
    broken = tmp_path / "config.json"
    broken.write_text(json.dumps(CONFIG | {"model_type": "no-such-model"}))
    done = bench(broken, "--dtype", "float32", "--rounds", 1, "--tokens", 2, "--contexts", 8, "--prompt-lengths", 8)
    assert done.returncode == 1
    assert "hfax: ValueError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--batch-sizes", "1,x"], "--batch-sizes"),
        (["demo", "--contexts", "0"], "--contexts"),
        (["./nothing/config.json"], "File not found"),
    ],
)
def test_bad_options_are_named(arguments, message):
    done = bench(*arguments)
    assert done.returncode == 1
    assert message in done.stderr


_SUBJECT = """
from hfax.bench.own import HfaxSubject
from hfax.bench.spec import Case, SubjectSpec
subject = HfaxSubject(SubjectSpec(name="hfax", kind="hfax", model="demo", dtype="float32"))
cases = Case(kind="decode", context=8, tokens=2), Case(kind="prefill", context=8)
print([subject.prepare(case)()[1] for case in cases])
"""


def test_a_second_process_starts_as_a_users_does():
    """Without torch and transformers, or its seconds would not be those of a warm start."""
    assert run_script(_SUBJECT) == run_script(WITHOUT_TORCH + _SUBJECT)


def test_case_names_tell_cases_apart():
    cases = [
        Case(kind="decode"),
        Case(kind="decode", batch_size=2),
        Case(kind="decode", capacity=512),
        Case(kind="decode", capacity=512, repeats=True),
        Case(kind="decode", capacity=512, repeats=True, draft_tokens=3),
        Case(kind="prefill"),
    ]
    assert len({c.name for c in cases}) == len(cases)


def test_shares_are_of_the_bandwidth_around_the_run():
    case = {
        **{
            "kind": "decode",
            "batch_size": 1,
            "context": 98,
            "capacity": 0,
            "tokens": 10,
            "draft_tokens": 0,
            "repeats": False,
        },
        **{"seconds": [1.0, 2.0], "read_bandwidth": [2000.0, 500.0]},
    }
    entry = {"weight_bytes_a_step": 100 - 105 * 0.5, "cache_bytes_a_token": 0.5}
    runs._summarize(case, entry, {}, {"cases": {}}, is_first=True)
    assert case["bytes_a_step"] == pytest.approx(100)
    assert case["share_of_bandwidth_each_round"] == pytest.approx([0.5, 1.0])
    assert case["tokens_per_second"] == pytest.approx(10 / 1.5)


@pytest.mark.sweep
def test_the_cpu_benchmark_runs_on_a_tiny_shape(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "cpu.py"
    command = [sys.executable, str(script), "--shape", "tiny", "--rounds", "1", "--json-file", str(tmp_path / "b.json")]
    command += ["--groups", "weights", "context", "speculation"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=540, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stderr
    assert "int4 decodes" in done.stdout
    assert "hfax float32: speculative decode" in done.stdout
    assert "the same tokens: yes" in done.stdout.split("hfax float32: speculative")[1]
    assert set(json.loads((tmp_path / "b.json").read_text())) == {"weights", "context", "speculation"}
