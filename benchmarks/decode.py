"""Decoding speed at batch 1 beside what else a user could run, and the memory bandwidth measured in the same run.

    JAX_PLATFORMS=cpu python benchmarks/decode.py --json benchmarks/results/decode.json    # both dtypes, about ten minutes
    JAX_PLATFORMS=cpu python benchmarks/decode.py --small                                  # a smoke test of the benchmark

Qwen3-0.6B's shape with random weights, a prompt of 64 tokens, 64 new ones, greedy, no end-of-sequence token. Every case
(`benchmarks/decode_cases.py`) loads the same checkpoint in a process of its own; the cases take turns, `--rounds` times. Decoding
alone counts: seconds for all new tokens less seconds for one, after a warm-up call. The bytes that each token must move are those
of every weight once (the embedding table once, as the head) and of the cache.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
import transformers

PROMPT_TOKENS = 64
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
"""Qwen3-0.6B."""
SMALL = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 199}


def read_bandwidth() -> float:
    """Bytes a second that two threads read from 1 GB of memory (numpy sums of 64-bit words); the best of five."""
    array = np.ones(1 << 27, np.int64)
    halves = np.array_split(array, os.cpu_count() or 2)
    best = 0.0
    for _ in range(5):
        threads = [threading.Thread(target=half.sum) for half in halves]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, array.nbytes / (time.perf_counter() - start))
    return best


def peak_bytes() -> int:
    """Of this process; getrusage would count its parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def write_checkpoint(folder: Path, shape: dict[str, int], dtype: str) -> int:
    """Random weights from a fixed seed; returns the bytes of all weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**shape, tie_word_embeddings=True, initializer_range=0.05)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def measure(case: str, folder: Path, new_tokens: int) -> dict[str, object]:
    """In this process: load, warm up, time."""
    from decode_cases import CASES

    phases: dict[str, float] = {}
    if case == "hfax":
        from hfax.phases import _listeners

        _listeners.set((lambda e: phases.update({f"{e.name} {e.detail}": round(e.seconds, 2)}) if e.seconds else None,))
    prompt = torch.from_numpy(np.random.default_rng(0).integers(3, 190, (1, PROMPT_TOKENS)))
    start = time.perf_counter()
    generate = CASES[case](folder, prompt)
    loaded = time.perf_counter()
    tokens = generate(new_tokens)
    first_call = time.perf_counter() - loaded
    if len(tokens) != new_tokens:
        raise RuntimeError(f"{case} wrote {len(tokens)} tokens, not {new_tokens}")
    generate(1)
    took = []
    for count in (1, new_tokens):
        begin = time.perf_counter()
        generate(count)
        took.append(time.perf_counter() - begin)
    return {
        "case": case,
        "tokens_per_second": (new_tokens - 1) / (took[1] - took[0]),
        "load_seconds": round(loaded - start, 2),
        "first_call_seconds": round(first_call, 2),
        "peak_gb": round(peak_bytes() / 1e9, 2),
        "phases_seconds": phases,
        "tokens": tokens,
    }


def run_dtype(dtype: str, options: argparse.Namespace) -> dict[str, object]:
    """All cases of one dtype, in turns."""
    shape = SMALL if options.small else SHAPE
    runs: dict[str, list[dict]] = {case: [] for case in options.cases}
    failures: dict[str, str] = {}
    bandwidths = []
    with tempfile.TemporaryDirectory(prefix="hfax-decode-") as name:
        weight_bytes = write_checkpoint(Path(name), shape, dtype)
        for _ in range(options.rounds):
            bandwidths.append(read_bandwidth())
            for case in options.cases:
                command = [
                    sys.executable,
                    __file__,
                    "--case",
                    case,
                    "--folder",
                    name,
                    "--new-tokens",
                    str(options.new_tokens),
                ]
                environment = os.environ | {"HFAX_HOME": f"{name}/programs"}
                try:
                    done = subprocess.run(
                        command, capture_output=True, text=True, timeout=options.limit_s, env=environment
                    )
                except subprocess.TimeoutExpired:
                    failures[case] = f"took longer than {options.limit_s} s"
                    continue
                if done.returncode:
                    failures[case] = done.stderr.strip().splitlines()[-1]
                else:
                    runs[case].append(json.loads(done.stdout.splitlines()[-1]))
    itemsize = 2 if dtype == "bfloat16" else 4
    cache_bytes = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * itemsize
    moved = weight_bytes + cache_bytes * (PROMPT_TOKENS + options.new_tokens // 2)
    bandwidth = statistics.median(bandwidths)
    result: dict[str, object] = {
        "dtype": dtype,
        "read_bandwidth_gb_per_second": round(bandwidth / 1e9, 1),
        "bytes_a_token": moved,
        "limit_tokens_per_second": round(bandwidth / moved, 2),
        "failures": failures,
    }
    print(
        f"\n{dtype}: {moved / 1e9:.2f} GB a token, {bandwidth / 1e9:.1f} GB/s, limit {bandwidth / moved:.1f} tokens/s"
    )
    print(f"{'case':10}{'tokens/s':>10}{'of limit':>10}{'hfax is':>10}{'first call':>12}{'peak GB':>9}")
    ours = statistics.median(r["tokens_per_second"] for r in runs["hfax"]) if runs.get("hfax") else float("nan")
    for case, each in runs.items():
        if not each:
            print(f"{case:10}{failures.get(case)}")
            continue
        rate = statistics.median(r["tokens_per_second"] for r in each)
        first, peak = each[0]["first_call_seconds"], max(r["peak_gb"] for r in each)
        print(f"{case:10}{rate:10.2f}{rate * moved / bandwidth:10.3f}{ours / rate:9.2f}x{first:11.1f}s{peak:9.2f}")
        result[case] = {
            "tokens_per_second": round(rate, 3),
            "every_round": [round(r["tokens_per_second"], 3) for r in each],
            "share_of_bandwidth": round(rate * moved / bandwidth, 3),
            "hfax_over_it": round(ours / rate, 2),
            "first_call_seconds": first,
            "peak_gb": peak,
            "phases_seconds": each[0]["phases_seconds"],
            "tokens": each[0]["tokens"],
        }
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--cases", nargs="+", default=["hfax", "eager", "static", "recipe"])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=400)
    parser.add_argument("--small", action="store_true", help="a tiny model, to see whether the benchmark works")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.folder, options.new_tokens)))
        return
    results = [run_dtype(dtype, options) for dtype in options.dtypes]
    if options.json:
        machine = {"cores": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
