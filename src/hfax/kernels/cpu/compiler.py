"""Compiles the C++ kernels into a shared library. Imports no JAX: wheels are built with it."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from hfax.kernels.cpu.instruction_sets import InstructionSet

SOURCE = Path(__file__).with_name("kernels.cc")
HEADERS = (
    "amx.h",
    "common.h",
    "fp8.h",
    "lanes.h",
    "matmul.h",
    "matmul_amx.h",
    "norms.h",
    "packed.h",
    "packed_amx.h",
    "prompt_attention.h",
    "sides.h",
)
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffast-math",
    "-fno-finite-math-only",
    "-fno-associative-math",  # sums keep their order, so that a row's numbers do not depend on the rows beside it
    "-fno-strict-aliasing",
    "-fPIC",
    "-w",
)
_GCC_FLAGS = ("--param=avoid-fma-max-bits=0",)
"""For some processors GCC fuses multiplications and additions in one copy of a loop and not in another, which round differently."""
_COMPILE_SECONDS = 300
_FFI_VERSION = re.compile(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)")


def find_compiler() -> str | None:
    """The path of the C++ compiler: what CXX names, else c++, g++ or clang++; None if there is none."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@functools.cache
def version_of(compiler: str) -> str:
    """What the compiler says about itself."""
    command = [compiler, "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_SECONDS).stdout


def source_digest() -> str:
    """Identifies the kernels' source and the flags that every instruction set is compiled with."""
    sources = [path.read_text(encoding="utf-8") for path in (SOURCE, *map(SOURCE.with_name, HEADERS))]
    return hashlib.sha256("\n".join([*sources, *_FLAGS, *_GCC_FLAGS]).encode()).hexdigest()


def ffi_version(headers: Path) -> tuple[int, int]:
    """The major and minor version of XLA's FFI in jaxlib's include folder `headers`.

    Raises:
        OSError: the folder has no such header.
    """
    text = (headers / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    numbers = dict(_FFI_VERSION.findall(text))
    return int(numbers["MAJOR"]), int(numbers["MINOR"])


def compile_library(
    compiler: str, instructions: InstructionSet, headers: Path, library: Path, *, is_portable: bool = False
) -> None:
    """Compile the kernels for one instruction set.

    Args:
        compiler: path of the C++ compiler.
        instructions: what to compile for.
        headers: jaxlib's include folder, with XLA's FFI.
        library: the file to write; an object file is beside it meanwhile.
        is_portable: for other machines, without tuning for this one's processor.

    Raises:
        subprocess.SubprocessError: the compiler failed; its `stderr` says why.
    """
    of_compiler = _GCC_FLAGS if "Free Software Foundation" in version_of(compiler) else ()
    flags = (*_FLAGS, *of_compiler, *instructions.flags, *(() if is_portable else instructions.tuning))
    compiled = library.with_suffix(".o")
    _run([compiler, *flags, "-I", str(headers), "-c", str(SOURCE), "-o", str(compiled)])
    # Linked without -ffast-math: GCC before 13 would add start code by which the whole process rounds tiny numbers to 0.
    _run([compiler, "-shared", str(compiled), "-o", str(library)])
    compiled.unlink()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
