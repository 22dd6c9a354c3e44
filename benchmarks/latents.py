"""Decoding with latent attention beside eager transformers, on CPU: `python benchmarks/latents.py`. Two minutes.

Four dense layers of DeepSeek V3's kind (hidden size 1,024, 16 heads, a latent of 512), float32, random weights, a prompt of 2,000
tokens, batch 1. A token's time is the difference between answers of two lengths; hfax and transformers take turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from hfax import AutoModelForTPU

PROMPT, SHORT, LONG, ROUNDS = 2000, 8, 40, 3


def _config() -> transformers.DeepseekV3Config:
    return transformers.DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=4,
        max_position_embeddings=8192,
        dtype="float32",
    )


def _seconds(generate: Callable[..., Any], ids: Any, tokens: int) -> float:
    begin = time.perf_counter()
    np.asarray(generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None))
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json-file", type=Path)
    options = parser.parse_args()
    config = _config()
    ids = np.random.default_rng(0).integers(3, 31999, (1, PROMPT))
    ours = AutoModelForTPU.from_config(config)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    subjects = {"hfax": (ours.generate, ids), "transformers, eager": (theirs.generate, torch.from_numpy(ids))}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for name, (generate, given) in subjects.items():
        for tokens in (SHORT, LONG):
            _seconds(generate, given, tokens)  # compiles
        print(f"{name}: warm", flush=True)
    for _ in range(ROUNDS):
        for name, (generate, given) in subjects.items():
            short, long = (_seconds(generate, given, tokens) for tokens in (SHORT, LONG))
            times[name].append((long - short) / (LONG - SHORT) * 1e3)
    found = {name: round(float(np.median(each)), 1) for name, each in times.items()}
    ratio = float(np.median(np.divide(times["transformers, eager"], times["hfax"])))
    print(f"ms a token: {found}; hfax is {ratio:.1f} times as fast")
    if options.json_file:
        options.json_file.write_text(json.dumps({"ms a token": found, "ratio": round(ratio, 2)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
