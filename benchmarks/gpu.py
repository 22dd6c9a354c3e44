"""Decoding and prompts on a GPU beside transformers on the same GPU, for published shapes with random weights.

    python benchmarks/gpu.py --shape llama-3.2-1b --json-file benchmarks/results/gpu-llama-3.2-1b.json     # about six minutes
    python benchmarks/gpu.py --shape llama-3-8b --groups weights                                          # 30 GB of GPU memory
    python benchmarks/gpu.py --shape tiny --rounds 1                                                      # does the benchmark work?

Every subject has a process of its own, and they take turns (`hfax.bench`); ratios are of measurements of the same round, figures
are medians over the rounds. Greedy, no end-of-sequence token. transformers' rows need a torch build with CUDA.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpu import SHAPES as SMALL_SHAPES
from rich.console import Console
from shapes.published import fields_of

from hfax.bench import report as reports
from hfax.bench.run import Plan, run
from hfax.bench.spec import Case, SubjectSpec

GROUPS = ["weights", "peers"]
SHAPES = {name: fields_of(name) for name in ("llama-3.2-1b", "llama-3-8b", "qwen3-30b-a3b")} | {
    "tiny": SMALL_SHAPES["tiny"]
}


def groups(model: str, *, is_tiny: bool) -> dict[str, list[Plan]]:
    """What is measured of whom; the subjects of a group are in memory together and take turns."""
    decode = tuple(Case(kind="decode", batch_size=rows, tokens=64) for rows in ((1, 2) if is_tiny else (1, 8, 64)))
    prompts = tuple(Case(kind="prefill", context=length) for length in ((32,) if is_tiny else (512, 4096)))

    def plan(name: str, *cases: Case, kind: Any = "hfax", **options: Any) -> Plan:
        spec = SubjectSpec(name=name, kind=kind, model=model, dtype="bfloat16", **options)
        return Plan(subject=spec, cases=cases)

    return {
        "weights": [
            plan("hfax", *decode, *prompts),
            plan("hfax int8", *decode, quantization="int8"),
            plan("hfax int4", *decode, quantization="int4"),
        ],
        "peers": [
            plan("hfax", *decode, *prompts),
            plan("eager", *decode, *prompts, kind="eager"),
            plan("static", *decode[:2], kind="static", torch_backend="eager" if is_tiny else "inductor"),
        ],
    }


def main() -> int:
    """Measure and print; 1 when something has no figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--limit-s", type=float, default=300, help="longest load, compilation or run")
    parser.add_argument("--json-file", type=Path, help="write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hfax-bench-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(SHAPES[options.shape]))
        wanted = groups(str(config), is_tiny=options.shape == "tiny")
        results = {}
        for name in options.groups:
            results[name] = run(
                wanted[name],
                rounds=options.rounds,
                limit_s=options.limit_s,
                # the subjects share the GPU's memory
                environment={"HFAX_HOME": f"{folder}/{name}", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                tell=lambda message: print(message, file=sys.stderr, flush=True),
            )
            for table in reports.tables(results[name]):
                Console(width=150).print(table)
    entries = [entry for found in results.values() for entry in found["subjects"].values()]
    for entry in entries:
        entry["model"] = options.shape
    if options.json_file:
        options.json_file.write_text(json.dumps(results, indent=2) + "\n")
    return int(any("failure" in e or any("failure" in c for c in e["cases"].values()) for e in entries))


if __name__ == "__main__":
    raise SystemExit(main())
