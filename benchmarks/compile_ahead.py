"""Prefill and decoding programs of large shapes, compiled by the real compilers for TPUs and GPUs that are not there.

    python benchmarks/compile_ahead.py --kind tpu --json-file benchmarks/results/compile-ahead-tpu.json      # needs hfax[tpu]
    python benchmarks/compile_ahead.py --kind gpu --json-file benchmarks/results/compile-ahead-gpu.json      # needs hfax[plan-gpu]

Llama-3-8B, Qwen3-30B-A3B, Gemma 3 12B and gpt-oss-120b, tensor-parallel over all devices, bfloat16 or packed, batch 1: on TPU a
prompt of 512 tokens and a cache of 2,048, on GPU 2,048 and 8,192. Prints seconds, memory a device, Pallas kernels, collectives and
what a device receives from them, and copies of a megabyte or more. Takes some minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from shapes.published import config_of
from transformers import PretrainedConfig

from hfax.load.quantize import Quantized, layouts
from hfax.planning.chips import GPUS, kind_of
from hfax.planning.topology import compile_for
from hfax.tracing.abstract import open_skeleton

SHAPES: dict[str, tuple[str, str | None, str]] = {  # topology, quantization, model
    "llama-3-8b": ("v5e:2x4", None, "llama-3-8b"),
    "llama-3-8b-int8": ("v5e:1x1", "int8", "llama-3-8b"),
    "llama-3-8b-int4": ("v5e:1x1", "int4", "llama-3-8b"),
    "llama-3-8b-int8-8-chips": ("v5e:2x4", "int8", "llama-3-8b"),
    "llama-3-8b-int4-8-chips": ("v5e:2x4", "int4", "llama-3-8b"),
    "qwen3-30b-a3b": ("v6e:2x2", None, "qwen3-30b-a3b"),
    "qwen3-30b-a3b-int8": ("v6e:2x2", "int8", "qwen3-30b-a3b"),
    "qwen3-30b-a3b-int4": ("v6e:2x2", "int4", "qwen3-30b-a3b"),
    "gemma-3-12b": ("v6e:2x2", None, "gemma-3-12b"),
    "llama-3-8b-h100": ("h100:1", None, "llama-3-8b"),
    "llama-3-8b-8-h100": ("h100:8", None, "llama-3-8b"),
    "llama-3-8b-int8-h100": ("h100:1", "int8", "llama-3-8b"),
    "llama-3-8b-int4-h100": ("h100:1", "int4", "llama-3-8b"),
    "llama-3-8b-int4-l4": ("l4:1", "int4", "llama-3-8b"),
    "llama-3-8b-16-b200": ("b200:2x8", None, "llama-3-8b"),
    "gemma-3-12b-2-h100": ("h100:2", None, "gemma-3-12b"),
    "qwen3-30b-a3b-4-h100": ("h100:4", None, "qwen3-30b-a3b"),
    "llama-3-8b-fp8-h100": ("h100:1", "fp8", "llama-3-8b"),
    "gpt-oss-120b-h100": ("h100:1", "mxfp4", "gpt-oss-120b"),
    "gpt-oss-120b-8-h100": ("h100:8", "mxfp4", "gpt-oss-120b"),
}


def quantized(config: PretrainedConfig, quantization: str | None) -> Quantized:
    """What to compile for: "fp8" is FP8 with a float32 scale for 128 columns of every layer, "mxfp4" gpt-oss's experts."""
    if quantization not in ("fp8", "mxfp4"):
        return quantization  # pyright: ignore[reportReturnType]
    skeleton = open_skeleton(config)
    packed = layouts(skeleton.module, skeleton.shapes, skeleton.tied, "int8")
    if quantization == "fp8":
        form: dict[str, Any] = {"encoding": "fp8", "group": 128, "scale_bytes": 4}
        return {name: dataclasses.replace(found, **form) for name, found in packed.items() if name != "lm_head.weight"}
    form = {"encoding": "fp4", "group": 32}
    return {name: dataclasses.replace(found, **form) for name, found in packed.items() if len(found.shape) == 3}


def _is_gpu(topology: str) -> bool:
    return kind_of(topology) in GPUS


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kind", choices=["tpu", "gpu"], default="tpu", help="whose shapes, unless --shapes names some"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--json-file", type=Path)
    options = parser.parse_args()
    found = {}
    for name in options.shapes or [
        name for name, shape in SHAPES.items() if _is_gpu(shape[0]) == (options.kind == "gpu")
    ]:
        topology, quantization, model = SHAPES[name]
        sizes = {"prompt_length": 2048, "capacity": 8192} if _is_gpu(topology) else {}
        config = config_of(model)
        for program in compile_for(config, topology, quantization=quantized(config, quantization), **sizes):
            facts = {k: v for k, v in dataclasses.asdict(program).items() if k != "text"}
            found[f"{name} {topology} {program.name}"] = facts
            sent = f"{program.collectives} of {program.collective_bytes / 1e6:.2f} MB"
            print(
                f"{name} {topology} {program.name}: trace {program.trace_seconds:.1f} s, compile {program.compile_seconds:.1f} s, "
                f"{program.argument_bytes / 1e9:.2f} GB of arguments and {program.temporary_bytes / 1e6:.1f} MB of temporaries "
                f"a device ({program.temporary_bytes / program.argument_bytes:.2%}), kernels {program.kernels}, "
                f"collectives {sent}, large copies {list(program.large_copies)}",
                flush=True,
            )
    if options.json_file:
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        options.json_file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
