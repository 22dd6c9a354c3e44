"""The schedules that the TPU compiler makes of hfax's kernels for packed weights, beside the time that memory needs for the codes.

    python benchmarks/tpu_kernels.py --json-file benchmarks/results/tpu-kernels.json      # five minutes, no TPU

Needs hfax[tpu] and no TPU: libtpu writes out the instruction bundles of each kernel, one of which is issued a cycle. A kernel is a
loop over blocks of the weight. Counted are the cycles of that loop's body, without waiting for memory, and the time that its codes
take at the chip's published bandwidth; a block takes at least the larger of both. Each case is compiled in a process of its own,
since libtpu reads its options once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hfax.kernels.encodings import BITS, STORED, Encoding

SHAPE = 14336, 4096
"""The weight, [out, in]: the up projection of Llama-3-8B."""
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
GIGAHERTZ = {"v5e": 1.5, "v6e": 1.75, "v5p": 1.75, "tpu7x": 2.2}
"""Peak bfloat16 operations over two times the multipliers of the matrix units: 4 of 128 x 128 on v5e and, on v5p, in each of two
cores; 2 of 256 x 256 that take two rows a cycle on v6e and in each half of a TPU7x."""
CORES = {"v5p": 2}
"""Cores of a device, which share its memory and divide a kernel's blocks."""
FORMS = {
    "int8": 128,
    "int8 in groups of 32": 32,
    "int4": 128,
    "int4 in groups of 32": 32,
    "fp8": 128,
    "fp4": 32,
    "fp4 in groups of 16": 16,
}
ROWS = 1, 8, 32, 64, 512
_FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LB|\w\w)?\s*:\s*((?:> ?)*)\{")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel to compile.

    Args:
        chip: "v5e", "v6e", "v5p" or "tpu7x".
        encoding: of the weights.
        group: columns that share a scale.
        rows: rows of activations.
        way: as in `hfax.kernels.tpu.products`; None: the one that hfax chooses.
    """

    chip: str
    encoding: Encoding
    group: int
    rows: int
    way: str | None = None


def compile_case(case: Case) -> tuple[int, int, str]:
    """Compile the kernel, in this process; the rows and columns of a block of the weight, and the way."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from hfax.kernels.target import compiling_for
    from hfax.kernels.tpu import products, quantized
    from hfax.planning.devices import topology_devices

    device = topology_devices(CHIPS[case.chip])[0]
    out_features, width = SHAPE

    def given(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    bits = BITS[case.encoding]
    with compiling_for(device):
        jax.jit(
            lambda x, values, scale: quantized.linear(
                x, values, scale, encoding=case.encoding, out_dtype=jnp.float32, way=case.way
            )
        ).lower(
            given((case.rows, width), jnp.bfloat16),
            given((out_features, width * bits // 8), STORED[case.encoding]),
            given((out_features, width // case.group), jnp.bfloat16),
        ).compile()
        tiles = quantized._tiles(case.rows, SHAPE, bits)
        way = case.way or products.way_of(case.rows, case.encoding, case.group, quantized._chip())
    assert tiles is not None
    return (*tiles, way)


def bundles_of(folder: Path, kernel: str) -> list[tuple[str | None, int]]:
    """The label ("LB": a loop begins) and the number of loops around each bundle of a kernel, from the compiler's output."""
    (path,) = (p for p in folder.glob(f"*{kernel}*-final_bundles.txt") if "schedule" not in p.name)
    return [(m[1], m[2].count(">")) for line in path.read_text().splitlines() if (m := _BUNDLE.match(line))]


def loop_cycles(folder: Path, kernel: str) -> int:
    """Bundles of the loop of a kernel, of which the compiler's output is in this folder."""
    bundles = bundles_of(folder, kernel)
    if (loops := sum(label == "LB" for label, _ in bundles)) != 1:
        raise RuntimeError(f"{kernel} has {loops} loops; cycles are counted for one.")
    return sum(depth > 0 for _, depth in bundles)


def compiled_apart(script: str, case: Any, folder: str) -> Any:
    """What `script --case` prints of a case, in a process of its own, which leaves the compiler's output in the folder.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, "--case", json.dumps(dataclasses.asdict(case))],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": _FLAGS.format(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: Case) -> dict[str, Any]:
    """The schedule of a case, compiled in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        columns, depth, way = compiled_apart(__file__, case, folder)
        cycles = loop_cycles(Path(folder), f"{case.encoding}_linear")
    from hfax.planning.chips import CHIPS as PUBLISHED

    bandwidth = PUBLISHED[case.chip].bandwidth / CORES.get(case.chip, 1)
    memory_ns = columns * depth * BITS[case.encoding] / 8 / bandwidth * 1e9
    cycles_ns = cycles / GIGAHERTZ[case.chip]
    bfloat16_ns = columns * depth * 2 / bandwidth * 1e9
    return {
        **dataclasses.asdict(case),
        "way": way,
        "block": [columns, depth],
        "cycles": cycles,
        "cycles_ns": round(cycles_ns),
        "memory_ns": round(memory_ns),
        "cycles_over_memory": round(cycles_ns / memory_ns, 2),
        "speed_over_bfloat16": round(bfloat16_ns / max(cycles_ns, memory_ns), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="v5e,v6e,v5p,tpu7x")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--forms", default=",".join(FORMS), help="of weights")
    parser.add_argument("--ways", default="", help="compare these instead of the one that hfax chooses")
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(compile_case(Case(**json.loads(arguments.case)))))
        return
    results = []
    print(
        "chip   weights               rows  way      cycles      ns  memory ns  cycles/memory  over bfloat16's memory time"
    )
    for chip in arguments.chips.split(","):
        for form in arguments.forms.split(","):
            for rows in map(int, arguments.rows.split(",")):
                for way in arguments.ways.split(","):
                    encoding = form.split()[0]
                    if way == "digits" and encoding in ("fp8", "fp4"):
                        continue
                    case = Case(chip=chip, encoding=encoding, group=FORMS[form], rows=rows, way=way or None)
                    found = measure(case)
                    results.append(found)
                    print(
                        f"{chip:6} {form:20} {rows:5}  {found['way']:8} {found['cycles']:6} {found['cycles_ns']:7} "
                        f"{found['memory_ns']:10} {found['cycles_over_memory']:14} {found['speed_over_bfloat16']:9}",
                        flush=True,
                    )
    if arguments.json_file is not None:
        arguments.json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
