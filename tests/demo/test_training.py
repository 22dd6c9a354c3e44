"""The training script from end to end on a tiny shape."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.sweep

TINY = {
    "vocab-size": 400,
    "hidden-size": 32,
    "intermediate-size": 64,
    "num-hidden-layers": 2,
    "num-attention-heads": 4,
    "num-key-value-heads": 2,
    "context": 64,
    "short-window": 32,
    "long-share": 0.34,
    "tokens-per-step": 128,
    "steps": 3,
    "documents": 60,
}


@pytest.fixture(scope="module")
def trained(repository, tmp_path_factory):
    """A folder written by three steps of the script, as a user starts it."""
    folder = tmp_path_factory.mktemp("trained")
    options = [text for name, value in TINY.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "scripts/train_demo.py", "--out", str(folder), *options]
    command += ["--held-out-sample", str(folder / "held_out_sample.json")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(repository / "src"),
        "JAX_PLATFORMS": "cpu",
        "HFAX_HOME": str(folder / "home"),
    }
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_script_writes_a_folder_that_plain_transformers_runs(trained):
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert model.dtype == torch.bfloat16
    tokens = AutoTokenizer.from_pretrained(trained)("Return a", return_tensors="pt")
    assert model(**tokens).logits.shape[-1] == TINY["vocab-size"]


def test_script_records_what_it_did(trained):
    record = json.loads((trained / "training.json").read_text())
    assert record["steps"] == TINY["steps"]
    assert record["training_tokens"] == TINY["steps"] * TINY["tokens-per-step"]
    assert record["training_documents"] == TINY["documents"]
    assert {"jax", "torch", "transformers", "optax", "python"} <= record["versions"].keys()
    assert f"{record['held_out']['pages']['nats_per_token']:.3f}" in (trained / "README.md").read_text()


def test_held_out_sample_is_kept_for_the_tests(trained):
    sample = json.loads((trained / "held_out_sample.json").read_text())
    assert any(isinstance(text, str) for text in sample)
    assert any(isinstance(text, list) for text in sample)
