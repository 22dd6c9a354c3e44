"""Decoding speed at batch 1 beside what else a user could run, and the memory bandwidth measured in the same run.

    python benchmarks/decode.py --json benchmarks/results/decode.json       # both dtypes, two runs: about ten minutes
    python benchmarks/decode.py --dtype bfloat16 --cases hfax eager --runs 3
    python benchmarks/decode.py --small                                     # a tiny model: does the benchmark work?

Qwen3-0.6B's shape with random weights, a prompt of 64 tokens, 64 new ones, greedy, no end-of-sequence token. Every case of
`benchmarks/decode_cases.py` reads the same checkpoint in a process of its own, and the cases take turns, `--runs` times; figures
are medians. Tokens a second are of decoding alone: the seconds of a call that writes all tokens less those of one that writes only
the first. What a token must move is every weight once (the tied embedding once, as the head) and the cache. Caches of compiled
programs start empty and live as long as the run: first calls are those of the first process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from decode_cases import CASES, NEW_TOKENS, PROMPT_TOKENS

DTYPES = {"float32": 4, "bfloat16": 2}
"""Bytes of one number."""
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
COLUMNS = "tokens/s", "of limit", "hfax is", "first token", "first call", "trace", "compile", "peak GB", "tokens"


def read_bandwidth(num_bytes: int) -> float:
    """Bytes a second that all cores together read from memory: the best of two readers, a few times each.

    `memchr` for a byte that is not there and the scalar product of an array with itself; both run without Python's lock.
    """
    libc = ctypes.CDLL(None)
    libc.memchr.argtypes, libc.memchr.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), os.cpu_count() or 1)

    def seconds(read: Callable[[np.ndarray], object]) -> float:
        threads = [threading.Thread(target=read, args=(part,)) for part in parts]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    readers: list[Callable[[np.ndarray], object]] = [
        lambda part: libc.memchr(part.ctypes.data, 0x7F, part.nbytes),
        lambda part: np.dot(part, part),
    ]
    return sum(part.nbytes for part in parts) / min(seconds(read) for read in readers * 4)


def write_checkpoint(folder: Path, shape: dict[str, int], dtype: str) -> int:
    """Random weights from a fixed seed; returns the bytes of all weights, tied ones once.

    They are wide enough for the layers to outweigh the embedding; else the tied head repeats the last token for ever.
    """
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **shape, tie_word_embeddings=True, initializer_range=1.6 / shape["hidden_size"] ** 0.5
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def run_case(case: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One process: what it measured, or `failure`. Its whole group ends with it, torch.compile's workers too."""
    environment = os.environ | {"HFAX_HOME": f"{folder}/hfax", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    environment.setdefault("JAX_PLATFORMS", "cpu")
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, str(Path(__file__).with_name("decode_cases.py")), case, str(folder)]
    if options.small:
        command += ["--torch-backend", "eager"]
    process = subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=options.limit_s)
    except subprocess.TimeoutExpired:
        return {"failure": f"timed out after {options.limit_s:g} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        return {"failure": (stderr.strip().splitlines() or [f"ended with {process.returncode}"])[-1]}
    return json.loads(stdout.splitlines()[-1])


def run_dtype(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """All cases of one dtype, in turns."""
    shape = SMALL if options.small else SHAPE
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in options.cases}
    bandwidths = []
    with tempfile.TemporaryDirectory(prefix="decode-") as folder:
        weight_bytes = write_checkpoint(Path(folder), shape, dtype)
        for _ in range(options.runs):
            for case, done in runs.items():
                if any("failure" in run for run in done):
                    continue
                bandwidths.append(read_bandwidth(1 << 24 if options.small else 1 << 30))
                print(f"{dtype} {case} ...", file=sys.stderr, flush=True)
                done.append(run_case(case, Path(folder), options))
    cache_bytes = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * DTYPES[dtype]
    moved = weight_bytes + cache_bytes * (PROMPT_TOKENS + NEW_TOKENS // 2)
    bandwidth = max(bandwidths)
    cases = {case: summarize(done, bandwidth / moved) for case, done in runs.items()}
    ours = cases.get("hfax", {}).get("tokens_per_second")
    for case in cases.values():
        if ours and "failure" not in case:
            case["hfax_over_it"] = round(ours / case["tokens_per_second"], 2)
    return {
        "dtype": dtype,
        "bytes_a_token": moved,
        "read_gb_per_second": round(bandwidth / 1e9, 1),
        "read_gb_per_second_every_time": [round(each / 1e9, 1) for each in bandwidths],
        "limit_tokens_per_second": round(bandwidth / moved, 2),
        "cases": cases,
    }


def summarize(runs: list[dict[str, Any]], limit: float) -> dict[str, Any]:
    """Medians over the runs; seconds of the first call, of tracing and of compiling as in the first run, which found no caches."""
    failed = next((run for run in runs if "failure" in run), None)
    if failed:
        return failed
    hashes = {run["tokens_sha256"] for run in runs}
    if len(hashes) > 1:
        return {"failure": "greedy tokens differ from run to run"}
    rates = [run["tokens_per_second"] for run in runs]
    rate = statistics.median(rates)
    first = runs[0]
    return {
        "tokens_per_second": round(rate, 3),
        "tokens_per_second_every_run": [round(each, 3) for each in rates],
        "share_of_bandwidth": round(rate / limit, 3),
        "first_token_seconds": round(statistics.median(run["first_token_seconds"] for run in runs), 4),
        "first_call_seconds": first["first_call_seconds"],
        "first_call_seconds_every_run": [run["first_call_seconds"] for run in runs],
        "load_seconds": first["load_seconds"],
        "trace_seconds": first.get("trace_seconds"),
        "compile_seconds": first.get("compile_seconds"),
        "peak_gb": max(run["peak_gb"] for run in runs),
        "num_tokens": first["num_tokens"],
        "num_distinct_tokens": first["num_distinct_tokens"],
        "tokens_sha256": first["tokens_sha256"],
    }


def print_table(result: dict[str, Any]) -> None:
    """One line a case."""
    print(
        f"\n{result['dtype']}: {result['bytes_a_token'] / 1e9:.3g} GB a token, {result['read_gb_per_second']} GB/s read, "
        f"limit {result['limit_tokens_per_second']} tokens/s"
    )
    print(f"{'case':8}" + "".join(f"{column:>13}" for column in COLUMNS))
    for name, case in result["cases"].items():
        if "failure" in case:
            print(f"{name:8}  {case['failure']}")
            continue
        times = f"{case['hfax_over_it']:.2f} x" if "hfax_over_it" in case else "-"
        trace, compiling = (
            f"{s:.2f} s" if s is not None else "-" for s in (case["trace_seconds"], case["compile_seconds"])
        )
        cells = (
            f"{case['tokens_per_second']:.2f}",
            f"{case['share_of_bandwidth']:.3f}",
            times,
            f"{case['first_token_seconds']:.3f} s",
            f"{case['first_call_seconds']:.1f} s",
            trace,
            compiling,
            f"{case['peak_gb']:.2f}",
            case["tokens_sha256"][:8],
        )
        print(f"{name:8}" + "".join(f"{cell:>13}" for cell in cells), flush=True)


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    names = "torch", "transformers", "jax", "torchax"
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def main() -> int:
    """Measure and print; 1 when a case has no figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=int, default=2, help="processes of each case")
    parser.add_argument("--limit-s", type=float, default=240, help="seconds for one process of one case")
    parser.add_argument(
        "--small", action="store_true", help="a tiny model; torch.compile captures but generates no code"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.runs < 1 or options.limit_s <= 0:
        parser.error("--runs and --limit-s must be positive")
    transformers.utils.logging.disable_progress_bar()
    results = []
    for dtype in options.dtype:
        results.append(run_dtype(dtype, options))
        print_table(results[-1])
    if options.json:
        report = {
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "versions": versions(),
            "small": options.small,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS,
            "runs": options.runs,
            "results": results,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(any("failure" in case for result in results for case in result["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
