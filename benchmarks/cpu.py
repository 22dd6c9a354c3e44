"""Decoding, prompts and speculative decoding on CPU beside what else a user could run, for two shapes with random weights.

    python benchmarks/cpu.py --shape qwen3-0.6b --json-file benchmarks/results/cpu-qwen3-0.6b.json     # about fifteen minutes
    python benchmarks/cpu.py --shape llama-3.2-1b --json-file benchmarks/results/cpu-llama-3.2-1b.json
    python benchmarks/cpu.py --shape tiny --rounds 1                                                   # does the benchmark work?

Every subject has a process of its own, and they take turns (`hfax.bench`); ratios are of measurements of the same round, figures
are medians over the rounds. Batch 1, context 128 unless said otherwise; greedy, no end-of-sequence token.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from shapes.published import fields_of
from turns import measure, parser_of

from hfax.bench.run import Plan
from hfax.bench.spec import Case, SubjectSpec

GROUPS = ["weights", "peers", "recipe", "context", "speculation"]
SHAPES = {name: fields_of(name) for name in ("qwen3-0.6b", "llama-3.2-1b")}
SHAPES["tiny"] = SHAPES["qwen3-0.6b"] | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def groups(model: str, *, is_tiny: bool, torch_backend: str) -> dict[str, list[Plan]]:
    """What is measured of whom; the subjects of a group are in memory together and take turns."""
    long = 256 if is_tiny else 4096
    decode = Case(kind="decode", tokens=32)
    batch = Case(kind="decode", batch_size=8, tokens=32)
    prompt = Case(kind="prefill", context=64 if is_tiny else 512)
    near, far = (Case(kind="decode", context=n, capacity=2 * long, tokens=32) for n in (128, long))
    repeating = Case(kind="decode", context=64, capacity=256, tokens=96, repeats=True)
    speculative = Case(kind="decode", context=64, capacity=256, tokens=96, repeats=True, draft_tokens=7)

    def plan(name: str, *cases: Case, kind: Any = "hfax", dtype: str = "bfloat16", **options: Any) -> Plan:
        spec = SubjectSpec(name=name, kind=kind, model=model, dtype=dtype, torch_backend=torch_backend, **options)
        return Plan(subject=spec, cases=cases)

    few = Case(kind="decode", tokens=32 if is_tiny else 4)
    return {
        "weights": [
            plan("hfax", decode, batch),
            plan("hfax float32", decode, dtype="float32"),
            plan("hfax int8", decode, batch, quantization="int8"),
            plan("hfax int4", decode, batch, quantization="int4"),
        ],
        "peers": [
            plan("hfax", decode, prompt),
            plan("eager", decode, prompt, kind="eager"),
            plan("static", decode, kind="static"),
        ],
        "recipe": [plan("hfax", few), plan("recipe", few, kind="recipe")],
        "context": [plan("hfax", near, far)],
        "speculation": [
            plan("hfax", repeating, speculative),
            plan("hfax float32", repeating, speculative, dtype="float32"),
        ],
    }


def main() -> int:
    """Measure and print; 1 when something has no figure."""
    parser = parser_of(__doc__, SHAPES, "qwen3-0.6b", GROUPS)
    parser.add_argument("--torch-backend", default="inductor", help="of torch.compile")
    options = parser.parse_args()
    of_shape: dict[str, Any] = {"is_tiny": options.shape == "tiny", "torch_backend": options.torch_backend}
    return measure(
        options,
        SHAPES[options.shape],
        functools.partial(groups, **of_shape),
        environment={"JAX_PLATFORMS": "cpu"},
        lines_of=ratios,
    )


def ratios(found: dict[str, Any]) -> list[str]:
    """What the table does not show: how one case stands to another."""
    own = found["subjects"]["hfax"]["cases"]
    lines = []

    def rate(name: str, case: str) -> float | None:
        return found["subjects"].get(name, {}).get("cases", {}).get(case, {}).get("tokens_per_second")

    plain, batch = rate("hfax", "decode 1 x 128"), rate("hfax", "decode 8 x 128")
    if plain and batch:
        lines.append(f"batch 8 gives {batch / plain:.2f} times the tokens of batch 1")
    for kind in ("int8", "int4", "float32"):
        if plain and (other := rate(f"hfax {kind}", "decode 1 x 128")):
            lines.append(f"{kind} decodes {other / plain:.2f} times as fast as bfloat16")
    far = [
        c
        for c in own.values()
        if c["kind"] == "decode" and c["capacity"] and not c["draft_tokens"] and c["tokens"] == 32
    ]
    if len(far) == 2 and all(c.get("bytes_a_step") for c in far):
        grown = far[1]["median_seconds"] / far[0]["median_seconds"]
        bytes_grown = far[1]["bytes_a_step"] / far[0]["bytes_a_step"]
        lines.append(
            f"from context {far[0]['context']} to {far[1]['context']} a step takes {grown:.3f} times as long; "
            f"it moves {bytes_grown:.3f} times the bytes"
        )
    for name in ("hfax", "hfax float32"):
        cases = found["subjects"].get(name, {}).get("cases", {})
        drafted = next((c for c in cases.values() if c.get("draft_tokens") and c.get("seconds")), None)
        plainly = next(
            (c for c in cases.values() if c["tokens"] == 96 and not c["draft_tokens"] and c.get("seconds")), None
        )
        if drafted and plainly:
            same = drafted["tokens_written"] == plainly["tokens_written"]
            gain = plainly["median_seconds"] / drafted["median_seconds"]
            lines.append(
                f"{name}: speculative decode {gain:.2f} times as fast; the same tokens: {'yes' if same else 'no'}"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
