"""Runs of every recipe that are killed at random moments go on with the same losses, evaluations, texts and weights."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_models import random_model, save, tiny_llama_config
from transformers import AutoTokenizer

from hfax.demo import demo_folder

STEPS = 40
SPEEDS = ("step_s", "tokens_per_s", "peak_share")
QUESTION = [{"role": "user", "content": "What is a list?"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "chats": [{"messages": [*QUESTION, {"role": "assistant", "content": f"It has {n} items."}]} for n in range(37)],
    "pairs": [
        {
            "prompt": QUESTION,
            "chosen": [{"role": "assistant", "content": f"A sequence of {n}."}],
            "rejected": [{"role": "assistant", "content": "A number."}],
        }
        for n in range(37)
    ],
    "prompts": [{"prompt": f"Return {n}"} for n in range(9)],
}
RECIPES: dict[str, dict[str, Any]] = {
    "sft": {"eval_data": "chats.jsonl", "eval_steps": 10, "load_best_model_at_end": True, "neftune_noise_alpha": 5.0},
    "streaming": {"streaming": True, "packing": True, "buffer_size": 10, "max_length": 64},
    "dpo": {"recipe": "dpo", "train_data": "pairs.jsonl", "lora": {"r": 4, "lora_dropout": 0.1}},
    "orpo": {"recipe": "orpo", "train_data": "pairs.jsonl", "gradient_accumulation_steps": 2},
    "kto": {"recipe": "kto", "train_data": "pairs.jsonl"},
    "reward": {"recipe": "reward", "train_data": "pairs.jsonl", "optim": "muon"},
    "distill": {
        "recipe": "distill",
        "teacher_model_name_or_path": "model",
        "alpha": 0.5,
        "lmbda": 0.5,
        "max_new_tokens": 8,
    },
    "grpo": {
        "recipe": "grpo",
        "train_data": "prompts.jsonl",
        "reward_funcs": "rewards.py:count",
        "num_generations": 4,
        "max_completion_length": 8,
        "num_iterations": 2,
        "beta": 0.1,
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data, a model of one layer with the demo's tokenizer, and a reward function."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": len(tokenizer), "attention_dropout": 0.1}
    save(tmp_path / "model", random_model(tiny_llama_config(**sizes, **ends)), tokenizer)
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def count(completions, **_):\n    return [c.count('e') for c in completions]\n"
    )
    return tmp_path


@pytest.mark.sweep
@pytest.mark.parametrize("kind", RECIPES)
def test_a_run_that_is_killed_goes_on_as_if_it_was_not(kind: str, folder: Path) -> None:
    def start(name: str) -> subprocess.Popen[str]:
        recipe = {
            "model": "model",
            "train_data": "chats.jsonl",
            "output_dir": name,
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "max_length": 128,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "save_steps": 4,
            "dtype": "float32",
            **RECIPES[kind],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(recipe))
        command = [sys.executable, "-m", "hfax", "train", f"{name}.yaml", "--resume", "--json"]
        return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def finish(process: subprocess.Popen[str]) -> None:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error

    finish(start("whole"))
    chance = random.Random(os.environ.get("HFAX_TESTS_SEED", kind))
    at, delay = chance.randrange(1, STEPS * 2 // 3), chance.random() / 10
    process, deadline = start("killed"), time.monotonic() + 300
    while _last_step(folder / "killed") < at:
        assert process.poll() is None, f"it ended before step {at}: {process.communicate()[1]}"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    finish(start("killed"))
    for read in (_metrics, _completions, _weights):
        assert read(folder / "killed") == read(folder / "whole")
    assert len(_metrics(folder / "whole")) >= STEPS


def _last_step(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").is_file() else []
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["step"] if whole else 0


def _metrics(run: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in SPEEDS} for line in lines]


def _completions(run: Path) -> str | None:
    file = run / "completions.jsonl"
    return file.read_text() if file.is_file() else None


def _weights(run: Path) -> bytes:
    [file] = (run / "model").glob("*.safetensors")
    return file.read_bytes()
