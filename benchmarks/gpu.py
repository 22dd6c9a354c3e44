"""Decoding and prompts on a GPU beside transformers on the same GPU, for published shapes with random weights.

    python benchmarks/gpu.py --shape llama-3.2-1b --json-file benchmarks/results/gpu-llama-3.2-1b.json     # about six minutes
    python benchmarks/gpu.py --shape llama-3-8b --groups weights                                          # 30 GB of GPU memory
    python benchmarks/gpu.py --shape tiny --rounds 1                                                      # does the benchmark work?

Every subject has a process of its own, and they take turns (`hfax.bench`); ratios are of measurements of the same round, figures
are medians over the rounds. Greedy, no end-of-sequence token. transformers' rows need a torch build with CUDA.
"""

from __future__ import annotations

import functools
from typing import Any

from cpu import SHAPES as SMALL_SHAPES
from shapes.published import fields_of
from turns import measure, parser_of

from hfax.bench.run import Plan
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
    options = parser_of(__doc__, SHAPES, "llama-3.2-1b", GROUPS).parse_args()
    return measure(
        options,
        SHAPES[options.shape],
        functools.partial(groups, is_tiny=options.shape == "tiny"),
        environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # the subjects share the GPU's memory
    )


if __name__ == "__main__":
    raise SystemExit(main())
