"""Published accelerator specifications, per JAX device: a chip, or one of the two halves of a TPU7x."""

from __future__ import annotations

import dataclasses
import math
import os

from hfax.errors import InvalidInputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of accelerator.

    Args:
        name: chip name as in topologies, such as "v5e".
        memory_bytes: main memory size, in bytes.
        bandwidth: main memory bandwidth, in bytes per second; 0 if not published.
        operations: bfloat16 multiplications and additions per second; 0 if not published.
        interconnect: total one-way bandwidth to other chips, in bytes per second; 0 if not published.
        source: source of the figures.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    operations: float
    interconnect: float
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """How the devices of a machine are connected.

    Args:
        bandwidth: bytes per second that a device sends to others of its TPU slice or of its host.
        sizes: sizes of a TPU slice; empty for GPUs, which a switch connects.
        per_host: devices that are connected so.
        network: bytes per second that a device sends to other hosts.
    """

    bandwidth: float
    sizes: tuple[int, ...]
    per_host: int
    network: float


_GOOGLE = "Google's documentation of Cloud TPU"
_NVIDIA = "NVIDIA's data sheet; dense operations, NVLink"
_NVIDIA_PCIE = "NVIDIA's data sheet; dense operations, PCI Express 4.0 x16"
_GB, _GIB = 10**9, 1 << 30

CHIPS = {
    name: Chip(
        name=name,
        memory_bytes=memory,
        bandwidth=gigabytes * 1e9,
        operations=tera_operations * 1e12,
        interconnect=link_gigabytes * 1e9,
        source=source,
    )
    for name, memory, gigabytes, tera_operations, link_gigabytes, source in (
        ("v5e", 16 * _GIB, 819, 197, 200, _GOOGLE),
        ("v5p", 95 * _GIB, 2765, 459, 600, _GOOGLE),
        ("v6e", 32 * _GIB, 1640, 918, 400, _GOOGLE),
        ("tpu7x", 96 * _GIB, 3690, 1153.5, 300, _GOOGLE),
        ("a100", 80 * _GB, 2039, 312, 300, _NVIDIA),
        ("h100", 80 * _GB, 3350, 989, 450, _NVIDIA),
        ("h200", 141 * _GB, 4800, 989, 450, _NVIDIA),
        ("b200", 180 * _GB, 7700, 2250, 900, _NVIDIA),
        ("l4", 24 * _GB, 300, 121, 32, _NVIDIA_PCIE),
        ("rtx4090", 24 * _GB, 1008, 165, 32, _NVIDIA_PCIE),
    )
}
TPUS = ("v5e", "v5p", "v6e", "tpu7x")
GPUS = ("a100", "h100", "h200", "b200", "l4", "rtx4090")
_NUM_SIZES = {"v5e": (2, 2), "v6e": (2, 2), "v5p": (3, 3), "tpu7x": (3, 3)}
"""How many sizes a topology has."""
_DEVICES_OF_A_CHIP = {"tpu7x": 2}
"""If there are several."""
_NUM_LINKS = {"v5e": 4, "v6e": 4, "v5p": 6, "tpu7x": 6}
"""Links of a chip to its neighbours, two in each dimension."""
_RING = {"v5e": 16, "v6e": 16, "v5p": 4, "tpu7x": 4}
"""From how many chips on a dimension is closed to a ring."""
_NETWORK = {"a100": 25e9, "h100": 50e9, "h200": 50e9, "b200": 50e9, "l4": 12.5e9, "rtx4090": 12.5e9}
"""One network adapter for a GPU: of 200 Gb/s in a DGX A100, 400 in later ones (NVIDIA's data sheets); 100 for PCI Express cards."""
_ALIASES = {"a100-80gb": "a100", "h100-80gb": "h100"}


def kind_of(name: str) -> str:
    """The kind of a machine's devices, such as "v5e" of "v5e:2x4"; not necessarily a known one."""
    kind = name.partition(":")[0].lower()
    return _ALIASES.get(kind, kind)


def chip_of(name: str) -> Chip:
    """The chip of a topology ("v5e:2x4") or of a kind and a count ("h100:8"); "cpu:8" is this host's memory in eight parts.

    Raises:
        InvalidInputError: an unknown chip, or an invalid count.
    """
    kind = kind_of(name)
    if kind == "cpu":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        source = "this host's memory"
        return Chip(
            name=kind,
            memory_bytes=total // num_devices(name),
            bandwidth=0,
            operations=0,
            interconnect=0,
            source=source,
        )
    if kind not in CHIPS:
        raise InvalidInputError(
            f"Unknown chip {kind!r}.",
            "A plan needs a chip's memory size, bandwidth and peak operations.",
            f"Use one of {', '.join(CHIPS)} or cpu, such as v5e:2x4, h100:8 or cpu:8.",
        )
    return CHIPS[kind]


_KINDS = {
    "v5 lite": "v5e",
    "v5e": "v5e",
    "v5p": "v5p",
    "v5": "v5p",
    "v6": "v6e",
    "tpu7x": "tpu7x",
    "h200": "h200",
    "h100": "h100",
    "a100": "a100",
    "b200": "b200",
    "nvidia l4": "l4",
    "rtx 4090": "rtx4090",
}
"""Substring of JAX's device kind to chip name; the first match wins."""


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip with this JAX device kind ("TPU v5 lite", "NVIDIA H200"); None if unknown."""
    return next((CHIPS[name] for part, name in _KINDS.items() if part in device_kind.lower()), None)


def sizes_of(name: str) -> tuple[int, ...]:
    """The sizes in a name such as "v5e:2x4" or "h100:2x8"; their product is the number of chips.

    Raises:
        InvalidInputError: the sizes are invalid.
    """
    sizes = (name.partition(":")[2] or "1").split("x")
    fewest, most = _NUM_SIZES.get(kind_of(name), (1, 2))
    if not all(size.isdigit() and int(size) > 0 for size in sizes) or not fewest <= len(sizes) <= most:
        raise InvalidInputError(
            f"{name!r} has no valid device count.",
            "TPUs are named by kind and topology, other devices by kind and count, or hosts and devices of each.",
            "Pass a name such as v5e:2x4, v5p:2x2x2, h100:8, h100:2x8 or cpu:8.",
        )
    return tuple(int(size) for size in sizes)


def num_devices(name: str) -> int:
    """The number of JAX devices of a topology or of a kind and a count.

    Raises:
        InvalidInputError: the sizes are invalid.
    """
    return math.prod(sizes_of(name)) * _DEVICES_OF_A_CHIP.get(kind_of(name), 1)


def links_of(name: str) -> Links:
    """The links of a machine's devices.

    A chip at the corner of a TPU slice has a neighbour on one side of each dimension, unless that is closed to a ring.

    Raises:
        InvalidInputError: an unknown chip, or an invalid count.
    """
    chip, kind, sizes = chip_of(name), kind_of(name), sizes_of(name)
    if kind not in TPUS:
        per_host = sizes[-1]
        return Links(
            bandwidth=chip.interconnect, sizes=(), per_host=per_host, network=_NETWORK.get(kind, chip.interconnect)
        )
    used = sum(0 if size == 1 else 2 if size >= _RING[kind] else 1 for size in sizes)
    count = num_devices(name)
    return Links(
        bandwidth=chip.interconnect * max(used, 1) / _NUM_LINKS[kind],
        sizes=(*sizes, *([_DEVICES_OF_A_CHIP[kind]] if kind in _DEVICES_OF_A_CHIP else [])),
        per_host=count,
        network=0.0,
    )
