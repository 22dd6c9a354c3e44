"""docs/recipes.md: memory and machines of published models, by the arithmetic of `hfax plan --no-compile`.

    python scripts/model_recipes.py

reads docs/recipes.toml and benchmarks/shapes, and writes the page, in some minutes. `tests/docs/test_recipes.py` compares a row.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[1]
CONTEXT = 8192
MACHINES = {
    "v5e": ("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16"),
    "v6e": ("v6e:1x1", "v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:8x16"),
    "H100": ("h100:1", "h100:2", "h100:4", "h100:8", "h100:2x8", "h100:4x8"),
}
"""By kind, from small to large; the first that fits is named."""
WEIGHTS = {None: "bfloat16", "int8": "int8", "int4": "int4"}
INTRODUCTION = f"""# Recipes by model

What a model needs, computed from its published configuration by `hfax plan --no-compile`: one sequence of {CONTEXT:,} tokens. For
each kind of device the smallest machine that fits, and the limit of its speed in tokens a second: the time in which weights and
cache are read once and messages are sent, without anything else. No figure of an accelerator has been measured. With the compilers
installed, `hfax plan` also counts temporaries and collectives.

```sh
hfax generate Qwen/Qwen3-0.6B "Once upon a time" --quantization int8
hfax plan ./config.json --machines v5e:2x4,v6e:2x2,h100:8 --batch 1,8 --context 8192
```

| model | weights | GB | {" | ".join(MACHINES)} |
| --- | --- | --- | {" | ".join("---" for _ in MACHINES)} |
"""


def row(model: dict[str, Any], quantization: Any) -> str:
    """A line of the table."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "shapes"))
    from published import config_of  # pyright: ignore[reportMissingImports]

    from hfax.planning.plan import make_plans

    cells, size = [], 0.0
    for machines in MACHINES.values():
        options = {"context": CONTEXT, "quantization": quantization, "compiles": False}
        plans = make_plans(model["shape"], config_of(model["shape"]), machines, **options)  # made as they are asked for
        fitting = None
        for plan in plans:
            size = size or plan.weight_bytes * plan.num_devices / 1e9  # the first machine has one device
            if plan.fits:
                fitting = plan
                break
        cells.append("none of these" if fitting is None else f"{fitting.machine}, {fitting.tokens_per_s:,.0f}")
    return f"| {model['checkpoint']} | {WEIGHTS[quantization]} | {_rounded(size)} | {' | '.join(cells)} |"


def _rounded(gigabytes: float) -> str:
    return f"{gigabytes:,.0f}" if gigabytes >= 100 else f"{gigabytes:.3g}"


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    data = tomllib.loads((ROOT / "docs" / "recipes.toml").read_text())
    lines = [row(model, quantization) for model in data["model"] for quantization in WEIGHTS]
    measured = [f"- {model['checkpoint']}: {model['measured']}." for model in data["model"] if "measured" in model]
    others = [f"| {other['family']} | {other['way']} |" for other in data["other"]]
    (ROOT / "docs" / "recipes.md").write_text(
        INTRODUCTION
        + "\n".join(lines)
        + "\n\nMachines are written as `hfax plan` takes them: chips by row and column, or GPUs, with hosts before an x.\n\n"
        + "## Measured\n\n"
        + "\n".join(measured)
        + "\n\nWith random weights of the published shapes: [Performance](performance.md).\n\n"
        + "## Other families\n\n| | |\n| --- | --- |\n"
        + "\n".join(others)
        + "\n\nTheir memory is not computed here. `hfax doctor MODEL` says a model's size, and whether it fits where it runs;\n"
        + "[Supported models](support.md) lists every architecture.\n"
    )


if __name__ == "__main__":
    main()
