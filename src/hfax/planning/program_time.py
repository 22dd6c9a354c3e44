"""Estimated run times of compiled programs, from the bytes, operations and messages of each instruction.

Turns compiled HLO and a chip into a `ProgramTime`. Instructions run one after another, as they are scheduled; each takes the longer
of its memory traffic and its operations, and the time of its launch. Copies and collectives that were scheduled asynchronously run
beside them until the instruction that waits for them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from hfax.kernels.encodings import BITS
from hfax.planning.chips import Chip, Links, chip_of, links_of
from hfax.planning.hlo import (
    ASYNCHRONOUS,
    Array,
    Computation,
    Instruction,
    Program,
    bits_of,
    collective_kind,
    kernel_name,
)

NAMES: tuple[str, ...] = ("memory", "operations", "communication", "launches")
ASSUMPTIONS = (
    "Times are estimated from the compiled programs: each instruction takes the longer of its memory traffic and its operations, "
    "and its launch; collectives take their bytes on a ring and their latency. Of the published figures, programs reach 86% of the "
    "bandwidth, 80% of the operations and 88% of the links on TPUs, and 75%, 77% and 80% on GPUs. A decoding step reads every "
    "sequence's whole cache at full context. The host's own time and sampling with options are not in it."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reached:
    """What programs reach of a chip's published figures, and what an instruction and a message cost without their bytes."""

    bandwidth: float
    operations: float
    links: float
    launch_s: float
    latency_s: float  # of one hop on a TPU, of a message on a GPU


_TPU = _Reached(bandwidth=0.86, operations=0.8, links=0.88, launch_s=1e-6, latency_s=1e-6)
"""Bandwidth: Ragged Paged Attention on TPU7x (arXiv:2604.15464), whose prefill, all counted, reaches 73% of the operations.
Links: a published microbenchmark of TPU7x (sglang-jax, 86 to 92%). A launch: libtpu's own estimate for a fusion of one vector,
1,800 cycles. A hop: "How to Scale Your Model" (jax-ml.github.io/scaling-book)."""
_GPU = _Reached(bandwidth=0.75, operations=0.77, links=0.8, launch_s=1.5e-6, latency_s=8e-6)
"""Measured on an H200 (docs/performance.md): products with weights read 3.5 of 4.8 TB/s in a decoding step, 4.4 at most; large
products reach 722 to 798 of 989 Tflop/s; small kernels take about 1.7 microseconds each. With the same share of an A100's
bandwidth, a step has the time that gpt-fast's README gives. Links and a message are assumed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramTime:
    """Where a device's time goes, estimated.

    Args:
        seconds: of one run; of one step, for a decoding loop.
        shares: seconds by what they are spent on: "memory", "operations", "communication" and "launches". Their sum is `seconds`.
        parts: seconds by part of the model ("model/layers.*/mlp/up_proj"), longest first; without waiting for copies.
        num_bytes: read from and written to main memory.
        operations: multiplications and additions of matrix products and attention, in bfloat16 equivalents.
        sent_bytes: what a device sends to others.
        num_launches: number of kernels, copies and collectives.
    """

    seconds: float
    shares: dict[str, float]
    parts: dict[str, float]
    num_bytes: float
    operations: float
    sent_bytes: float
    num_launches: int

    @property
    def limited_by(self) -> str:
        """What takes the largest share."""
        return max(self.shares, key=lambda name: self.shares[name])


def estimate(program: Program, machine: str, *, is_loop: bool = False, num_experts: int | None = None) -> ProgramTime:
    """The time of a program on a machine.

    Args:
        program: compiled for this machine. Its loops of unknown length count once.
        machine: as in `hfax.planning.chips.chip_of`, such as "v5e:2x4".
        is_loop: the program is a loop of unknown length, such as decoding: one pass of it is estimated, and nothing outside.
        num_experts: experts of a layer, over all devices, of which each token chooses some as good as at random; None: as many as a
            device has.

    Raises:
        InvalidInputError: an unknown machine.
    """
    timeline = _Timeline(program, chip_of(machine), links_of(machine), num_experts)
    if is_loop:
        loop = next(i for _, i in program.walk() if i.opcode == "while" and _trips(i) is None)
        for name in (*loop.called["body"], *loop.called["condition"]):
            timeline.run(program.computations[name])
    else:
        timeline.run(program.computations[program.entry])
    timeline.finish()
    return ProgramTime(
        seconds=sum(timeline.shares.values()),
        shares=timeline.shares,
        parts=dict(sorted(timeline.parts.items(), key=lambda part: -part[1])),
        num_bytes=timeline.num_bytes,
        operations=timeline.operations,
        sent_bytes=timeline.sent_bytes,
        num_launches=timeline.num_launches,
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an instruction moves and computes; see `ProgramTime`."""

    num_bytes: float = 0.0
    operations: float = 0.0


_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"),
        *("optimization-barrier", "add-dependency", "iota", "bitcast-convert"),
    }
)
_LAUNCHED = frozenset(
    {
        "fusion",
        "custom-call",
        "copy",
        "reduce",
        "dot",
        "convolution",
        "sort",
        "scatter",
        "gather",
        "transpose",
        "select-and-scatter",
    }
)
_COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


class _Timeline:
    """Runs computations and adds up seconds."""

    def __init__(self, program: Program, chip: Chip, links: Links, num_experts: int | None) -> None:
        self._program, self._chip, self._links, self._num_experts = program, chip, links, num_experts
        self._reached = _TPU if links.sizes else _GPU
        self._bandwidth = chip.bandwidth * self._reached.bandwidth
        self._peak = chip.operations * self._reached.operations
        self._copies: dict[str, float] = {}  # seconds left of each, in the order of their start
        self._ends: dict[str, tuple[float, str]] = {}  # when what runs beside ends, and what it is
        self._now, self._links_free = 0.0, 0.0
        self.shares: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        self.parts: dict[str, float] = {}
        self.num_bytes = self.operations = self.sent_bytes = 0.0
        self.num_launches = 0

    def run(self, computation: Computation) -> None:
        """Add the time of all instructions."""
        for instruction in computation.instructions:
            self._add(computation, instruction)

    def finish(self) -> None:
        """Wait for everything that still runs."""
        self._spend("memory", sum(self._copies.values()))
        for end, name in sorted(self._ends.values()):
            self._spend(name, end - self._now)

    def _add(self, computation: Computation, instruction: Instruction) -> None:
        opcode = instruction.opcode
        started = instruction.operands[0] if instruction.operands else ""
        if opcode in _FREE or instruction.attribute(r'custom_call_target="(ConcatBitcast|AssumeGather\w+)"'):
            return
        if opcode == "while":
            for _ in range(_trips(instruction) or 1):
                self.run(self._program.computations[instruction.called["body"][0]])
        elif opcode == "call":
            for name in instruction.called["to_apply"]:
                self.run(self._program.computations[name])
        elif opcode in ASYNCHRONOUS:
            self._run_beside(instruction)
        elif opcode == "conditional":
            self._run_longest([name for names in instruction.called.values() for name in names])
        elif opcode in _COPIES:
            both = instruction.arrays[:2]  # source and copy; which comes first depends on the kind
            size, ends = min(a.num_bytes for a in both), sum(not a.is_on_chip for a in both)
            self._copies[instruction.name] = ends * size / self._bandwidth
            self.num_bytes += ends * size
        elif opcode == "async-update":
            self._ends[instruction.name] = self._ends.pop(started)
        elif opcode.endswith("-done"):
            if started in self._ends:
                end, name = self._ends.pop(started)
                self._spend(name, end - self._now)
            else:
                self._wait_for_copy(started)
        elif collective_kind(instruction) is not None:
            is_start = instruction.opcode.endswith("-start")
            self._send(computation, instruction, start=instruction.name if is_start else None)
        else:
            cost = cost_of(self._program, computation, instruction, self._num_experts)
            memory, operations = cost.num_bytes / self._bandwidth, cost.operations / self._peak
            self.num_bytes, self.operations = self.num_bytes + cost.num_bytes, self.operations + cost.operations
            is_launch = opcode in _LAUNCHED
            launch = self._reached.launch_s if is_launch else 0.0
            self.num_launches += is_launch
            self._count(instruction, max(memory, operations) + launch)
            self._spend("memory" if memory > operations else "operations", max(memory, operations), memory)
            self._spend("launches", launch)
            for inner in _collectives_inside(self._program, instruction):
                self._send(*inner)

    def _count(self, instruction: Instruction, seconds: float) -> None:
        part = part_of(instruction)
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def _spend(self, name: str, seconds: float, memory: float = 0.0) -> None:
        """Let time pass, `memory` seconds of which the instruction itself occupies the memory; copies take the rest."""
        if seconds <= 0:
            return
        self._now += seconds
        self.shares[name] += seconds
        left = seconds - memory
        for copy, needed in list(self._copies.items()):
            taken = min(left, needed)
            left -= taken
            self._copies[copy] = needed - taken

    def _wait_for_copy(self, name: str) -> None:
        if name in self._copies:
            names = list(self._copies)
            before = names[: names.index(name) + 1]
            self._spend("memory", sum(self._copies[each] for each in before))
            del self._copies[name]

    def _send(self, computation: Computation, instruction: Instruction, *, start: str | None = None) -> None:
        """A collective; `start`: the instruction that its end refers to, if it runs beside others."""
        seconds, sent = message(computation, instruction, self._links, self._reached)
        self.sent_bytes += sent
        self.num_launches += 1
        self._count(instruction, seconds)
        self._links_free = max(self._now, self._links_free) + seconds
        if start is not None:
            self._ends[start] = self._links_free, "communication"
        else:
            self._spend("communication", self._links_free - self._now)

    def _run_beside(self, instruction: Instruction) -> None:
        """A collective, or what another core of the chip computes."""
        for name in (*instruction.called.get("to_apply", ()), *instruction.called.get("calls", ())):
            computation = self._program.computations[name]
            for each in computation.instructions:
                if collective_kind(each) is not None:
                    self._send(computation, each, start=instruction.name)
                    return
            timeline = _Timeline(self._program, self._chip, self._links, self._num_experts)
            timeline.run(computation)
            timeline.finish()
            self._ends[instruction.name] = self._now + sum(timeline.shares.values()), "memory"

    def _run_longest(self, names: Sequence[str]) -> None:
        """Of a conditional, the branch that takes longest."""
        times = {name: _Timeline(self._program, self._chip, self._links, self._num_experts) for name in names}
        for name, timeline in times.items():
            timeline.run(self._program.computations[name])
            timeline.finish()
        if times:
            longest = max(times, key=lambda name: sum(times[name].shares.values()))
            self.run(self._program.computations[longest])


def _trips(loop: Instruction) -> int | None:
    """How often a loop's body runs; None if the compiler does not know."""
    found = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
    return None if found is None else int(found)


def part_of(instruction: Instruction) -> str:
    """The part of the model that an instruction belongs to: modules' names without layers' numbers ("model/layers/*/mlp/up_proj");
    "other" outside of all modules."""
    scope = re.sub(r"\b(transpose|jvp|vmap)\(|\)", "", re.sub(r"\bjit\([^()]*\)", "jit", instruction.scope))
    names = [name for name in re.split(r"[/.]", scope) if name and name not in _NOT_MODULES]
    part = "/".join(re.sub(r"^\d+$", "*", name) for name in names[:-1])
    return re.sub(r"\b([^/]+/\*)/\1", r"\1", part) or kernel_name(instruction) or "other"


_NOT_MODULES = ("shard_map", "while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "jit")


def message(computation: Computation, instruction: Instruction, links: Links, reached: _Reached) -> tuple[float, float]:
    """Seconds of a collective, and the bytes that a device sends: on a ring, or on one in each host and one of hosts."""
    kind, size = collective_kind(instruction), _group_size(instruction)
    if size == 1:
        return 0.0, 0.0
    given = sum(a.num_bytes for name in instruction.operands for a in computation.by_name[name].arrays)
    if kind == "all-reduce" and not instruction.opcode.endswith("-start"):
        given = min(given, instruction.num_bytes)  # libtpu rounds what it sends, if the sum is rounded

    def sent(members: int, given: float) -> float:
        each = {"all-gather": members - 1, "collective-permute": 1.0}.get(str(kind), (members - 1) / members)
        return given * each * (2 if kind == "all-reduce" else 1)

    near = min(size, links.per_host)
    hosts = size // near
    seconds = sent(near, given) / (links.bandwidth * reached.links)
    if hosts > 1:
        part = given if kind == "all-gather" else given / near
        seconds += sent(hosts, part) / (links.network * reached.links) + reached.latency_s
    if links.sizes:  # to the farthest device, and back
        hops = sum(n // 2 for n in links.sizes) if size == math.prod(links.sizes) else size // 2
        seconds += reached.latency_s * max(1, hops) * (2 if kind == "all-reduce" else 1)
    else:
        seconds += reached.latency_s
    return seconds, sent(size, given)


def _group_size(instruction: Instruction) -> int:
    """How many devices take part in a collective."""
    text = instruction.attributes
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found.group(1)))
        return math.prod(int(sizes[name]) for name in re.findall(r"'([^']+)'", found.group(2)))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", text):
        return int(found.group(1))
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
        return found.group(1).count(",") + 1
    return 2


def _collectives_inside(program: Program, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """The collectives of a fusion."""
    for name in instruction.called.get("calls", ()):
        inner = program.computations[name]
        for each in inner.instructions:
            if collective_kind(each) is not None:
                yield inner, each
            else:
                yield from _collectives_inside(program, each)


def cost_of(
    program: Program, computation: Computation, instruction: Instruction, num_experts: int | None = None
) -> Cost:
    """The bytes and operations of an instruction that runs by itself; `num_experts` as for `estimate`."""
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


_VIEWS = ("bitcast", "reshape", "copy", "convert", "transpose", "get-tuple-element", "broadcast")
_PARTS = ("dynamic-slice", "slice", "gather")


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


def _kernel_cost(
    kernel: str, instruction: Instruction, operands: Sequence[Instruction], num_experts: int | None
) -> Cost:
    """A Pallas kernel's bytes and operations, from its name and the shapes that it takes and gives."""
    arrays, out = [operand.arrays[0] for operand in operands], instruction.arrays[0]
    moved = float(_in_memory(arrays) + _in_memory(instruction.arrays))
    if "flash_attention" in kernel or "splash" in kernel:
        # causal: two products with half of all pairs of queries and keys
        query = max((a for a in arrays if len(a.shape) >= 3), key=lambda a: a.size)
        keys = max(a.shape[-2] for a in arrays if len(a.shape) >= 3 and a.shape[-1] == query.shape[-1])
        return Cost(moved, 4.0 * query.size * keys / 2)
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
    return Cost(moved)  # attention of decoding steps: it reads the cache
