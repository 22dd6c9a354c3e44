"""What compiled programs of large models may copy, send and keep, and what they do.

    python benchmarks/budgets.py --json-file benchmarks/results/budgets.json --markdown docs/budgets.md      # ten minutes

For models, accelerators and one or eight devices of each, prefill and decoding are compiled as `hfax plan` does, for the mesh that
it chooses, with two layers (they are alike). A program is over its budget if

- it copies a weight, or for each token a part of the cache (1 MiB or more) in main memory,
- it gathers more than a MiB in a loop: a weight,
- a device receives more than 5% above what is necessary: of each token, and of each patch of an image, two vectors a layer, its
  embedding and two numbers that tell the best logit,
- its temporaries are more than 64 MB and more than 5% of its arguments: of decoding those of two layers, of a prompt those of all.

Needs hfax[tpu] and hfax[plan-gpu], and no device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from shapes.published import config_of

from hfax.load.skeleton import Skeleton
from hfax.parallelism import plan_over
from hfax.planning.chips import num_devices
from hfax.planning.devices import topology_devices
from hfax.planning.hlo import Computation, Instruction, Program, collective_kind
from hfax.planning.image_prompts import image_prompt
from hfax.planning.plan import make_plans
from hfax.planning.topology import CompiledProgram, compile_programs
from hfax.sharding.mesh import make_mesh
from hfax.sharding.partition import ShardingPlan
from hfax.tracing.abstract import open_skeleton, without_weights

MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {},
    "llama-3-70b": {},
    "qwen3-30b-a3b": {},
    "gemma-3-12b": {"layer_types": ["sliding_attention", "full_attention"]},
    "deepseek-v3": {"first_k_dense_replace": 1},
    "qwen2.5-vl-7b": {},
}
"""Models, and what two layers of them need beside their number."""
IMAGES = {"qwen2.5-vl-7b": (448, 448)}
"""Height and width of the image in a prompt, for models whose prompts have one."""
MACHINES = (
    "v5e:1x1",
    "v5e:2x4",
    "v6e:1x1",
    "v6e:2x4",
    "tpu7x:1x1x1",
    "tpu7x:2x2x1",
    "h100:1",
    "h100:8",
    "b200:1",
    "b200:8",
)
BATCH, PROMPT, CONTEXT = 1, 512, 8192
MB = 1e6
_LARGE = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A program beside its budget.

    Args:
        model, machine, mesh, program: what was compiled.
        received_bytes: what a device receives in a step, or from a prompt; of two layers.
        necessary_bytes: what it has to receive.
        temporary_bytes: temporaries of a device.
        allowed_bytes: temporaries that the budget allows.
        kernels: number of calls of each Pallas kernel.
        excesses: why it is over its budget, with the instruction and the line of modelling code.
    """

    model: str
    machine: str
    mesh: dict[str, int]
    program: str
    received_bytes: int
    necessary_bytes: int
    temporary_bytes: int
    allowed_bytes: int
    kernels: dict[str, int]
    excesses: tuple[str, ...]


def check(model: str, machine: str) -> list[Row]:
    """Both programs of a model on a machine; none if its two layers do not fit.

    Args:
        model: of `MODELS`.
        machine: as for `hfax plan`.
    """
    whole, config = config_of(model), _two_layers(model)
    if model == "deepseek-v3" and num_devices(machine) == 1:
        config.n_routed_experts //= 8
    (arithmetic,) = make_plans(
        model, config, [machine], batches=[BATCH], context=CONTEXT, prompt=PROMPT, compiles=False
    )
    skeleton = open_skeleton(config)
    plan = plan_over(skeleton, make_mesh(arithmetic.mesh, config, topology_devices(machine)))
    sizes: dict[str, Any] = {"batch_size": BATCH, "prompt_length": PROMPT, "capacity": CONTEXT}
    try:
        programs = compile_programs(skeleton, plan, **sizes, image_size=IMAGES.get(model))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return []
        raise
    text = whole.get_text_config(decoder=True)
    added = (text.num_hidden_layers - 2) * _layer_bytes(plan)
    rows = []
    for program in programs:
        tokens = BATCH * (1 if program.name == "decode" else PROMPT)
        several = plan.mesh.size > 1
        # the compilers send at least two rows; embeddings once more, and the best logit's value and place
        necessary = several * int((2 * 2 + 1) * max(2, tokens) * text.hidden_size * 2 + 2 * 8 * BATCH)
        if program.name == "prefill" and model in IMAGES:
            necessary += several * _bytes_of_image(skeleton, IMAGES[model])
        arguments = program.argument_bytes + (0 if program.name == "decode" else added)
        allowed = max(int(0.05 * arguments), int(64 * MB))
        rows.append(
            Row(
                model=model,
                machine=machine,
                mesh=arithmetic.mesh,
                program=program.name,
                received_bytes=program.collective_bytes,
                necessary_bytes=necessary,
                temporary_bytes=program.temporary_bytes,
                allowed_bytes=allowed,
                kernels=program.kernels,
                excesses=tuple(_excesses(program, necessary, allowed)),
            )
        )
    return rows


def _two_layers(model: str) -> Any:
    """The model's config, with two layers."""
    config = config_of(model)
    text: Any = config.get_text_config(decoder=True)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    for name, value in {"num_hidden_layers": 2, **MODELS[model]}.items():
        setattr(text, name, value)
    if model in IMAGES:  # a layer within windows, and one of the whole image
        config.vision_config.depth, config.vision_config.fullatt_block_indexes = 2, [1]
    return config


def _bytes_of_image(skeleton: Skeleton, size: tuple[int, int]) -> int:
    """What a device has to receive to sort an image's patches into windows, from two layers that read them, and to merge them."""
    shapes, _ = image_prompt(*without_weights(skeleton), batch=BATCH, length=PROMPT, size=size)
    config: Any = skeleton.module.config
    patches, vision = shapes["pixel_values"].shape[0], config.vision_config
    merged = patches // vision.spatial_merge_size**2 * config.get_text_config(decoder=True).hidden_size
    return 2 * ((2 * 2 + 1) * patches * vision.hidden_size + merged)


def _layer_bytes(plan: ShardingPlan) -> int:
    """Bytes of the last of two layers, on a device."""
    return sum(w.bytes_per_device(plan.mesh) for name, w in plan.weights.items() if ".layers.1." in f".{name}")


def _excesses(program: CompiledProgram, necessary: int, allowed: int) -> Iterator[str]:
    hlo = program.hlo
    loops = {name: (outer, i) for outer, i in hlo.walk() if i.opcode == "while" for name in i.called["body"]}
    for computation, each in hlo.walk():
        where = f"{each.name} ({each.scope or '?'}, {hlo.source(each) or '?'})"
        if each.opcode.endswith("-done"):
            continue
        size = max((a.num_bytes for a in each.arrays if not a.is_on_chip), default=0)
        kept = _kept(computation, each, loops) if size >= _LARGE and _is_copy(hlo, each) else None
        # a cache may be brought to the layout of a loop, once a call
        if kept is not None and (computation.name in loops or "cache" not in kept):
            yield f"copies {size / MB:.1f} MB of {kept}: {where}"
        if collective_kind(each) == "all-gather" and computation.name in loops and size >= _LARGE:
            yield f"gathers {size / MB:.1f} MB for each token: {where}"
    if program.collective_bytes > 1.05 * necessary:
        sent = [i for i in hlo.instructions() if collective_kind(i)]
        largest = max(sent, key=lambda i: i.num_bytes)
        yield (
            f"receives {program.collective_bytes / MB:.2f} MB, {necessary / MB:.2f} are necessary; most by {largest.name} "
            f"({largest.scope}, {hlo.source(largest)})"
        )
    if program.temporary_bytes > allowed:
        made = [(c, i) for c, i in hlo.walk() if i.opcode in ("fusion", "copy", "custom-call", "dot", "convolution")]
        _, largest = max(made, key=lambda found: sum(a.num_bytes for a in found[1].arrays if not a.is_on_chip))
        yield (
            f"has {program.temporary_bytes / MB:.1f} MB of temporaries, {allowed / MB:.1f} are allowed; the largest result is "
            f"{largest.num_bytes / MB:.1f} MB of {largest.name} ({largest.scope}, {hlo.source(largest)})"
        )


_MOVES = frozenset({"parameter", "copy", "transpose", "bitcast", "reshape"})


def _is_copy(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction does nothing but copy an array, perhaps to another layout, from and to main memory."""
    if instruction.opcode == "fusion":
        inside = {each.opcode for each in program.computations[instruction.called["calls"][0]].instructions}
        return inside <= _MOVES and bool(inside & {"copy", "transpose"})
    return instruction.opcode == "copy" or (
        instruction.opcode == "copy-start" and not any(array.is_on_chip for array in instruction.arrays[:2])
    )


_VIEWS = ("bitcast", "get-tuple-element", "reshape", "optimization-barrier")


def _kept(
    computation: Computation, copy: Instruction, loops: Mapping[str, tuple[Computation, Instruction]]
) -> str | None:
    """The name of the argument that is copied, perhaps as a part of a loop's state; None: what is copied was computed."""
    name, place = copy.operands[0], 0
    while (source := computation.by_name.get(name)) is not None and source.operands:
        if source.opcode not in (*_VIEWS, "tuple"):
            return None
        if source.opcode == "get-tuple-element":
            place = int(source.attribute(r"index=(\d+)") or 0)
        name = source.operands[place if source.opcode == "tuple" else 0]
    if source is None or source.opcode != "parameter":
        return None
    if computation.name not in loops:
        return source.scope or source.name
    outer, loop = loops[computation.name]
    state = outer.by_name[loop.operands[0]]
    given = state.operands[place] if state.opcode == "tuple" else state.name
    return _kept(outer, dataclasses.replace(copy, operands=(given,)), loops) or f"a loop's state, {given}"


_INTRODUCTION = """\
# Budgets of compiled programs

Made by `python benchmarks/budgets.py --markdown docs/budgets.md`: programs of a prompt of 512 tokens and of decoding with a
cache of 8,192 tokens, batch 1, bfloat16, compiled by libtpu and by XLA's GPU compiler for machines that are not there. Layers
are alike, so two of each model are compiled; of DeepSeek-V3, one device has an eighth of a layer's experts. The prompt of
Qwen2.5-VL has an image of 448 x 448 pixels, which two layers of its vision encoder read.

A program is over its budget if it copies a weight, or a part of the cache for each token; if it gathers a weight for each
token; if a device receives more than 5% above what it has to; or if its temporaries are more than 64 MB and more than 5% of its
arguments (of decoding those of two layers, of a prompt those of the whole model). Then `make test-tpu_compile` or `make
test-gpu_compile` fails, with the instruction and the line of modelling code. None is.

MB a device: received by two layers, of what is necessary; temporaries, of what is allowed. Kernels are Pallas kernels; all
other products are XLA's.
"""
_HEADER = """
| model | machine | mesh | program | received | temporaries | kernels |
| --- | --- | --- | --- | --- | --- | --- |"""


def markdown(rows: list[Row], missing: list[str]) -> str:
    """The table for the docs."""
    lines = [*_INTRODUCTION.splitlines(), *_HEADER.splitlines()]
    for row in rows:
        mesh = ", ".join(f"{name} {size}" for name, size in row.mesh.items())
        kernels = ", ".join(f"{count} {name}" for name, count in row.kernels.items()) or "none"
        over = "".join(f"; over its budget: {text}" for text in row.excesses)
        lines.append(
            f"| {row.model} | {row.machine} | {mesh} | {row.program} | {row.received_bytes / MB:.2f} of "
            f"{row.necessary_bytes / MB:.2f} | {row.temporary_bytes / MB:.1f} of {row.allowed_bytes / MB:.0f} | {kernels}{over} |"
        )
    if missing:
        lines += ["", "Two layers do not fit: " + ", ".join(missing) + "."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compile, print and write; 1 when a program is over its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--machines", nargs="+", default=list(MACHINES))
    parser.add_argument("--json-file", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    missing: list[str] = []
    for model in options.models:
        for machine in options.machines:
            found = check(model, machine)
            rows += found
            if not found:
                missing.append(f"{model} on {machine}")
                print(f"{model} {machine}: does not fit", flush=True)
            for row in found:
                print(
                    f"{model} {machine} {row.mesh} {row.program}: receives {row.received_bytes / MB:.2f} of "
                    f"{row.necessary_bytes / MB:.2f} MB, temporaries {row.temporary_bytes / MB:.1f} of "
                    f"{row.allowed_bytes / MB:.0f} MB, kernels {row.kernels}"
                    + "".join(f"\n  OVER: {text}" for text in row.excesses),
                    flush=True,
                )
    if options.json_file:
        options.json_file.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(rows, missing))
    return int(any(row.excesses for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
