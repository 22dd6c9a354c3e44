"""Seconds to trace a model's forward pass from its skeleton, without weights, and what takes them.

    python benchmarks/trace.py                  # the shape of Llama-3-8B, 32 layers, 128 tokens; limit: 2 s on two cores
    python benchmarks/trace.py --layers 2 --repeats 2 --json trace.json

A trace runs the modelling code once, on tracers: its cost is Python's, a function of the number of operations, not of their size.
Every repeat traces anew. The shares are of one more trace, under the profiler, which slows it down.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import time
from pathlib import Path
from typing import Any

from shapes.published import config_of

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import torch
import transformers

from hfax.load.placement import to_numpy
from hfax.tracing.abstract import open_skeleton
from hfax.tracing.traced_model import TracedModel

_GROUPS = {"jax": ("/jax/", "/jaxlib/"), "torch": ("/torch/",), "torchax": ("/torchax/",), "hfax": ("/hfax/",)}


def make_tracer(layers: int, tokens: int) -> Any:
    """A function that traces once, of a model of Llama-3-8B's shape."""
    config = config_of("llama-3-8b", num_hidden_layers=layers)
    skeleton = open_skeleton(config, dtype="bfloat16")
    buffers = {name: jnp.asarray(to_numpy(buffer)) for name, buffer in skeleton.buffers.items()}
    params = {name: jax.ShapeDtypeStruct(tuple(t.shape), jnp.bfloat16) for name, t in skeleton.shapes.items()}
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def trace() -> Any:
        model = TracedModel(skeleton, skeleton.tied, buffers)
        return jax.jit(lambda p, i: model.apply(p, (), {"input_ids": i, "use_cache": False}).logits).trace(params, ids)

    return trace


def shares(trace: Any) -> dict[str, float]:
    """Which part of a trace's own time each library takes; the rest is modelling code and Python's own functions."""
    profile = cProfile.Profile()
    profile.runcall(trace)
    stats: Any = pstats.Stats(profile)
    total, found = 0.0, dict.fromkeys(_GROUPS, 0.0)
    for (path, _, _), (_, _, own, _, _) in stats.stats.items():
        total += own
        for name, parts in _GROUPS.items():
            if any(part in path for part in parts):
                found[name] += own
                break
    return {name: round(seconds / total, 3) for name, seconds in found.items()} | {
        "other": round(1 - sum(found.values()) / total, 3)
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    trace, seconds = make_tracer(options.layers, options.tokens), []
    for _ in range(options.repeats):
        started = time.perf_counter()
        trace()
        seconds.append(round(time.perf_counter() - started, 3))
    parts = shares(trace)
    print(
        f"{options.layers} layers: first {seconds[0]:.2f} s, then {min(seconds):.2f} to {max(seconds[1:] or seconds):.2f} s"
    )
    print("own time: " + ", ".join(f"{name} {share:.0%}" for name, share in parts.items()))
    if options.json:
        versions = {"jax": jax.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        figures = {"layers": options.layers, "tokens": options.tokens, "seconds": seconds, "shares": parts}
        options.json.write_text(json.dumps({"machine": machine, "versions": versions, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
