"""The instruction sets that the C++ kernels are compiled for, and those that this machine's processor supports.

Imports neither JAX nor a compiler: wheels are built with it.
"""

from __future__ import annotations

import dataclasses
import functools
import platform
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstructionSet:
    """An instruction set that the kernels can be compiled for.

    Args:
        name: its value of `HFAX_CPU_TARGET`.
        machines: `platform.machine()` values of processors that may support it.
        flags: compiler flags that select it.
        tuning: compiler flags for the machine that compiles; left out of wheels.
        features: required processor features, as listed by Linux.
    """

    name: str
    machines: tuple[str, ...]
    flags: tuple[str, ...]
    tuning: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()


_X86 = ("x86_64", "AMD64")
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16", "avx512vbmi"}  # Cooper Lake alone has the first without the second
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}


def _x86(name: str, *flags: str, features: frozenset[str]) -> InstructionSet:
    return InstructionSet(name=name, machines=_X86, flags=flags, tuning=("-mtune=native",), features=features)


NATIVE = InstructionSet(name="native", machines=(), flags=("-march=native",))
"""Everything that this machine's processor supports."""
INSTRUCTION_SETS = (
    _x86("avx2", "-march=haswell", features=_AVX2),
    _x86("avx2-vnni", "-march=haswell", "-mavxvnni", features=_AVX2 | {"avx_vnni"}),
    _x86("avx512", "-march=skylake-avx512", features=_AVX512),
    _x86("avx512-vnni", "-march=cascadelake", features=_VNNI),
    _x86("avx512-bf16", "-march=cooperlake", "-mavx512vbmi", features=_BF16),
    _x86("amx", "-march=cooperlake", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8", features=_AMX),
    InstructionSet(name="neon", machines=("aarch64", "arm64"), flags=("-march=armv8-a",)),
)
"""Of each architecture from the least to the most capable: the last that a processor supports is the best for it."""


def sets_of_machine() -> tuple[InstructionSet, ...]:
    """The `INSTRUCTION_SETS` of this machine's architecture, whether its processor supports them or not."""
    return tuple(s for s in INSTRUCTION_SETS if platform.machine() in s.machines)


def available_instruction_sets() -> tuple[InstructionSet, ...]:
    """The `INSTRUCTION_SETS` that this processor supports."""
    has = features()
    return tuple(s for s in sets_of_machine() if s.features <= has)


@functools.cache
def processor_features() -> str:
    """The instruction set extensions of this machine's processor, as listed by the system."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor()


def features() -> frozenset[str]:
    """The words of `processor_features`."""
    return frozenset(processor_features().partition(":")[2].split())
