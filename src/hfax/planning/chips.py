"""What accelerators have, as their makers publish it. Figures are of one chip, which is one device of JAX."""

from __future__ import annotations

import dataclasses

from hfax.errors import InvalidInputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of accelerator.

    Args:
        name: as in topologies, "v5e".
        memory_bytes: of its main memory.
        bandwidth: bytes a second of that memory.
        operations: bfloat16 multiplications and additions a second.
        interconnect: bytes a second from this chip to the others, all links together, one direction.
        source: where the figures are published.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    operations: float
    interconnect: float
    source: str


_GOOGLE = "Google's documentation of Cloud TPU"
_NVIDIA = "NVIDIA's data sheet; dense operations, NVLink"
_GB, _GIB = 10**9, 1 << 30

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            memory_bytes=16 * _GIB,
            bandwidth=819e9,
            operations=197e12,
            interconnect=200e9,
            source=_GOOGLE,
        ),
        Chip(
            name="v5p",
            memory_bytes=95 * _GIB,
            bandwidth=2765e9,
            operations=459e12,
            interconnect=600e9,
            source=_GOOGLE,
        ),
        Chip(
            name="v6e",
            memory_bytes=32 * _GIB,
            bandwidth=1640e9,
            operations=918e12,
            interconnect=400e9,
            source=_GOOGLE,
        ),
        Chip(
            name="a100",
            memory_bytes=80 * _GB,
            bandwidth=2039e9,
            operations=312e12,
            interconnect=300e9,
            source=_NVIDIA,
        ),
        Chip(
            name="h100",
            memory_bytes=80 * _GB,
            bandwidth=3350e9,
            operations=989e12,
            interconnect=450e9,
            source=_NVIDIA,
        ),
        Chip(
            name="h200",
            memory_bytes=141 * _GB,
            bandwidth=4800e9,
            operations=989e12,
            interconnect=450e9,
            source=_NVIDIA,
        ),
        Chip(
            name="b200",
            memory_bytes=180 * _GB,
            bandwidth=7700e9,
            operations=2250e12,
            interconnect=900e9,
            source=_NVIDIA,
        ),
    )
}
TPUS = ("v5e", "v5p", "v6e")


def chip_of(name: str) -> Chip:
    """The chip of a topology ("v5e:2x4") or of a kind and a count ("h100:8").

    Raises:
        InvalidInputError: nobody's.
    """
    kind = name.partition(":")[0].lower()
    if kind not in CHIPS:
        raise InvalidInputError(
            f"There is no chip {kind!r} in hfax's list.",
            "A plan needs a chip's memory, bandwidth and operations.",
            f"Use one of {', '.join(CHIPS)}, for instance v5e:2x4 or h100:8.",
        )
    return CHIPS[kind]
