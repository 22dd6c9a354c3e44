"""Decoding speed at batch 1, beside eager transformers and the memory bandwidth measured in the same process.

    JAX_PLATFORMS=cpu python benchmarks/decode.py --dtype bfloat16

Qwen3-0.6B's shape with random weights, a prompt of 64 tokens, 64 new ones, greedy, no end-of-sequence token. Each figure is the
median over the runs of (seconds for all new tokens less seconds for one) / (new tokens - 1). Transformers' static cache with
torch.compile and the plain torchax recipe are not measured here yet.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from hfax import AutoModelForTPU
from hfax.phases import listen


def read_bandwidth() -> float:
    """Bytes a second that one float32 matrix-vector product over 512 MB reads; the best of ten."""
    matrix = jnp.ones((2048, 65536), jnp.float32)
    vector = jnp.ones((65536,), jnp.float32)
    product = jax.jit(lambda m, v: m @ v)
    product(matrix, vector).block_until_ready()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        product(matrix, vector).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return matrix.nbytes / min(seconds)


def tokens_per_second(generate: Callable[[int], object], new_tokens: int, runs: int) -> float:
    """Of decoding alone; one warm-up run first."""
    generate(new_tokens)
    each = []
    for _ in range(runs):
        took = []
        for count in (1, new_tokens):
            start = time.perf_counter()
            generate(count)
            took.append(time.perf_counter() - start)
        each.append((took[1] - took[0]) / (new_tokens - 1))
    return 1 / statistics.median(each)


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    config = transformers.Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
    prompt = torch.from_numpy(np.random.default_rng(0).integers(0, 150000, (1, 64)))
    phases: dict[str, float] = {}
    with listen(
        lambda event: phases.update({f"{event.name} {event.detail}": event.seconds}) if event.seconds else None
    ):
        model = AutoModelForTPU.from_config(config, dtype=options.dtype)
        model.generation_config.eos_token_id = None
        ours = tokens_per_second(
            lambda n: model.generate(prompt, max_new_tokens=n, do_sample=False), options.new_tokens, options.runs
        )
    size = sum(p.nbytes for p in model.params.values())
    bandwidth = read_bandwidth()
    model.params = {}
    eager = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
    eager.generation_config.eos_token_id = None
    theirs = tokens_per_second(
        lambda n: eager.generate(prompt, max_new_tokens=n, do_sample=False), options.new_tokens, options.runs
    )
    result = {
        "dtype": options.dtype,
        "hfax_tokens_per_second": round(ours, 2),
        "eager_transformers_tokens_per_second": round(theirs, 2),
        "ratio": round(ours / theirs, 2),
        "read_bandwidth_gb_per_second": round(bandwidth / 1e9, 1),
        "share_of_bandwidth": round(ours * size / bandwidth, 3),
        "phases_seconds": {name: round(seconds, 2) for name, seconds in phases.items()},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
