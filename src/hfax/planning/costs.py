"""What an instruction of a compiled program moves and computes, from the shapes that it takes and gives.

Turns an instruction into a `Cost`. A fusion is charged for the slices that it reads and the parts that it changes, a Pallas kernel
by its name and its operands; what is in a TPU's on-chip memory is not counted.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from hfax.kernels.encodings import BITS
from hfax.kernels.tiles import LANES, in_lanes
from hfax.planning.hlo import Array, Computation, Instruction, Program, bits_of, kernel_name


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an instruction moves and computes; bytes of main memory, and operations of products in bfloat16 equivalents."""

    num_bytes: float = 0.0
    operations: float = 0.0


def cost_of(
    program: Program, computation: Computation, instruction: Instruction, num_experts: int | None = None
) -> Cost:
    """The bytes and operations of an instruction that runs by itself; `num_experts` as for `program_time.estimate`."""
    operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
    if instruction.opcode == "fusion":
        inner = program.computations[instruction.called["calls"][0]]
        read = sum(
            _read_bytes(program, inner, inner.parameters[place], _in_memory(operand.arrays))
            for place, operand in enumerate(operands)
            if place in inner.parameters
        )
        return Cost(read + _written_bytes(inner, inner.root, instruction), _products(program, inner))
    if instruction.opcode == "custom-call" and (kernel := kernel_name(instruction)) is not None:
        return _kernel_cost(kernel, instruction, operands, num_experts)
    whole = sum(_in_memory(operand.arrays) for operand in operands)
    match instruction.opcode:
        case "dynamic-slice" | "slice" | "gather":
            return Cost(2 * _in_memory(instruction.arrays))
        case "dynamic-update-slice" | "scatter":
            return Cost(
                2 * _in_memory(operands[min(1 if instruction.opcode.startswith("d") else 2, len(operands) - 1)].arrays)
            )
        case "dot" | "convolution":
            return Cost(whole + _in_memory(instruction.arrays), _product(computation, instruction))
    return Cost(whole + _in_memory(instruction.arrays))


def _in_memory(arrays: Sequence[Array]) -> int:
    return sum(array.num_bytes for array in arrays if not array.is_on_chip)


_PARTS = ("dynamic-slice", "slice", "gather")
_REGISTER_BYTES = 4096


def _read_bytes(program: Program, inner: Computation, parameter: Instruction, whole: float) -> float:
    """What a fusion reads of a parameter of `whole` bytes: only parts, if nothing but slices are taken."""
    if not whole:
        return 0.0
    size = max(1, sum(a.size for a in parameter.arrays))
    total, views = 0.0, [parameter.name]
    while views:
        name = views.pop()
        for user in inner.users(name):
            if user.opcode in _PARTS and user.operands[0] == name:
                total += sum(a.size for a in user.arrays) / size * whole
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                pass  # it is written where it is
            elif user.opcode == "scatter" and user.operands[0] == name:
                total += sum(a.size for a in inner.by_name[user.operands[-1]].arrays) / size * whole
            elif user.opcode == "fusion":
                nested = program.computations[user.called["calls"][0]]
                for place, operand in enumerate(user.operands):
                    if operand == name and place in nested.parameters:
                        total += _read_bytes(program, nested, nested.parameters[place], whole)
            elif user.opcode in ("bitcast", "reshape", "get-tuple-element") and not user.is_root:
                views.append(user.name)
            else:
                return whole
    return min(total, whole)


def _written_bytes(inner: Computation, root: Instruction, instruction: Instruction) -> float:
    """What a fusion writes: only the new part of an array that is updated where it is."""
    roots = [inner.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for each, array in zip(roots, instruction.arrays, strict=False):
        if array.is_on_chip:
            continue
        while each.opcode in ("bitcast", "reshape", "copy") and each.operands[0] in inner.by_name:
            each = inner.by_name[each.operands[0]]
        if each.opcode == "dynamic-update-slice":
            total += inner.by_name[each.operands[1]].num_bytes
        elif each.opcode == "scatter":
            total += inner.by_name[each.operands[-1]].num_bytes
        else:
            total += array.num_bytes
    return total


def _products(program: Program, inner: Computation) -> float:
    """The operations of the products in a fusion."""
    total = 0.0
    for each in inner.instructions:
        if each.opcode in ("dot", "convolution"):
            total += _product(inner, each)
        elif each.opcode == "fusion":
            total += _products(program, program.computations[each.called["calls"][0]])
    return total


_FLOAT32 = 6
"""bfloat16 products that one of float32 takes in the matrix units, at the highest precision."""


def _product(computation: Computation, instruction: Instruction) -> float:
    """The operations of a `dot` or a `convolution`: two for each pair of numbers that are multiplied."""
    left, right = (computation.by_name[name].arrays[0] for name in instruction.operands[:2])
    out = instruction.arrays[0]
    if instruction.opcode == "dot":
        places = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = [int(n) for n in places.group(1).split(",") if n] if places else []
        depth = math.prod(left.shape[n] for n in dims)
    else:
        depth = _depth_of_convolution(instruction, right)
    is_float32 = bits_of(left.dtype) == bits_of(right.dtype) == 32
    return 2.0 * out.size * depth * (_FLOAT32 if is_float32 and "highest" in instruction.attributes else 1)


def _depth_of_convolution(instruction: Instruction, kernel: Array) -> int:
    """How many products make one number.

    A product over rows of several matrices is written with a window as large as their number, padded by one less on both sides: it
    spreads the rows over a new dimension and multiplies nothing more.
    """
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    fields = dict(part.split("=") for part in window.group(1).split()) if window else {}
    sizes, pads, dilations = (
        fields[name].split("x") if name in fields else [] for name in ("size", "pad", "lhs_dilate")
    )
    spread = {
        axis
        for axis, (size, pad) in enumerate(zip(sizes, pads, strict=False))
        if pad == f"{int(size) - 1}_{int(size) - 1}"
    }
    spread |= {axis for axis, dilation in enumerate(dilations) if dilation != "1"}
    labels = instruction.attribute(r"dim_labels=\w+_(\w+)->\w+") or ""
    return math.prod(
        kernel.shape[place]
        for place, label in enumerate(labels)
        if label == "i" or (label.isdigit() and (int(label) not in spread or sizes[int(label)] == "1"))
    )


def _share_of_pairs(kernel: str, arrays: Sequence[Array]) -> float:
    """The share of pairs of queries and keys that attention of prompts multiplies: half of them if it is causal."""
    if "splash" not in kernel:
        return 1.0 if kernel == "segment_attention" else 0.5
    blocks = next((a.shape for a in arrays if a.dtype == "s8" and len(a.shape) == 3), (1, 1, 1))
    if blocks[2] < blocks[1]:  # those of a row that a window touches
        return blocks[2] / blocks[1]
    has_positions = sum(a.dtype == "s32" for a in arrays) > 2
    return 0.5 if has_positions else 1.0


def _kernel_cost(
    kernel: str, instruction: Instruction, operands: Sequence[Instruction], num_experts: int | None
) -> Cost:
    """A Pallas kernel's bytes and operations, from its name and the shapes that it takes and gives."""
    arrays, out = [operand.arrays[0] for operand in operands], instruction.arrays[0]
    moved = float(_in_memory(arrays) + _in_memory(instruction.arrays))
    if "flash_attention" in kernel or "splash" in kernel or kernel == "segment_attention":
        query = max((a for a in arrays if len(a.shape) >= 3), key=lambda a: a.size)
        keys = max(a.shape[-2] for a in arrays if len(a.shape) >= 3 and a.shape[-1] == query.shape[-1])
        # a TPU multiplies whole registers
        numbers = (
            a.size // a.shape[-1] * (in_lanes(a.shape[-1]) if "splash" in kernel else a.shape[-1]) for a in (query, out)
        )
        return Cost(moved, 2.0 * sum(numbers) * keys * _share_of_pairs(kernel, arrays))  # two products
    bits = BITS.get(kernel.partition("_")[0])  # pyright: ignore[reportArgumentType]
    if kernel.endswith("_experts") or "gmm" in kernel or "grouped_linear" in kernel:
        weight = max((a for a in arrays if len(a.shape) >= 3), key=lambda a: a.num_bytes)
        experts, rows = weight.shape[0], out.size / out.shape[-1]
        scales = sum(a.num_bytes for a in arrays if a is not weight and len(a.shape) > 1 and a.shape[0] == experts)
        tiles = arrays[0]  # on GPU, the expert of each tile of rows, padded
        choices = tiles.size if tiles.dtype == "s32" and len(tiles.shape) == 1 and tiles.size > 1 else rows
        unread = (1 - 1 / (num_experts or experts)) ** choices
        numbers = weight.num_bytes * 8 / (bits or bits_of(weight.dtype))
        return Cost(moved - unread * (weight.num_bytes + scales), 2.0 * rows * numbers / experts)
    if kernel.endswith("_linear") and bits is not None:
        codes = arrays[1]  # after the activations
        return Cost(moved, 2.0 * codes.num_bytes * 8 / bits * out.size / codes.shape[0])
    if kernel == "pages_write":  # of each part, a register's rows of all heads, four are read or written
        pages, parts = max(arrays, key=lambda a: a.num_bytes), arrays[0].size
        rows = _REGISTER_BYTES // (LANES * bits_of(pages.dtype) // 8)
        return Cost(4.0 * parts * rows * pages.num_bytes / (pages.shape[0] * pages.shape[2]))
    return Cost(moved)  # attention of decoding steps: it reads the cache
