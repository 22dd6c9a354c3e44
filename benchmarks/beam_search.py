"""Beam search of hfax and of plain transformers (eager torch) on this machine's CPU, in turns, with random weights.

    python benchmarks/beam_search.py [--shape marian bart-large] [--new-tokens 64] [--turns 5]

Prints the median seconds of a `generate` of 4 beams. Both libraries read the same weights and prompts, and no token ends a text, so
both write all new tokens. hfax compiles before the first turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
import transformers

from hfax import AutoModelForTPU

_SIZES: dict[str, dict[str, int]] = {
    "marian": {"d_model": 512, "layers": 6, "heads": 8, "ffn_dim": 2048, "vocab_size": 58101},
    "bart-large": {"d_model": 1024, "layers": 12, "heads": 16, "ffn_dim": 4096, "vocab_size": 50265},
}


def _make(shape: str) -> Any:
    size = _SIZES[shape]
    cls, config_class = {
        "marian": (transformers.MarianMTModel, transformers.MarianConfig),
        "bart-large": (transformers.BartForConditionalGeneration, transformers.BartConfig),
    }[shape]
    sides = {
        f"{side}_{name}": size[of]
        for side in ("encoder", "decoder")
        for name, of in (("layers", "layers"), ("attention_heads", "heads"), ("ffn_dim", "ffn_dim"))
    }
    torch.manual_seed(0)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return cls(config_class(d_model=size["d_model"], vocab_size=size["vocab_size"], **sides, **ids)).eval()


def main() -> None:
    """Print a row for each shape and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(_SIZES), default=list(_SIZES))
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    print("| shape | prompts | transformers, s | hfax, s | times as fast |\n| --- | --- | --- | --- | --- |")
    for shape in args.shape:
        plain = _make(shape)
        with tempfile.TemporaryDirectory() as folder:
            plain.save_pretrained(folder)
            ours = AutoModelForTPU.from_pretrained(folder)
        for batch_size in args.batch_size:
            numbers = np.random.default_rng(0).integers(3, 50_000, (batch_size, args.prompt_tokens))
            prompt = torch.from_numpy(numbers)
            options: dict[str, Any] = {"num_beams": 4, "max_new_tokens": args.new_tokens, "do_sample": False}
            options |= {"attention_mask": torch.ones_like(prompt), "eos_token_id": None, "pad_token_id": 1}
            seconds: dict[str, list[float]] = {"transformers": [], "hfax": []}
            ours.generate(prompt, **options)
            for _ in range(args.turns):
                for name, model in (("transformers", plain), ("hfax", ours)):
                    started = time.perf_counter()
                    found = model.generate(prompt, **options)
                    seconds[name].append(time.perf_counter() - started)
                    assert found.shape == (batch_size, 1 + args.new_tokens)
            theirs, mine = (statistics.median(seconds[name]) for name in ("transformers", "hfax"))
            print(f"| {shape} | {batch_size} | {theirs:.2f} | {mine:.2f} | {theirs / mine:.2f} |", flush=True)


if __name__ == "__main__":
    main()
