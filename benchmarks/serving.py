"""Continuous batching beside one request after another, llama.cpp's server and transformers' own batching.

    python benchmarks/serving.py --json-file benchmarks/results/serving.json                      # bfloat16 and int4 (Q4_0)
    python benchmarks/serving.py --shape small --requests 4 --rounds 1                            # does the benchmark work?

In turns, on a model's shape with random weights; then what a shared beginning of prompts saves. hfax's engine is called in the same
process, llama.cpp's server through HTTP with lists of token ids, with as many slots and one thread for each core (the first run
builds it: see `peers_cpu.py`). transformers takes minutes, so it has one turn, in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from llama_cpp import PACKAGE, LlamaServer, prepare_llama_cpp, write_gguf
from shapes.published import config_of

from hfax.bench.run import _machine

SHAPES: dict[str, dict[str, int]] = {  # fields that differ from Qwen3-0.6B's
    "qwen3-0.6b": {},
    "small": {
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
    },
}

WEIGHTS: dict[str, tuple[str | None, str]] = {"bfloat16": (None, "BF16"), "int4": ("int4", "Q4_0")}
"""hfax's quantization, and the type of llama.cpp's file, by the name of the weights."""
SLOTS = 32


def draw_requests(count: int, vocab: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 16 to 512 tokens and how many tokens to write after each, 16 to 128; the same in every run."""
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(100, vocab, n).tolist() for n in numbers.integers(16, 513, count)]
    return prompts, [int(n) for n in numbers.integers(16, 129, count)]


def by_engine(engine: Any, prompts: list[list[int]], counts: list[int]) -> float:
    """Seconds for all requests at once."""
    engine.pages.forget()  # what the turn before computed is not reused
    from hfax import SamplingParams

    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in counts]
    started = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - started
    assert [len(o.outputs[0].token_ids) for o in outputs] == counts
    return seconds


def one_by_one(model: Any, prompts: list[list[int]], counts: list[int]) -> float:
    """Seconds for the same through hfax's own generate, one after another."""
    started = time.perf_counter()
    for prompt, count in zip(prompts, counts, strict=True):
        model.generate(np.asarray([prompt], np.int32), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return time.perf_counter() - started


def by_transformers(shape: str, count: int) -> float:
    """Seconds for the same through transformers' continuous batching, in a process of its own: torch must not know torchax."""
    command = [sys.executable, __file__, "--shape", shape, "--requests", str(count), "--only-transformers"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return float(done.stdout.split()[-1])


def run_transformers(config: Any, prompts: list[list[int]], counts: list[int], page_size: int, pages: int) -> float:
    """The seconds of `by_transformers`."""
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    from transformers import ContinuousBatchingConfig

    options = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(counts)
    )
    batching = ContinuousBatchingConfig(
        page_size=page_size, num_blocks=pages, max_batch_tokens=512, use_cuda_graph=False
    )
    manager = reference.init_continuous_batching(generation_config=options, continuous_batching_config=batching)
    manager.start()
    started = time.perf_counter()
    try:
        for prompt, count in zip(prompts, counts, strict=True):
            manager.add_request(prompt, max_new_tokens=count)
        done = 0
        while done < len(prompts):
            result = manager.get_result(timeout=600)
            if result is None:
                raise RuntimeError("transformers' continuous batching gave nothing")
            done += result.is_finished()
        return time.perf_counter() - started
    finally:
        manager.stop(block=True)


def prefix_seconds(engine: Any, vocab: int) -> dict[str, float]:
    """Time to the first token of 16 requests that share 1,024 tokens, one after another."""
    from hfax import SamplingParams

    numbers = np.random.default_rng(1)
    shared = numbers.integers(100, vocab, 1024).tolist()
    firsts = []
    for _ in range(16):
        prompt = shared + numbers.integers(100, vocab, 16).tolist()
        started = time.perf_counter()
        for delta in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)):
            if delta.token_ids:
                firsts.append(time.perf_counter() - started)
                break
    later = statistics.median(firsts[1:])
    return {"first_s": firsts[0], "later_median_s": later, "later_max_s": max(firsts[1:]), "share": later / firsts[0]}


def measure(weights: str, options: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Seconds of each way to serve the requests, and ratios.

    Args:
        weights: a key of `WEIGHTS`.
        options: of the command line.
        config: of the model.
    """
    from hfax import AutoModelForTPU, Engine, EngineConfig

    quantization, file_type = WEIGHTS[weights]
    model = AutoModelForTPU.from_config(config, dtype="bfloat16", quantization=quantization)
    prompts, counts = draw_requests(options.requests, config.vocab_size)
    print(
        f"{weights}: {len(prompts)} requests, {sum(map(len, prompts))} prompt tokens, {sum(counts)} to write",
        flush=True,
    )
    engine = Engine(model, config=EngineConfig(max_num_seqs=SLOTS, max_num_batched_tokens=512, max_model_len=2048))
    engine.warm_up()
    one_by_one(model, prompts, [1] * len(prompts))  # every prompt's program is made before it is timed
    one_by_one(model, prompts[:4], counts[:4])
    with_transformers = weights == "bfloat16" and not options.without_transformers
    seconds: dict[str, list[float]] = {"engine": [], "one by one": []}
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        server = None if options.without_llama_cpp else stack.enter_context(llama_server(options, config, file_type))
        for turn in range(options.rounds):
            seconds["engine"].append(by_engine(engine, prompts, counts))
            if server is not None:
                seconds.setdefault("llama.cpp", []).append(server.seconds(prompts, counts))
            seconds["one by one"].append(one_by_one(model, prompts, counts))
            if with_transformers and turn == 0:
                seconds["transformers"] = [by_transformers(options.shape, options.requests)]
            print({name: [round(s, 2) for s in found] for name, found in seconds.items()}, flush=True)
        prefix = prefix_seconds(engine, config.vocab_size)
    own = seconds["engine"]
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(counts),
        "seconds": seconds,
        "output_tokens_per_second": sum(counts) / statistics.median(own),
        "times_as_fast_as": {  # of turns of the same round
            name: statistics.median(a / b for a, b in zip(each, own, strict=False))
            for name, each in seconds.items()
            if name != "engine"
        },
        "prefix": prefix,
    }


@contextlib.contextmanager
def llama_server(options: argparse.Namespace, config: Any, file_type: str) -> Iterator[LlamaServer]:
    """llama.cpp's server with a file of the same shape."""
    options.cache.mkdir(parents=True, exist_ok=True)
    llama = prepare_llama_cpp(options.cache.resolve(), "native")
    with tempfile.TemporaryDirectory(prefix="hfax-serving-") as folder:
        files = write_gguf(llama, config.to_dict(), Path(folder), [file_type], has_tokenizer=True)
        with llama.serve(files[file_type], slots=SLOTS, context=SLOTS * 640) as server:
            server.seconds([[5] * 16] * 2, [2, 2])  # untimed
            yield server


def main() -> None:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--without-llama-cpp", action="store_true")
    parser.add_argument("--cache", type=Path, default=Path("build/peers"), help="folder of llama.cpp")
    parser.add_argument("--json-file", type=Path, help="write the figures there")
    parser.add_argument("--only-transformers", action="store_true", help="what the run starts itself")
    options = parser.parse_args()
    config = config_of("qwen3-0.6b", **SHAPES[options.shape])
    if options.only_transformers:
        print(run_transformers(config, *draw_requests(options.requests, config.vocab_size), 32, 1024))
        return
    report: dict[str, Any] = {"shape": options.shape, "machine": _machine(), "llama.cpp": PACKAGE}
    for weights in options.weights:
        report[weights] = measure(weights, options, config)
        print(json.dumps(report[weights], indent=2), flush=True)
    if options.json_file:
        options.json_file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
