"""The C++ kernels as a shared library, registered with XLA: the wheel's, else compiled once for this processor and cached.

Without either there are none; callers then use plain JAX, and `problem` says why. `HFAX_CPU_TARGET` sets the instruction set;
default: the best of the wheel's that the processor supports, or everything it supports where the kernels are compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

import jax

from hfax.errors import InvalidInputError
from hfax.home import hfax_home
from hfax.kernels import target
from hfax.kernels.cpu import compiler, prebuilt, threads
from hfax.kernels.cpu.instruction_sets import (
    INSTRUCTION_SETS,
    NATIVE,
    InstructionSet,
    available_instruction_sets,
    processor_features,
)
from hfax.phases import phase

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

logger = logging.getLogger(__name__)

_TARGETS = (
    "hfax_linear",
    "hfax_linear_packed",
    "hfax_linear_experts",
    "hfax_linear_experts_packed",
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
_instruction_set: ContextVar[InstructionSet | None] = ContextVar("hfax_instruction_set", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of this process for one instruction set.

    Args:
        instruction_set: its name.
        origin: "wheel": the installed wheel brought the library; "cache": an earlier process compiled it; "compiled": this one did;
            None: there is none.
        path: the library; None if there is none.
        problem: why there is none; None if there is one.
    """

    instruction_set: str
    origin: Literal["wheel", "cache", "compiled"] | None = None
    path: str | None = None
    problem: str | None = None

    def __str__(self) -> str:
        if self.problem is not None:
            return f"none for {self.instruction_set}: {self.problem}"
        origins = {"wheel": "from the wheel", "cache": "compiled earlier", "compiled": "compiled now"}
        return f"{self.instruction_set}, {origins[self.origin or 'cache']} ({self.path})"


def instruction_set() -> InstructionSet:
    """The instruction set of the kernels: `HFAX_CPU_TARGET`, else the best of the wheel's for this processor, else `NATIVE`.

    Raises:
        InvalidInputError: this processor does not support `HFAX_CPU_TARGET`.
    """
    if (chosen := _instruction_set.get()) is not None:
        return chosen
    return _by_name(name) if (name := os.environ.get("HFAX_CPU_TARGET")) else _default()


@functools.cache
def _default() -> InstructionSet:
    brought = [s for s in available_instruction_sets() if prebuilt.find(s, _headers()) is not None]
    return brought[-1] if brought else NATIVE


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
    """Why the kernels are not available; None if they are. The first call loads them, and compiles them if needed.

    Raises:
        InvalidInputError: this processor does not support `HFAX_CPU_TARGET`, or `HFAX_NUM_THREADS` is no number of threads.
    """
    return kernels().problem


def kernels() -> Kernels:
    """The kernels for the current instruction set. The first call loads them, and compiles them if needed.

    Raises:
        InvalidInputError: this processor does not support `HFAX_CPU_TARGET`, or `HFAX_NUM_THREADS` is no number of threads.
    """
    instructions = instruction_set()
    if os.environ.get("HFAX_CPU_KERNELS") == "0":
        return Kernels(instruction_set=instructions.name, problem="they are turned off by HFAX_CPU_KERNELS=0")
    return _load(instructions)


@functools.cache
def _load(instructions: InstructionSet) -> Kernels:
    """Register the kernels for the instruction set with XLA, from wherever they are."""
    name = instructions.name
    if (brought := prebuilt.find(instructions, _headers())) is not None:
        try:
            _register(brought, instructions)
            return Kernels(instruction_set=name, origin="wheel", path=str(brought))
        except (OSError, AttributeError, jax.errors.JaxRuntimeError) as error:
            logger.warning(
                "hfax's CPU kernels are compiled, since the wheel's cannot be loaded (%s)", _first_line(error)
            )
    found = compiler.find_compiler()
    if found is None:
        reason = "no C++ compiler was found (c++, g++ or clang++, or what CXX names), and no wheel brought them"
        return Kernels(instruction_set=name, problem=reason)
    try:
        path, is_new = _build(found, instructions)
        _register(path, instructions)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        reason = _first_line(error)
        logger.warning("hfax's CPU kernels could not be built; decoding is slower without them (%s)", reason)
        return Kernels(instruction_set=name, problem=f"{found} could not build them: {reason}")
    return Kernels(instruction_set=name, origin="compiled" if is_new else "cache", path=str(path))


def _register(path: Path, instructions: InstructionSet) -> None:
    library = ctypes.CDLL(str(path))
    library.hfax_set_most_threads(ctypes.c_int64(threads.num_threads()))
    for name in _TARGETS:
        capsule = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(_name_for(name, instructions), capsule, platform="cpu")


def _first_line(error: Exception) -> str:
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _headers() -> Path:
    return Path(jax.ffi.include_dir())


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
    parts = [jax.__version__, processor_features()]
    if (brought := prebuilt.find(instructions, _headers())) is not None:
        parts.append(hashlib.sha256(brought.read_bytes()).hexdigest())
    else:
        found = compiler.find_compiler()
        by = "" if found is None else compiler.version_of(found)
        parts += [compiler.source_digest(), *instructions.flags, *instructions.tuning, str(found), by]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(found: str, instructions: InstructionSet) -> tuple[Path, bool]:
    """The path of the library in the cache, and whether it was compiled now."""
    name = f"kernels-{_digest(instructions)}.so"
    folders = _folders()
    for folder in folders:
        if (folder / name).is_file() and _is_own(folder / name):
            return folder / name, False
    folder = next((f for f in folders if _is_writable(f)), None)
    if folder is None:
        raise OSError(f"none of {', '.join(map(str, folders))} can be written")
    with _locked(folder / f"{name}.lock"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if (folder / name).is_file():  # another process has compiled it meanwhile
            return folder / name, False
        made = Path(scratch) / name
        with phase("compile", f"CPU kernels ({instructions.name})"):
            compiler.compile_library(found, instructions, _headers(), made)
        made.replace(folder / name)
    return folder / name, True


def _folders() -> tuple[Path, ...]:
    """Folders for compiled kernels, in order of preference."""
    return compiler.SOURCE.parent / "__pycache__", hfax_home() / "kernels"


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
