"""The C++ kernels as a shared library: compiled once for this machine's processor, kept beside the source, given to XLA.

Turns `kernels.cc` into FFI targets. Without a C++ compiler there are none; the callers then use plain JAX, and `problem` says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

from hfax.home import hfax_home
from hfax.kernels import target
from hfax.phases import phase

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cc")
_HEADERS = ("common.h", "matmul.h", "norms.h", "prompt_attention.h")
_TARGETS = (
    "hfax_linear",
    "hfax_linear_int8",
    "hfax_linear_int4",
    "hfax_linear_experts",
    "hfax_linear_experts_int8",
    "hfax_linear_experts_int4",
    "hfax_rms_norm",
    "hfax_rotate",
    "hfax_decode_attention",
    "hfax_cache_write",
    "hfax_pages_attention",
    "hfax_pages_write",
)
_PAIRS_TARGETS = ("hfax_matmul", "hfax_prompt_attention", "hfax_prompt_attention_gradients")
"""Only for processors that multiply pairs of bfloat16, and compilers that know how."""
_registered: set[str] = set()
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffast-math",
    "-fno-finite-math-only",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-w",
)
_COMPILE_SECONDS = 300


@functools.cache
def problem() -> str | None:
    """Why there are no kernels; None if there are. The first call compiles and registers them."""
    if os.environ.get("HFAX_CPU_KERNELS") == "0":
        return "they are turned off by HFAX_CPU_KERNELS=0"
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler was found (c++, g++ or clang++, or what CXX names)"
    try:
        library = ctypes.CDLL(str(_build(compiler)))
        for name in (*_TARGETS, *(name for name in _PAIRS_TARGETS if hasattr(library, name))):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
            _registered.add(name)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning("hfax's CPU kernels could not be built; decoding is slower without them (%s)", reason[:1])
        return f"{compiler} could not build them: {reason[0] if reason else type(error).__name__}"
    return None


def may_be_called() -> bool:
    """Whether the trace that goes on is for a program that may call the kernels, which have no gradients."""
    return _fits_program() and not target.is_differentiated() and problem() is None


def has_matmul() -> bool:
    """Whether the trace that goes on is for a program that may call `calls.matmul` and `calls.prompt_attention`."""
    return _fits_program() and problem() is None and _registered.issuperset(_PAIRS_TARGETS)


def _fits_program() -> bool:
    return target.is_for("cpu") and target.mesh() is None


@functools.cache
def digest() -> str:
    """Identifies the kernels that programs call; changes with their source and with what they are compiled by and for."""
    compiler = _compiler()
    sources = [path.read_text() for path in (_SOURCE, *map(_SOURCE.with_name, _HEADERS))]
    parts = [*sources, " ".join(_FLAGS), jax.__version__, processor_features(), str(compiler)]
    if compiler is not None:
        parts.append(subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def processor_features() -> str:
    """The instructions that this machine's processor has, by name, as the system lists them."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor()


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _build(compiler: str) -> Path:
    """The library's path; compiled if it is not there yet."""
    name = f"kernels-{digest()}.so"
    folders = (_SOURCE.parent / "__pycache__", hfax_home() / "kernels")
    for folder in folders:
        if (folder / name).is_file() and _is_own(folder / name):
            return folder / name
    folder = next((f for f in folders if _is_writable(f)), None)
    if folder is None:
        raise OSError(f"neither {folders[0]} nor {folders[1]} can be written")
    with phase("compile", "CPU kernels"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        command = [compiler, *_FLAGS, "-I", jax.ffi.include_dir(), str(_SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        made.replace(folder / name)
    return folder / name


def _is_own(path: Path) -> bool:
    """Nobody else's code is loaded: the file is this user's or the system's."""
    return not hasattr(os, "getuid") or path.stat().st_uid in (os.getuid(), 0)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
