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

from hfax.planning.chips import Chip, Links, chip_of, links_of
from hfax.planning.costs import cost_of
from hfax.planning.hlo import ASYNCHRONOUS, Computation, Instruction, Program, collective_kind, kernel_name

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
        is_loop: the program is a loop of unknown length, such as decoding: one pass of it is estimated, and nothing outside. If the
            compiler has made no loop of it, the whole program is a pass.
        num_experts: experts of a layer, over all devices, of which each token chooses some as good as at random; None: as many as a
            device has.

    Raises:
        InvalidInputError: an unknown machine.
    """
    timeline = _Timeline(program, chip_of(machine), links_of(machine), num_experts)
    loops = (i for _, i in program.walk() if i.opcode == "while" and _trips(program, i) is None)
    loop = next(loops, None) if is_loop else None
    for name in (program.entry,) if loop is None else (*loop.called["body"], *loop.called["condition"]):
        timeline.run(program.computations[name])
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
            for _ in range(_trips(self._program, instruction) or 1):
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


def _trips(program: Program, loop: Instruction) -> int | None:
    """How often a loop's body runs; None if it depends on values.

    XLA's GPU compiler says it. In a TPU's program the condition compares a counter, which starts at 0, with a constant.
    """
    if (found := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')) is not None:
        return int(found)
    condition = program.computations[loop.called["condition"][0]]
    last = condition.root
    if last.opcode != "compare" or "direction=LT" not in last.attributes:
        return None
    limit = condition.by_name.get(last.operands[1])
    if limit is None or limit.opcode != "constant" or limit.arrays[0].shape:
        return None
    value = re.match(r"\d+", limit.attributes)
    return None if value is None else int(value.group())


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
