"""Processes that call the kernels in place of XLA (`host.cc`): for arm64, by qemu on a machine that is none, compiled as there."""

from __future__ import annotations

import contextlib
import platform
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hfax.kernels.cpu import calls, compiler, library
from hfax.kernels.cpu.instruction_sets import INSTRUCTION_SETS

NEON = next(s for s in INSTRUCTION_SETS if s.name == "neon")
IS_NATIVE = platform.machine() in NEON.machines
_COMPILER, _EMULATOR, _SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
_DTYPES = {"bool": 1, "int8": 2, "int32": 4, "int64": 5, "uint8": 6, "float16": 10, "float32": 11, "bfloat16": 16}
_DTYPES["float8_e4m3fn"] = 20
"""Codes of XLA's FFI."""


class Host:
    """A process that has loaded the kernels.

    Args:
        folder: for its program.
        compiled_by: the C++ compiler, of the same machine as the library.
        kernels: the library.
        most_threads: those that kernels may use, of the three that there are; 0: all.
        emulator: what runs the program, and its arguments; empty: this machine.
    """

    def __init__(
        self, folder: Path, compiled_by: str, kernels: Path, *, most_threads: int = 0, emulator: tuple[str, ...] = ()
    ) -> None:
        program, source = folder / "host", Path(__file__).with_name("host.cc")
        subprocess.run([compiled_by, "-std=c++17", "-I", library._headers(), source, "-o", program, "-ldl"], check=True)
        command = [*emulator, program, kernels, str(most_threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.lock = threading.Lock()
        self.num_helpers = 0

    def close(self) -> None:
        """End the process, which ends by itself with its input."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.process.stdout.close()

    def call(self, name: str, shapes: Any, arrays: list[np.ndarray], attributes: dict[str, Any]) -> list[np.ndarray]:
        """The results of the handler of that name; `num_helpers` are the threads that it asked for beside its own."""
        given = [_number(len(arrays)), *(_head(a) + a.tobytes() for a in arrays)]
        wanted = [_number(len(shapes)), *(_head(s) for s in shapes)]
        named = [_number(len(attributes)), *(_attribute(*item) for item in sorted(attributes.items()))]
        with self.lock:
            stdin, stdout = self.process.stdin, self.process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(b"".join([_text(name), *given, *wanted, *named]))
            stdin.flush()
            (length,) = struct.unpack("<q", stdout.read(8))
            if length:
                raise ValueError(stdout.read(length).decode())
            (self.num_helpers,) = struct.unpack("<q", stdout.read(8))
            return [np.frombuffer(stdout.read(_bytes(s)), s.dtype).reshape(s.shape) for s in shapes]


def emulated_host(folder: Path) -> Host:
    """A process of an emulated arm64 machine."""
    for tool in (_COMPILER, _EMULATOR):
        assert shutil.which(tool), f"{tool} is missing: run `make qemu`"
    found, made = str(shutil.which(_COMPILER)), folder / "kernels.so"
    compiler.compile_library(found, NEON, library._headers(), made)
    return Host(folder, found, made, emulator=(_EMULATOR, "-L", _SYSTEM))


@contextlib.contextmanager
def called(host: Host) -> Iterator[None]:
    """Traces within the block call an emulated host, unless they are `compiled_for` another instruction set."""
    load, ffi_call = library._load, calls._ffi_call

    def emulated_load(instructions: Any) -> library.Kernels:
        return (
            library.Kernels(instruction_set=NEON.name, origin="compiled")
            if instructions is NEON
            else load(instructions)
        )

    def call(name: str, result: Any, **settings: Any) -> Any:
        if library.instruction_set() is not NEON:
            return ffi_call(name, result, **settings)

        def run(*arrays: jax.Array, **attributes: Any) -> Any:
            leaves, tree = jax.tree.flatten(result)

            def on_host(*values: Any) -> Any:
                return tree.unflatten(host.call(name, leaves, [np.asarray(v) for v in values], attributes))

            return jax.pure_callback(on_host, result, *arrays)

        return run

    token = library._instruction_set.set(NEON)
    library._load, calls._ffi_call = emulated_load, call
    try:
        yield
    finally:
        library._load, calls._ffi_call = load, ffi_call
        library._instruction_set.reset(token)


def _number(value: int) -> bytes:
    return struct.pack("<q", value)


def _text(text: str) -> bytes:
    return _number(len(text)) + text.encode()


def _bytes(array: Any) -> int:
    return int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize


def _head(array: Any) -> bytes:
    numbers = [_DTYPES[np.dtype(array.dtype).name], len(array.shape), *array.shape, _bytes(array)]
    return b"".join(map(_number, numbers))


def _attribute(name: str, value: Any) -> bytes:
    scalar = np.asarray(value)
    return _text(name) + _number(_DTYPES[scalar.dtype.name]) + scalar.tobytes().ljust(8, b"\0")
