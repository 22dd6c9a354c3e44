"""Attention to pages on TPU as its compiler sees it: cycles of the kernels' loops beside the time that memory needs.

    python benchmarks/tpu_pages.py --json-file benchmarks/results/tpu-pages.json      # three minutes, no TPU

Needs hfax[tpu] and no TPU. A program writes a step of 16 sequences to pages and attends to them, with heads of published models.
Printed are its temporaries; and for a block of pages, how long the loop's body takes by its instruction bundles, one of which is
issued a cycle, without waiting for memory, beside the time that reading the block takes at the chip's published bandwidth: for a
sequence with one token, and for a block of queries of a prompt (128, or the step's tokens if these are fewer). "newest" are the
kernels of `generate`, which takes one token of each sequence. JAX's ragged paged attention kernel, which takes head dimensions of
128, is counted likewise, for 32 tokens of any sequences.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from tpu_kernels import CHIPS, CORES, GIGAHERTZ, bundles_of, compiled_apart

MODELS = {
    # query heads, heads of keys and values, head dimension
    "Llama-3.2-1B": (32, 8, 64),
    "Llama-3-8B": (32, 8, 128),
    "Gemma-3-12B": (16, 8, 256),
    "gpt-oss-20b": (64, 8, 64),
}
PAGES, PAGE_SIZE, SEQUENCES, TABLE = 1024, 128, 16, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step's attention to compile.

    Args:
        chip: "v5e", "v6e", "v5p" or "tpu7x".
        model: one of `MODELS`.
        rows: tokens of the step.
        by_jax: compile JAX's kernel.
        is_newest: compile the kernels of a batch's decoding, one token of each sequence.
    """

    chip: str
    model: str
    rows: int
    by_jax: bool = False
    is_newest: bool = False


def compile_case(case: Case) -> dict[str, Any]:
    """Compile in this process; the program's temporaries, and a block's heads of keys and values, tokens and queries."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
    from jax.sharding import Mesh, SingleDeviceSharding

    from hfax.kernels.rows import Rows
    from hfax.kernels.tiles import in_lanes
    from hfax.kernels.tpu import pages as kernels
    from hfax.kernels.tpu.page_blocks import Lanes
    from hfax.kernels.tpu.pages_decode import decode_attention
    from hfax.kernels.tpu.pages_write import pages_write_newest
    from hfax.planning.devices import topology_devices

    device = topology_devices(CHIPS[case.chip])[0]
    heads, kv_heads, width = MODELS[case.model]

    def given(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    sizes = {"starts": (SEQUENCES + 1,), "lengths": (SEQUENCES,), "tables": (SEQUENCES, TABLE)}
    rows: Any = Rows(**{name: given(*shape, dtype=jnp.int32) for name, shape in sizes.items()})
    key = given(kv_heads, case.rows, width)
    if case.by_jax:
        pages = given(PAGES, PAGE_SIZE, 2 * kv_heads, width)
        query = given(case.rows, heads, width)
        block = {"num_kv_pages_per_block": 8, "num_queries_per_block": min(32, case.rows)}

        def by_jax(query: Any, pages: Any, rows: Any) -> Any:
            count = jnp.full(1, SEQUENCES, jnp.int32)
            flat = query, pages, rows.lengths, rows.tables, rows.starts, count
            return ragged_paged_attention(*flat, **block, vmem_limit_bytes=64 << 20)

        with jax.sharding.use_abstract_mesh(Mesh(np.array([device]), ("device",)).abstract_mesh):
            compiled = jax.jit(by_jax).lower(query, pages, rows).compile()
        sizes_of_blocks = {"heads": kv_heads, "block": 8 * PAGE_SIZE, "queries": block["num_queries_per_block"]}
    else:
        pages = given(PAGES, kv_heads, PAGE_SIZE, in_lanes(2 * width))
        query = given(heads, case.rows, width)

        def step(query: Any, key: Any, value: Any, pages: Any, rows: Any) -> Any:
            if case.is_newest:
                page, offset = rows.tables[:, 0], rows.lengths & (PAGE_SIZE - 1)
                pages = pages_write_newest(pages, key, value, page, offset)
                options = {"value_width": width, "scale": width**-0.5}
                return decode_attention(query.swapaxes(0, 1), pages, rows.lengths, rows.tables, **options), pages
            pages = kernels.pages_write(pages, key, value, rows)
            return kernels.pages_attention(query, pages, rows, value_width=width, scale=width**-0.5), pages

        compiled = jax.jit(step, donate_argnums=3).lower(query, key, key, pages, rows).compile()
        shape = kernels._Shape.of(query, pages, rows, Lanes.of(width, width))
        sizes_of_blocks = {"heads": shape.heads, "block": shape.block, "queries": shape.queries}
    return sizes_of_blocks | {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}


def innermost_cycles(bundles: list[tuple[str | None, int]]) -> list[int]:
    """Bundles of each innermost loop of a kernel, in order."""
    deepest, loops = max(depth for _, depth in bundles), []
    for label, depth in bundles:
        if depth == deepest:
            if label == "LB":
                loops.append(0)
            loops[-1] += 1
    return loops


def measure(case: Case) -> dict[str, Any]:
    """The schedule of a case, compiled in a process of its own, since libtpu reads its options once."""
    from hfax.planning.chips import CHIPS as PUBLISHED

    with tempfile.TemporaryDirectory() as folder:
        found = compiled_apart(__file__, case, folder)
        kernel = "pages_decode_attention" if case.is_newest else "pages_attention"
        kernel = "ragged_paged_attention" if case.by_jax else kernel
        cycles = innermost_cycles(bundles_of(Path(folder), kernel))
    _, _, width = MODELS[case.model]
    bandwidth = PUBLISHED[case.chip].bandwidth / CORES.get(case.chip, 1)
    memory_ns = found["block"] * found["heads"] * max(128, 2 * width) * 2 / bandwidth * 1e9
    names = ("all",) if case.by_jax else ("one",) if case.is_newest else ("one", "several")
    return {
        **dataclasses.asdict(case),
        **found,
        "memory_ns": round(memory_ns),
        "cycles": dict(zip(names, cycles, strict=True)),
        "cycles_ns": {name: round(n / GIGAHERTZ[case.chip]) for name, n in zip(names, cycles, strict=True)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="v5e,v6e")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="16,512")
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(compile_case(Case(**json.loads(arguments.case)))))
        return
    results = []
    print("chip   model         rows  kernel  MB of temporaries  tokens of a block  memory ns  cycles ns")
    for chip in arguments.chips.split(","):
        for model in arguments.models.split(","):
            for rows in map(int, arguments.rows.split(",")):
                kinds: dict[str, dict[str, bool]] = {"hfax": {}}
                if rows == SEQUENCES:
                    kinds["newest"] = {"is_newest": True}
                if MODELS[model][2] == 128:
                    kinds["JAX"] = {"by_jax": True}
                for name, kind in kinds.items():
                    found = measure(Case(chip=chip, model=model, rows=rows, **kind))
                    results.append(found)
                    cycles = ", ".join(f"{name} {ns}" for name, ns in found["cycles_ns"].items())
                    print(
                        f"{chip:6} {model:13} {rows:4}  {name:6} {found['temporary_bytes'] / 1e6:17.1f} "
                        f"{found['block']:18} {found['memory_ns']:10}  {cycles}",
                        flush=True,
                    )
    if arguments.json_file is not None:
        arguments.json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
