"""GRPO on the demo model: how fast it learns a format, and completions by the engine beside transformers' `generate`.

    python benchmarks/grpo.py --json-file benchmarks/results/grpo.json      # about a minute

The reward is 1 for a completion that is one sentence of at most thirty characters and ends there, else 0. Completions: 64 of up to
24 tokens, eight for each of eight prompts, sampled; hfax's engine, whose weights are replaced before each turn as in training, and
transformers' `generate` (trl's default), in turns, in the checkpoint's bfloat16 and with as many threads.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfax import AutoModelForTPU, GRPOLoss, GRPOTrainer, SamplingParams, TrainingArguments
from hfax.demo import demo_folder
from hfax.train.rollouts import Writer, prompt_rows

PROMPTS = (
    "Return", "Return a", "Return the", "Return True if", "Read", "Write", "Create", "Set the", "Get the", "Remove", "Add",
    "Check if", "Open", "Close", "Call", "Convert", "Parse", "Find", "Send", "Start", "Stop the", "Update", "Load", "Print",
    "Compare", "Copy", "Raise", "Test if", "Make a", "Split", "Join", "Sort",
)  # fmt: skip
MAX_TOKENS, GENERATIONS = 24, 8


def is_short_sentence(completions: list[str], **_: Any) -> list[float]:
    """The reward."""
    return [1.0 if re.fullmatch(r"[^\n.]{1,30}\.", text) else 0.0 for text in completions]


def learn(steps: int, learning_rate: float) -> dict[str, Any]:
    """The reward of each step, and seconds."""
    model = AutoModelForTPU.from_pretrained("demo")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=64,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            progress=False,
        )
        trainer = GRPOTrainer(
            model,
            is_short_sentence,
            args,
            [{"prompt": p} for p in PROMPTS],
            loss=GRPOLoss(max_completion_length=MAX_TOKENS),
        )
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": steps,
        "learning_rate": learning_rate,
        "seconds": seconds,
        "step_s": statistics.median(line["step_s"] for line in lines if "step_s" in line),
        "reward": [round(line["reward"], 3) for line in lines],
        "logp_difference": statistics.mean(line["sampling/sampling_logp_difference/mean"] for line in lines),
    }


def writers() -> dict[str, Callable[[], int]]:
    """By subject, a function that writes 64 completions and returns their number of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    tokenizer.padding_side = "left"
    rows = prompt_rows([{"prompt": prompt} for prompt in PROMPTS[:GENERATIONS]], tokenizer, max_length=None)
    writer = Writer(AutoModelForTPU.from_pretrained("demo"), tokenizer, longest=MAX_TOKENS + 16, max_num_seqs=64)
    plain = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype="auto")
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    end = plain.generation_config.eos_token_id

    def by_engine() -> int:
        params = [SamplingParams(n=GENERATIONS, max_tokens=MAX_TOKENS, seed=i, logprobs=0) for i in range(len(rows))]
        return sum(len(each.token_ids) for each in writer.write(rows, params))

    def by_transformers() -> int:
        with torch.no_grad():
            found = plain.generate(
                **batch, do_sample=True, top_k=0, max_new_tokens=MAX_TOKENS, num_return_sequences=GENERATIONS
            )
        written = found[:, batch["input_ids"].shape[1] :]
        ends = (written == end).int()
        return int(((ends.cumsum(1) - ends) == 0).sum())  # up to and with the end of each

    return {"hfax": by_engine, "transformers": by_transformers}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json-file", type=Path)
    options = parser.parse_args(arguments)
    speeds: dict[str, list[float]] = {}
    subjects = writers()
    for turn in range(options.rounds + 1):  # the first compiles
        for name, write in subjects.items():
            started = time.perf_counter()
            count = write()
            if turn:
                speeds.setdefault(name, []).append(count / (time.perf_counter() - started))
    found = {
        "tokens_per_s": {name: [round(speed, 1) for speed in each] for name, each in speeds.items()},
        "ratio": statistics.median(a / b for a, b in zip(speeds["hfax"], speeds["transformers"], strict=True)),
        "learning": learn(options.steps, options.learning_rate),
        "threads": torch.get_num_threads(),
    }
    text = json.dumps(found, indent=1)
    if options.json_file is not None:
        options.json_file.write_text(text + "\n")
    print(text)
    return found


if __name__ == "__main__":
    main()
