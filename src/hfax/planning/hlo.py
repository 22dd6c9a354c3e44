"""Compiled HLO text as instructions: shapes, operands, called computations, and the lines of Python they come from.

Turns `jax.stages.Compiled.as_text()` of a TPU's or GPU's program into a `Program`. Only what plans need is read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import PurePath

ASYNCHRONOUS = ("async-start", "call-start")
"""Opcodes that run a computation beside others."""
BITS = {"pred": 8, "token": 0, "opaque": 0}
_DIGITS = re.compile(r"\d+")
_ON_CHIP = re.compile(r"S\((\d+)\)")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^{}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"\s+(ROOT )?%([\w.\-]+) = ")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that an instruction gives.

    Args:
        dtype: XLA's name, such as "bf16".
        shape: sizes.
        is_on_chip: whether it is in a TPU's on-chip memory instead of main memory.
    """

    dtype: str
    shape: tuple[int, ...]
    is_on_chip: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in bytes, without padding."""
        return -(-self.size * bits_of(self.dtype) // 8)


def bits_of(dtype: str) -> int:
    """Bits of an element: the first number in XLA's name of a dtype ("f8e4m3fn" has 8), 8 for "pred"."""
    found = _DIGITS.search(dtype)
    return BITS[dtype] if dtype in BITS else int(found.group()) if found else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """An instruction of a computation.

    Args:
        name: its name in the text.
        opcode: such as "fusion".
        arrays: its result; several for a tuple.
        operands: names of the instructions that it reads.
        called: names of computations by attribute, such as "calls" and "body".
        attributes: the text after the operands.
        is_root: whether it is the computation's result.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: dict[str, tuple[str, ...]]
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Size of the result, in bytes."""
        return sum(array.num_bytes for array in self.arrays)

    @cached_property
    def scope(self) -> str:
        """The names of modules and functions that it was traced in, such as "model/layers.0/mlp/up_proj/dot_general"."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return "" if found is None else re.sub(r"^jit\(\w+\)/(while/body/(closed_call/)?)?", "", found.group(1))

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes."""
        found = re.search(pattern, self.attributes)
        return None if found is None else found.group(1)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The result."""
        return next(i for i in reversed(self.instructions) if i.is_root)

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters by position."""
        found = (i for i in self.instructions if i.opcode == "parameter")
        return {int(i.attribute(r"^(\d+)") or 0): i for i in found}

    def users(self, name: str) -> Iterator[Instruction]:
        """The instructions that read an instruction's result."""
        return (i for i in self.instructions if name in i.operands)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Args:
        computations: by name.
        entry: the name of the one that runs first.
        frames: file, function and line of each stack frame, and its parent's number, by number.
    """

    computations: Mapping[str, Computation]
    entry: str
    frames: Mapping[int, tuple[str, str, int, int]]

    def walk(self, computation: str | None = None) -> Iterator[tuple[Computation, Instruction]]:
        """All instructions that run by themselves, with those of loops and branches, but without the inside of fusions."""
        found = self.computations[computation or self.entry]
        for instruction in found.instructions:
            yield found, instruction
            if instruction.opcode in ("while", "conditional", "call", *ASYNCHRONOUS):
                for names in instruction.called.values():
                    for name in names:
                        yield from self.walk(name)

    def instructions(self) -> Iterator[Instruction]:
        """All instructions, those inside of fusions, too."""
        for computation in self.computations.values():
            yield from computation.instructions

    def stack(self, instruction: Instruction) -> list[tuple[str, str, int]]:
        """File, function and line of the Python calls that traced an instruction, innermost first."""
        number = int(instruction.attribute(r"stack_frame_id=(\d+)") or 0)
        found: list[tuple[str, str, int]] = []
        while number in self.frames:
            file, function, line, parent = self.frames[number]
            found.append((file, function, line))
            if parent == number:
                break
            number = parent
        return found

    def source(self, instruction: Instruction) -> str:
        """The line of modelling code that an instruction comes from ("modeling_llama.py:280"); otherwise the innermost one."""
        frames = self.stack(instruction)
        own = [f for f in frames if "/transformers/models/" in f[0]] or frames
        return f"{PurePath(own[0][0]).name}:{own[0][2]}" if own else ""


def kernel_name(instruction: Instruction) -> str | None:
    """The name of the Pallas kernel that an instruction calls; None if it calls none."""
    if 'custom_call_target="tpu_custom_call"' in instruction.attributes:
        return instruction.name.rstrip(".0123456789")
    if 'custom_call_target="__gpu$xla.gpu.triton"' in instruction.attributes:
        return instruction.attribute(r'[{,] ?name = "([^"]+)"')
    return None


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


def collective_kind(instruction: Instruction) -> str | None:
    """The kind of a collective, or of the start of one; None if it is none."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def parse(text: str) -> Program:
    """A program from its text."""
    computations: dict[str, Computation] = {}
    entry, name, found = "", "", list[Instruction]()
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            head = _NAME.search(line)
            assert head is not None
            name, found = head.group(1), []
            entry = name if line.startswith("ENTRY") else entry
        elif name and (line == "}" or line.startswith("}, execution_thread=")):  # others end a kernel's metadata
            computations[name] = Computation(name, tuple(found))
            name = ""
        elif name and (instruction := _instruction(line)) is not None:
            found.append(instruction)
    return Program(computations, entry, _frames(text))


def _instruction(line: str) -> Instruction | None:
    if (head := _HEAD.match(line)) is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    last = _closing(rest, len(opcode))
    inside, attributes = rest[len(opcode) + 1 : last - 1], rest[last:].lstrip(", ")
    if opcode in ("parameter", "constant"):
        attributes = f"{inside}, {attributes}"
    return Instruction(
        name=head.group(2),
        opcode=opcode,
        arrays=tuple(_arrays(result)),
        operands=() if opcode in ("parameter", "constant") else tuple(_NAME.findall(inside)),
        called={kind: tuple(_NAME.findall(names)) for kind, names in _CALLED.findall(attributes)},
        attributes=attributes,
        is_root=head.group(1) is not None,
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` has been closed."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    return len(text)


def _arrays(text: str) -> Iterator[Array]:
    for dtype, sizes, layout in _ARRAY.findall(text):
        shape = tuple(int(n) for n in _DIGITS.findall(sizes))
        yield Array(dtype, shape, is_on_chip=_ON_CHIP.search(layout) is not None)


_FILE = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")


def _frames(text: str) -> dict[int, tuple[str, str, int, int]]:
    """The tables of files, functions, locations and frames before the first computation."""
    tables: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            break
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            heading = line
        elif heading and line:
            tables.setdefault(heading, []).append(line)
    files, functions = (
        {int(m.group(1)): m.group(2) for m in map(_FILE.match, tables.get(key, [])) if m}
        for key in ("FileNames", "FunctionNames")
    )
    locations = {
        int(m.group(1)): (files[int(m.group(2))], functions[int(m.group(3))], int(m.group(4)))
        for m in map(_LOCATION.match, tables.get("FileLocations", []))
        if m
    }
    return {
        # a parent's number is one more than its place
        int(m.group(1)): (*locations[int(m.group(2))], int(m.group(3) or 1) - 1)
        for m in map(_FRAME.match, tables.get("StackFrames", []))
        if m
    }
