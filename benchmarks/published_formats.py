"""Decoding and prompts on CPU with checkpoints as they are published, beside bfloat16 and llama.cpp on the same GGUF file.

    python benchmarks/published_formats.py --json-file benchmarks/results/published-formats.json
    python benchmarks/published_formats.py --shape tiny --rounds 1                         # does the benchmark work?

The weights are random numbers of the shape: rounded as GPTQ and AWQ store them (4 bits, groups of 128), as DeepSeek stores FP8
(blocks of 128 x 128), and by llama.cpp's own program into GGUF files, which hfax and llama.cpp both run. Subjects take turns, a
process each; figures are medians over the rounds, ratios of measurements of the same round. Decoding: 32 tokens after 128; prompts:
512 tokens; batch 1; one thread for each core. Memory is that of a process which loads the checkpoint, without the pages of files,
less what it has after imports. The first run builds llama.cpp (see `peers_cpu.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpu import SHAPES
from llama_cpp import PACKAGE, prepare_llama_cpp, write_gguf

from hfax.bench.run import SubjectProcess, _machine
from hfax.bench.spec import Case, SubjectSpec
from hfax.bench.subject import as_json

GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")
PLAIN = "bfloat16"
"""The subject that others are compared with."""


MEMORY = """
import gc, json, sys, threading
import jax
from hfax import AutoModelForTPU

def anonymous():  # this process's own pages, without those of files
    (line,) = (line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10

AutoModelForTPU.from_pretrained("demo")  # imports, and what a first load sets up
gc.collect()
before, peak, done = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
model = AutoModelForTPU.from_pretrained(sys.argv[1], dtype="bfloat16")
done.set()
watcher.join()
arrays = jax.tree.leaves(model.params)
print(json.dumps({"held": sum(a.nbytes for a in arrays), "largest": max(a.nbytes for a in arrays), "peak": peak - before}))
"""
"""Loads a model in a process of its own: bytes of its weights, of the largest array, and at most taken meanwhile."""


def memory_of(model: Path) -> dict[str, int]:
    """What `MEMORY` finds."""
    command = [sys.executable, "-c", MEMORY, str(model)]
    with (
        tempfile.TemporaryDirectory() as home
    ):  # the demo has no record there, and is loaded with torch, as the model is
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "HFAX_HOME": home}
        found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(found.stdout.splitlines()[-1])


def write_checkpoints(shape: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Folders with the shape's random weights, by format."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
    import packers  # what the tests of the readers write with
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = folder / "config.json"
    config.write_text(json.dumps(shape))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    tensors, fields = packers.plain_tensors(folder / PLAIN, model)

    def pack_fp8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        values, scale, numbers = packers.fp8(weight, (128, 128))
        return {"weight": values, "weight_scale_inv": scale}, numbers

    four_bits = {"bits": 4, "group_size": 128}
    packed: dict[str, tuple[Any, dict[str, Any]]] = {
        "GPTQ": (
            lambda name, w: packers.gptq(w, size=128),
            four_bits | {"quant_method": "gptq", "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
        ),
        "AWQ": (
            lambda name, w: packers.awq(w, size=128),
            four_bits | {"quant_method": "awq", "zero_point": True, "version": "gemm"},
        ),
        "FP8": (
            pack_fp8,
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        ),
    }
    folders = {PLAIN: folder / PLAIN}
    for name, (pack, quantization) in packed.items():
        stored, _ = packers.quantized(tensors, pack)
        folders[name] = packers.write(folder / name, stored, fields, quantization)
    return folders


def measure(options: argparse.Namespace, shape: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Rates of every subject in tokens per second, by case, a list with one entry a round."""
    cases = [Case(kind="decode", tokens=32), Case(kind="prefill", context=64 if options.shape == "tiny" else 512)]
    llama = prepare_llama_cpp(options.cache, "native")
    files = write_gguf(llama, shape, folder, GGUF_TYPES)
    models = write_checkpoints(shape, folder) | files
    memory = {name: memory_of(model) for name, model in models.items()}
    rates: dict[str, dict[str, list[float]]] = {}
    bandwidths: list[float] = []
    weight_bytes: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        running: list[SubjectProcess] = []
        for name, model in models.items():
            print(f"loading {name}", file=sys.stderr, flush=True)
            spec = SubjectSpec(name=name, kind="hfax", model=str(model), dtype="bfloat16")
            process = SubjectProcess(
                spec, limit_s=600, environment={"HFAX_HOME": str(folder / "home"), "JAX_PLATFORMS": "cpu"}
            )
            stack.callback(process.close)
            process.reply()
            for case in cases:
                process.ask("prepare", as_json(case))
            weight_bytes[name] = process.ask("facts", "")["weight_bytes_a_step"]
            running.append(process)
        for index in range(options.rounds):
            print(f"round {index + 1} of {options.rounds}", file=sys.stderr, flush=True)
            for case in cases:
                for process in running:
                    process.ask("run", as_json(case))  # untimed: the process was idle while others ran
                    seconds = process.ask("run", as_json(case))["seconds"]
                    tokens = case.context if case.kind == "prefill" else case.tokens
                    rates.setdefault(process.spec.name, {}).setdefault(case.name, []).append(tokens / seconds)
                for kind, file in files.items():
                    rates.setdefault(f"llama.cpp {kind}", {}).setdefault(case.name, []).append(llama.bench(file, case))
                bandwidths.append(running[0].ask("limits", "")["read_bandwidth"])
    return {"rates": rates, "weight_bytes_a_step": weight_bytes, "read_bandwidth": bandwidths, "memory": memory}


def table(found: dict[str, Any]) -> str:
    """A Markdown table: medians; the ratios to bfloat16 and, for GGUF files, to llama.cpp, medians over the rounds."""
    rates = found["rates"]

    def times(subject: str, other: str, case: str) -> str:
        ratios = [a / b for a, b in zip(rates[subject][case], rates[other][case], strict=True)]
        return f"{statistics.median(ratios):.2f} times ({min(ratios):.2f}, {max(ratios):.2f})"

    lines = [
        "| checkpoint | MB a step | case | hfax, tokens/s | beside bfloat16 | llama.cpp, tokens/s | hfax beside llama.cpp |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for subject in (name for name in rates if not name.startswith("llama.cpp")):
        peer = f"llama.cpp {subject}"
        for case, each in rates[subject].items():
            cells = [subject, f"{found['weight_bytes_a_step'][subject] / 1e6:.0f}", case]
            cells += [f"{statistics.median(each):.1f}", times(subject, PLAIN, case)]
            if peer in rates:
                cells += [f"{statistics.median(rates[peer][case]):.1f}", times(subject, peer, case)]
            else:
                cells += ["", ""]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| checkpoint | weights, MB | largest array, MB | most memory while loading, MB |",
        "| --- | --- | --- | --- |",
    ]
    for subject, sizes in found["memory"].items():
        lines.append(
            f"| {subject} | {' | '.join(f'{sizes[name] / 1e6:.0f}' for name in ('held', 'largest', 'peak'))} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocabulary", type=int, help="another vocabulary size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cache", type=Path, default=Path("build/peers"), help="folder for llama.cpp's source and programs"
    )
    parser.add_argument("--json-file", type=Path, help="write the figures there")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    options.cache = options.cache.resolve()
    shape = SHAPES[options.shape] | {"num_hidden_layers": options.layers or SHAPES[options.shape]["num_hidden_layers"]}
    shape["vocab_size"] = options.vocabulary or shape["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="hfax-formats-") as folder:
        found = measure(options, shape, Path(folder))
    print(table(found))
    print(f"read bandwidth {min(found['read_bandwidth']) / 1e9:.0f} to {max(found['read_bandwidth']) / 1e9:.0f} GB/s")
    if options.json_file:
        report = {"machine": _machine(), "shape": shape, "llama.cpp": PACKAGE, **found}
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        options.json_file.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
