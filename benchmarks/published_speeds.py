"""Estimated times of compiled programs beside figures that others published, or that were measured here.

    python benchmarks/published_speeds.py --kind gpu --json-file benchmarks/results/published-speeds-gpu.json   # hfax[plan-gpu]
    python benchmarks/published_speeds.py --kind tpu --json-file benchmarks/results/published-speeds-tpu.json   # hfax[tpu]

Nothing runs: hfax's own programs for the same model, machine, batch and lengths are compiled and timed as `hfax plan` does it. The
published programs are others' (but for the H200's), so a ratio compares a program's estimate with somebody's server. Ratios are of
times: below 1, the estimate is faster. A quarter of an hour for TPUs, two minutes for GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from shapes.published import config_of

from hfax.planning.chips import GPUS, kind_of
from hfax.planning.program_time import ProgramTime, estimate
from hfax.planning.topology import compile_for
from hfax.train.memory_plan import make_train_plans

H200 = "hfax on an H200, 2026-11-26, results/gpu-h200.json"
GPT_FAST = "gpt-fast's README: A100 limited to 330 W, prompts of 5 tokens, 200 new ones"
SGLANG = "sglang-jax's benchmark of 2025-09-12, mean time between tokens"
LATENCY = "memory: small matrices reach less of the bandwidth, and sums over A100s in a cube mesh take longer than one message"
SERVER = "no term of it: the server's host, a few ms a step; and memory, its attention over 64 sequences"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A published figure.

    Args:
        what: what was measured.
        source: whose figure it is.
        model: a file of `shapes`.
        machine: as for `hfax plan`.
        batch: sequences at a time.
        prompt: tokens of a prompt.
        context: tokens of a sequence when it is read.
        quantization: of the weights.
        seconds: the figure, as a time.
        of: what of the estimates is compared: "decode" or "prefill", or a function of the seconds of one prompt and of a step.
        term: what explains a difference of more than 20%.
    """

    what: str
    source: str
    model: str
    machine: str
    batch: int = 1
    prompt: int = 128
    context: int = 256
    quantization: str | None = None
    seconds: float
    of: str | Callable[[float, float], float] = "decode"
    term: str = ""


def _served(new: int, batch: int) -> Callable[[float, float], float]:
    """Seconds a request of an engine that reads prompts one by one and decodes `new` tokens of `batch` sequences at a time."""
    return lambda prefill, step: prefill + new * step / batch


_1B: dict[str, Any] = {"source": H200, "model": "llama-3.2-1b", "machine": "h200:1"}
_7B: dict[str, Any] = {"source": GPT_FAST, "model": "llama-2-7b", "prompt": 5, "context": 205, "term": LATENCY}
_QWEN: dict[str, Any] = {"source": SGLANG, "machine": "v6e:2x2", "prompt": 1024, "context": 1536, "term": SERVER}
OLDER = "launches: measured on 2026-11-26 with programs whose attention took more kernels a step"
FIGURES = (
    Figure(what="a step of 1", seconds=1.011e-3, **_1B),
    Figure(what="a step of 8", batch=8, seconds=1.153e-3, **_1B),
    Figure(what="a step of 64", batch=64, seconds=1.636e-3, **_1B),
    Figure(what="a step of 1, int8", quantization="int8", seconds=0.962e-3, term=OLDER, **_1B),
    Figure(what="a step of 1, cache of 8,192", prompt=4096, context=8192, seconds=1.428e-3, **_1B),
    Figure(what="a prompt of 512, the GPU's time", of="prefill", prompt=512, context=1024, seconds=2.9e-3, **_1B),
    Figure(
        what="a prompt of 4,096",
        of="prefill",
        prompt=4096,
        context=8192,
        seconds=19.0e-3,
        term="the host: about 2.4 ms, as in the prompt of 512; operations: products reach less than the largest ones do",
        **_1B,
    ),
    Figure(what="104.9 tokens/s", machine="a100:1", seconds=1 / 104.9, **_7B),
    Figure(what="155.6 tokens/s, int8", machine="a100:1", quantization="int8", seconds=1 / 155.58, **_7B),
    Figure(what="168.8 tokens/s", machine="a100:2", seconds=1 / 168.84, **_7B),
    Figure(what="254.0 tokens/s", machine="a100:4", seconds=1 / 254.02, **_7B),
    Figure(what="328.4 tokens/s", machine="a100:8", seconds=1 / 328.43, **_7B),
    Figure(what="62.5 tokens/s", machine="a100:8", seconds=1 / 62.5, **_7B | {"model": "llama-2-70b"}),
    Figure(what="5.99 ms a token", model="qwen3-8b", batch=8, seconds=5.99e-3, **_QWEN),
    Figure(what="11.11 ms a token", model="qwen3-8b", batch=64, seconds=11.11e-3, **_QWEN),
    Figure(what="18.29 ms a token", model="qwen3-32b", batch=8, seconds=18.29e-3, **_QWEN),
    Figure(what="29.48 ms a token", model="qwen3-32b", batch=64, seconds=29.48e-3, **_QWEN),
    Figure(
        what="9.94 ms a token",
        model="llama-3-8b",
        batch=16,
        seconds=9.94e-3,
        **_QWEN | {"source": "sglang-jax, Llama-3.1-8B, 16 at once; lengths are not given, 1,024 and 1,024 assumed"},
    ),
    Figure(
        what="8,249 tokens/s",
        source="JetStream-PyTorch, 2024-04-24: batch 128, a cache of 2,048, prompts and answers of at most 1,024 each",
        model="llama-3-8b",
        machine="v5e:2x4",
        batch=128,
        prompt=1024,
        context=1536,
        seconds=1024 / 8249,
        of=_served(1024, 128),
        term="lengths: those of the requests are not given, 1,024 and 1,024 assumed; the host",
    ),
    Figure(
        what="11.5 requests/s",
        source="tpu-inference, pull request 1006, Llama-3.1-8B: 1,199 tokens in and 123 out on average, 1,000 requests",
        model="llama-3-8b",
        machine="v6e:1x1",
        batch=48,
        prompt=1199,
        context=1322,
        seconds=1 / 11.5,
        of=_served(123, 48),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A published share of the peak in training."""

    what: str
    source: str
    machine: str
    rows: int
    share: float
    term: str = ""


TRAININGS = (
    Training(
        what="45.5% of the peak",
        source="MaxText's tiers of models: Llama 3.1 8B, sequences of 8,192, 256 v6e; 16 are estimated",
        machine="v6e:4x4",
        rows=48,
        share=0.4546,
    ),
    Training(
        what="37% of the peak",
        source="torchax, Llama-3-8B, 4 v6e, about 7,000 tokens/s a chip",
        machine="v6e:2x2",
        rows=4,
        share=0.37,
        term="their program: attention and rematerialisation differ",
    ),
)
LENGTH = 8192
_LAYERS = (2, 4)
"""A layer takes as long as any other: the difference between these is what two take."""


def compare(figure: Figure) -> dict[str, Any]:
    """Both programs' estimates beside the figure."""

    def compiled(name: str, batch: int, prompt: int) -> ProgramTime:
        prefill, decode = compile_for(
            config_of(figure.model),
            figure.machine,
            batch_size=batch,
            prompt_length=prompt,
            capacity=figure.context,
            quantization=figure.quantization,  # pyright: ignore[reportArgumentType]
        )
        program = {"prefill": prefill, "decode": decode}[name]
        return estimate(program.hlo, figure.machine, is_loop=name == "decode")

    if isinstance(figure.of, str):
        time = compiled(figure.of, figure.batch, figure.prompt)
        return _row(figure, figure.model, figure.seconds, time.seconds, time)
    # the prompts of a whole batch in one program would need more memory than there is
    prompt, step = compiled("prefill", 1, figure.prompt), compiled("decode", figure.batch, 64)
    return _row(figure, figure.model, figure.seconds, figure.of(prompt.seconds, step.seconds), step)


def compare_training(figure: Training) -> dict[str, Any]:
    """The share of the peak of full fine-tuning of Llama-3-8B, from the steps of two and four layers."""
    few, more = (
        next(
            make_train_plans(
                "llama-3-8b",
                config_of("llama-3-8b", num_hidden_layers=layers),
                [figure.machine],
                kinds=("full",),
                rows=figure.rows,
                length=LENGTH,
            )
        )
        for layers in _LAYERS
    )
    if few.times is None or more.times is None:
        raise RuntimeError(f"{figure.machine}: {few.problem or more.problem}")
    steps, shares = (few.step_s or 0.0, more.step_s or 0.0), (few.peak_share or 0.0, more.peak_share or 0.0)
    added = (config_of("llama-3-8b").num_hidden_layers - _LAYERS[1]) / (_LAYERS[1] - _LAYERS[0])
    seconds = steps[1] + (steps[1] - steps[0]) * added
    work = [share * step for share, step in zip(shares, steps, strict=True)]
    share = (work[1] + (work[1] - work[0]) * added) / seconds
    # as a time: that of the step at the published share
    return _row(figure, "llama-3-8b", seconds * share / figure.share, seconds, more.times) | {"share": round(share, 3)}


def _row(figure: Any, model: str, published: float, estimated: float, time: ProgramTime) -> dict[str, Any]:
    ratio = estimated / published
    return {
        "model": model,
        "machine": figure.machine,
        "what": figure.what,
        "source": figure.source,
        "published_ms": round(published * 1e3, 3),
        "estimated_ms": round(estimated * 1e3, 3),
        "ratio": round(ratio, 2),
        "shares_ms": {name: round(seconds * 1e3, 3) for name, seconds in time.shares.items()},
        "term": figure.term if abs(ratio - 1) > 0.2 else "",
    }


def main() -> None:
    """Compile, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["tpu", "gpu"], default="tpu")
    parser.add_argument("--only", default="", help="rows whose source or description has this text")
    parser.add_argument("--json-file", type=Path)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    work = [(compare, figure) for figure in FIGURES] + [(compare_training, figure) for figure in TRAININGS]
    for function, figure in work:
        if (kind_of(figure.machine) in GPUS) != (
            options.kind == "gpu"
        ) or options.only not in figure.source + figure.what:
            continue
        found.append(row := function(figure))  # pyright: ignore[reportArgumentType]
        print(
            f"{row['model']} on {row['machine']}, {row['what']} ({row['source']}): {row['published_ms']} ms published, "
            f"{row['estimated_ms']} estimated, {row['ratio']} times; of it, in ms: {row['shares_ms']}"
            + (f", {row['share']:.0%} of the peak" if "share" in row else "")
            + (f". Off by: {row['term']}" if row["term"] else ""),
            flush=True,
        )
    if options.json_file:
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        options.json_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
