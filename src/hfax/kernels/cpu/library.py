"""The C++ kernels as a shared library: compiled once for this machine's processor, cached, and registered with XLA.

Compiles `kernels.cc` into FFI targets. Without a C++ compiler there are none; callers then use plain JAX, and `problem` says why.
`HFAX_CPU_TARGET` sets the instruction set to compile for; default: everything the processor supports.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import jax

from hfax.errors import InvalidInputError
from hfax.home import hfax_home
from hfax.kernels import target
from hfax.phases import phase

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cc")
_HEADERS = ("common.h", "lanes.h", "matmul.h", "norms.h", "packed.h", "prompt_attention.h")
_TARGETS = (
    "hfax_linear",
    "hfax_linear_int8",
    "hfax_linear_int4",
    "hfax_linear_experts",
    "hfax_linear_experts_int8",
    "hfax_linear_experts_int4",
    "hfax_exp",
    "hfax_rms_norm",
    "hfax_row_sums",
    "hfax_rotate",
    "hfax_decode_attention",
    "hfax_cache_write",
    "hfax_pages_attention",
    "hfax_pages_write",
    "hfax_matmul",
    "hfax_prompt_attention",
    "hfax_prompt_attention_gradients",
)
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffast-math",
    "-fno-finite-math-only",
    "-fno-associative-math",  # sums keep their order, so that a row's numbers do not depend on the rows beside it
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-w",
)
_GCC_FLAGS = ("--param=avoid-fma-max-bits=0",)
"""For some processors GCC fuses multiplications and additions in one copy of a loop and not in another, which round differently."""
_COMPILE_SECONDS = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstructionSet:
    """An instruction set that the kernels can be compiled for.

    Args:
        name: its value of `HFAX_CPU_TARGET`.
        machines: `platform.machine()` values of processors that may support it.
        flags: compiler flags that select it.
        features: required processor features, as listed by Linux.
    """

    name: str
    machines: tuple[str, ...]
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()


_X86 = ("x86_64", "AMD64")
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
NATIVE = InstructionSet(name="native", machines=(), flags=("-march=native",))
"""Everything that this machine's processor supports."""
INSTRUCTION_SETS = (
    InstructionSet(name="avx2", machines=_X86, flags=("-march=haswell", "-mtune=native"), features=_AVX2),
    InstructionSet(name="avx512", machines=_X86, flags=("-march=skylake-avx512", "-mtune=native"), features=_AVX512),
    InstructionSet(name="avx512-vnni", machines=_X86, flags=("-march=cascadelake", "-mtune=native"), features=_VNNI),
    InstructionSet(
        name="avx512-bf16",
        machines=_X86,
        flags=("-march=cooperlake", "-mtune=native"),
        features=_BF16,
    ),
    InstructionSet(name="neon", machines=("aarch64", "arm64"), flags=("-march=armv8-a",)),
)
"""From the oldest to the newest of each architecture. A processor that supports a set also supports those before it."""
_instruction_set: ContextVar[InstructionSet | None] = ContextVar("hfax_instruction_set", default=None)


def available_instruction_sets() -> tuple[InstructionSet, ...]:
    """The `INSTRUCTION_SETS` that this processor supports."""
    has = _features()
    return tuple(s for s in INSTRUCTION_SETS if platform.machine() in s.machines and s.features <= has)


def instruction_set() -> InstructionSet:
    """The instruction set that the kernels are compiled for: `HFAX_CPU_TARGET`, else `NATIVE`.

    Raises:
        InvalidInputError: this processor does not support `HFAX_CPU_TARGET`.
    """
    return _instruction_set.get() or _by_name(os.environ.get("HFAX_CPU_TARGET") or NATIVE.name)


@contextlib.contextmanager
def compiled_for(name: str) -> Iterator[None]:
    """Traces within the block call kernels compiled for the instruction set of that name."""
    token = _instruction_set.set(_by_name(name))
    try:
        yield
    finally:
        _instruction_set.reset(token)


def _by_name(name: str) -> InstructionSet:
    available = (NATIVE, *available_instruction_sets())
    if (found := next((s for s in available if s.name == name), None)) is not None:
        return found
    is_known = name in {s.name for s in INSTRUCTION_SETS}
    raise InvalidInputError(
        f"hfax's CPU kernels cannot be compiled for {name!r} (HFAX_CPU_TARGET).",
        "This machine's processor does not support it." if is_known else "There is no such instruction set.",
        f"Use one of {', '.join(s.name for s in available)}, or unset HFAX_CPU_TARGET.",
    )


def problem() -> str | None:
    """Why the kernels are not available; None if they are. The first call compiles and registers them.

    Raises:
        InvalidInputError: this processor does not support `HFAX_CPU_TARGET`.
    """
    if os.environ.get("HFAX_CPU_KERNELS") == "0":
        return "they are turned off by HFAX_CPU_KERNELS=0"
    return _loaded(instruction_set())


@functools.cache
def _loaded(instructions: InstructionSet) -> str | None:
    """Compile for the instruction set and register the kernels with XLA; why that failed, or None."""
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler was found (c++, g++ or clang++, or what CXX names)"
    try:
        library = ctypes.CDLL(str(_build(compiler, instructions)))
        for name in _TARGETS:
            capsule = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(_name_for(name, instructions), capsule, platform="cpu")
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning("hfax's CPU kernels could not be built; decoding is slower without them (%s)", reason[:1])
        return f"{compiler} could not build them: {reason[0] if reason else type(error).__name__}"
    return None


def ffi_name(name: str) -> str:
    """The XLA FFI target name of a kernel, for the current instruction set."""
    return _name_for(name, instruction_set())


def _name_for(name: str, instructions: InstructionSet) -> str:
    return name if instructions is NATIVE else f"{name}.{instructions.name}"


def may_be_called() -> bool:
    """Whether the current trace is for a program that may call the kernels, which have no gradients."""
    return _fits_program() and not target.is_differentiated() and problem() is None


def has_matmul() -> bool:
    """Whether the current trace may call `calls.matmul` and `calls.prompt_attention`, which have gradients."""
    return _fits_program() and problem() is None


def _fits_program() -> bool:
    return target.is_for("cpu") and target.mesh() is None


def digest() -> str:
    """Identifies the kernels that programs call; depends on their source, the compiler and the instruction set."""
    return _digest(instruction_set())


@functools.cache
def _digest(instructions: InstructionSet) -> str:
    compiler = _compiler()
    sources = [path.read_text() for path in (_SOURCE, *map(_SOURCE.with_name, _HEADERS))]
    parts = [*sources, *_FLAGS, *_GCC_FLAGS, *instructions.flags, jax.__version__, processor_features(), str(compiler)]
    if compiler is not None:
        parts.append(subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


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


def _features() -> frozenset[str]:
    return frozenset(processor_features().partition(":")[2].split())


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _build(compiler: str, instructions: InstructionSet) -> Path:
    """The path of the library, compiled if needed."""
    name = f"kernels-{_digest(instructions)}.so"
    folders = _folders()
    for folder in folders:
        if (folder / name).is_file() and _is_own(folder / name):
            return folder / name
    folder = next((f for f in folders if _is_writable(f)), None)
    if folder is None:
        raise OSError(f"none of {', '.join(map(str, folders))} can be written")
    with _locked(folder / f"{name}.lock"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if (folder / name).is_file():  # another process has compiled it meanwhile
            return folder / name
        made = Path(scratch) / name
        command = [
            compiler,
            *_FLAGS,
            *(_GCC_FLAGS if _is_gcc(compiler) else ()),
            *instructions.flags,
            "-I",
            jax.ffi.include_dir(),
            str(_SOURCE),
            "-o",
            str(made),
        ]
        with phase("compile", f"CPU kernels ({instructions.name})"):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        made.replace(folder / name)
    return folder / name


def _is_gcc(compiler: str) -> bool:
    version = subprocess.run(
        [compiler, "--version"], check=False, capture_output=True, text=True, timeout=_COMPILE_SECONDS
    )
    return "Free Software Foundation" in version.stdout


def _folders() -> tuple[Path, ...]:
    """Folders for compiled kernels, in order of preference."""
    return _SOURCE.parent / "__pycache__", hfax_home() / "kernels"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an inter-process lock, if the system supports it; the last process removes the file."""
    if fcntl is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _is_own(path: Path) -> bool:
    """Whether the file is owned by this user or the system, so that no other user's code is loaded."""
    return not hasattr(os, "getuid") or path.stat().st_uid in (os.getuid(), 0)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
