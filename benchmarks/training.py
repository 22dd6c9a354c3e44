"""Steps of training a 100-million-parameter Llama beside eager torch, in turns: `python benchmarks/training.py`.

What must be done: 6 operations a parameter and token (2 forward, 4 backward). Each round has a process of its own for each way, in
turns, since XLA and torch do not share the cores well; of its steps the median counts, and of the rounds' ratios the median.
Written to results/training.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "tie_word_embeddings": False,
}
WAYS = ("hfax float32", "torch float32", "hfax bfloat16", "torch autocast", "torch bfloat16")
"""hfax holds float32 weights whatever it computes in, as torch does with autocast; "torch bfloat16" has nothing but bfloat16."""
RESULTS = Path(__file__).parent / "results" / "training.json"


def by_hfax(dtype: str, ids: np.ndarray) -> Callable[[], float]:
    """A step of hfax."""
    import optax
    from transformers import LlamaConfig

    from hfax import AutoModelForTPU, make_train_step

    model = AutoModelForTPU.from_config(LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]), dtype=dtype)
    step = make_train_step(model, optax.adamw(1e-4))
    held = [step.init(copy=False)]

    def run() -> float:
        held[0], metrics = step(held[0], {"input_ids": ids, "labels": ids})
        return float(metrics["loss"])

    return run


def by_torch(kind: str, ids: np.ndarray) -> Callable[[], float]:
    """A step of eager torch with torch's AdamW."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.from_numpy(ids)

    def run() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def measure(way: str, rows: int, length: int, steps: int) -> list[float]:
    """Seconds of each step, after two."""
    whose, kind = way.split()
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (rows, length))
    run = (by_hfax if whose == "hfax" else by_torch)(kind, ids)
    seconds = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return seconds[2:]


def in_process(way: str, options: Any) -> list[float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--way", way, "--rows", str(options.rows), "--length", str(options.length)]
    done = subprocess.run(
        [*command, "--steps", str(options.steps)], capture_output=True, text=True, check=False, env=os.environ
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.rows, options.length, options.steps)))
        return
    rounds = [{way: statistics.median(in_process(way, options)) for way in WAYS} for _ in range(options.rounds)]
    parameters = 100_449_920
    operations = 6 * parameters * options.rows * options.length
    table = {}
    for way in WAYS:
        seconds = statistics.median(each[way] for each in rounds)
        table[way] = {"step_s": round(seconds, 3), "gflop_per_s": round(operations / seconds / 1e9)}
        print(f"{way:16s} {seconds:6.2f} s a step  {operations / seconds / 1e9:5.0f} GFLOP/s")
    ratios = {}
    for own, other in (("float32", "float32"), ("bfloat16", "autocast"), ("bfloat16", "bfloat16")):
        ratio = statistics.median(each[f"torch {other}"] / each[f"hfax {own}"] for each in rounds)
        ratios[f"hfax {own} over torch {other}"] = round(ratio, 2)
        print(f"hfax {own} is {ratio:.2f} times as fast as torch {other}")
    found = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "rows": options.rows,
        "length": options.length,
        "parameters": parameters,
        "rounds": rounds,
        "median": table,
        "ratios": ratios,
    }
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
