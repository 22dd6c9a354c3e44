"""The instructions that hfax's GPU kernels for packed weights have for each weight, counted without a GPU.

    python benchmarks/gpu_schedules.py --json-file benchmarks/results/gpu-schedules.json     # two minutes

Needs hfax[plan-gpu] and NVIDIA's tools (`pip install nvidia-cuda-nvcc==13.5.37 nvidia-cuda-nvdisasm==13.5.37`).
XLA's GPU compiler makes PTX of each kernel, which is assembled for the GPU. A kernel is a loop over columns of the weight; counted
are the instructions of that loop. An SM issues four instructions a cycle, for 32 threads each: that and the clock give the least
time of a weight's instructions, which is compared with the least time that memory needs for its code and its share of a scale.
Waiting is not counted: on an H200, products of one row took 1.4 and 1.7 times the longer of both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 --xla_dump_to={tempfile.mkdtemp(prefix='hfax-gpu-schedules-')}"

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from hfax.kernels.encodings import BITS, STORED, Encoding
from hfax.kernels.gpu import quantized
from hfax.kernels.gpu.codes import UNIT
from hfax.kernels.target import compiling_for
from hfax.planning import devices

_DUMPED = Path(os.environ["XLA_FLAGS"].partition("--xla_dump_to=")[2])
SHAPE = 14336, 4096
"""The weight, [out, in]: the up projection of Llama-3-8B."""
GPUS = {"a100": "sm_80", "l4": "sm_89", "h100": "sm_90a", "b200": "sm_100a"}
FORMS: dict[str, tuple[Encoding, int, str]] = {
    "int8": ("int8", 128, "bfloat16"),
    "int8 in groups of 32": ("int8", 32, "bfloat16"),
    "int4": ("int4", 128, "bfloat16"),
    "int4 in groups of 32": ("int4", 32, "bfloat16"),
    "fp8": ("fp8", 128, "float32"),
    "fp4": ("fp4", 32, "bfloat16"),
    "fp4 in groups of 16": ("fp4", 16, "float32"),
}
"""Encodings, columns of a group, and the type of the scales."""
ROWS = 1, 8


def tools() -> dict[str, Path]:
    """Paths of the assembler and disassembler."""
    import nvidia

    found = {name: Path(place) / "cu13" / "bin" / name for place in nvidia.__path__ for name in ("ptxas", "nvdisasm")}
    if missing := [name for name, path in found.items() if not path.is_file()]:
        raise SystemExit(f"{' and '.join(missing)} not found; install nvidia-cuda-nvcc and nvidia-cuda-nvdisasm.")
    return found


def assembly(gpu: str, form: str, rows: int) -> tuple[str, str]:
    """The kernel's instructions, and what the assembler reports."""
    device = devices.topology_devices(f"{gpu}:1")[0]
    encoding, group, of_scale = FORMS[form]
    out_features, width = SHAPE

    def given(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    with compiling_for(device):
        jax.jit(
            lambda x, values, scale: quantized.linear(x, values, scale, encoding=encoding, out_dtype=x.dtype)
        ).lower(
            given((rows, width), jnp.bfloat16),
            given((out_features, width * BITS[encoding] // 8), STORED[encoding]),
            given((out_features, width // group), of_scale),
        ).compile()
    (ptx,) = (path for path in _DUMPED.glob("*.ptx") if f".entry {encoding}_linear(" in path.read_text())
    cubin, found = _DUMPED / "kernel.cubin", tools()
    command = [found["ptxas"], f"-arch={GPUS[gpu]}", "-v", "-o", cubin, ptx]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    text = subprocess.run([found["nvdisasm"], "-c", cubin], check=True, capture_output=True, text=True).stdout
    for path in _DUMPED.iterdir():
        path.unlink()
    return text, report


def loop_of(text: str) -> Counter[str]:
    """How often each instruction is in the kernel's longest loop."""
    lines = text.splitlines()
    labels = {line[:-1]: index for index, line in enumerate(lines) if line.startswith(".L")}
    loops = [range(0)]
    for index, line in enumerate(lines):
        target = re.search(r"BRA(?:\.U)? (?:\S+, )?`\((\.L\w+)\)", line)
        if target is not None and labels[target.group(1)] < index:
            loops.append(range(labels[target.group(1)], index + 1))
    body = (
        re.match(r"\s*/\*\w{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", lines[index]) for index in max(loops, key=len)
    )
    return Counter(found.group(1) for found in body if found is not None)


def measure(gpu: str, form: str, rows: int) -> dict[str, Any]:
    """A row of the table."""
    encoding, group, of_scale = FORMS[form]
    text, report = assembly(gpu, form, rows)
    loop = loop_of(text)
    tiling = quantized.tiling_of(rows, SHAPE[0], SHAPE[1] // UNIT, BITS[encoding])
    weights = tiling.columns * UNIT * (tiling.step if rows == 1 else 1) / (32 * tiling.warps)
    instructions = sum(loop.values()) / weights
    fields = json.loads(Path(devices.__file__).with_name("gpus.json").read_text())["gpus"][gpu]["fields"]
    issue = instructions / (fields["core_count"] * fields["fpus_per_core"] * fields["clock_rate_ghz"] * 1e9)
    memory = (BITS[encoding] / 8 + jnp.dtype(of_scale).itemsize / group) / fields["memory_bandwidth"]
    return {
        "gpu": gpu,
        "weights": form,
        "rows": rows,
        "instructions": round(instructions, 2),
        "barriers": sum(count for name, count in loop.items() if name.startswith("BAR")),
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "issue_over_memory": round(issue / memory, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="of weights")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--json-file", type=Path)
    options = parser.parse_args()
    results = []
    print("GPU        weights               rows  instructions a weight  registers  issue time over memory time")
    try:
        for gpu in options.gpus:
            for form in options.forms:
                for rows in options.rows:
                    found = measure(gpu, form, rows)
                    results.append(found)
                    print(
                        f"{gpu:10} {form:20} {rows:5} {found['instructions']:22.2f} {found['registers']:10} "
                        f"{found['issue_over_memory']:28.2f}",
                        flush=True,
                    )
    finally:
        shutil.rmtree(_DUMPED, ignore_errors=True)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
