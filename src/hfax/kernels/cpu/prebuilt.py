"""The kernels as libraries that a wheel brings, one for each instruction set of its architecture.

They have no Python ABI. A library fits if it was compiled from the sources beside it, and for a version of XLA's FFI that the
installed jaxlib supports: XLA keeps older minor versions working. Imports no JAX: wheels are built with it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from hfax.kernels.cpu import compiler
from hfax.kernels.cpu.instruction_sets import InstructionSet

FOLDER = Path(__file__).with_name("libraries")
MANIFEST = "manifest.json"


def library_name(instructions: InstructionSet) -> str:
    """File name of the library for an instruction set."""
    return f"kernels-{instructions.name}.so"


def find(instructions: InstructionSet, headers: Path) -> Path | None:
    """The wheel's library for exactly this instruction set; None if there is none that fits jaxlib's include folder `headers`."""
    path = FOLDER / library_name(instructions)
    return path if path.is_file() and _fits(FOLDER / MANIFEST, headers) else None


def write_manifest(folder: Path, headers: Path) -> None:
    """Record what the libraries in `folder` were compiled from, and for which version of XLA's FFI."""
    made = {"source": compiler.source_digest(), "ffi": compiler.ffi_version(headers)}
    (folder / MANIFEST).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


@functools.cache
def _fits(manifest: Path, headers: Path) -> bool:
    try:
        made = json.loads(manifest.read_text(encoding="utf-8"))
        major, minor = compiler.ffi_version(headers)
    except (OSError, ValueError):  # no such file, or a part of one
        return False
    return made["source"] == compiler.source_digest() and made["ffi"][0] == major and made["ffi"][1] <= minor
