"""Commands in processes of their own, which start with torch, transformers and JAX imported.

Importing them takes five seconds of a core, for every command that a test run starts. Here, a fork server imports
them once for each process of the run (and no module of hfax, nor starts JAX's backend). What these packages read from the
environment when they are imported is therefore that of the tests; `variables` are for hfax, which is imported by the command.

Tests whose claim is about the interpreter, its imports or Ctrl-C start one with `subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "torch", "transformers", "transformers.modeling_utils", "transformers.generation.utils",
        "transformers.models.llama.modeling_llama", "jax", "jax.experimental.serialize_executable", "torchax",
        "optax", "orbax.checkpoint", "fastapi", "uvicorn", "prometheus_client", "httpx",
    ]
)  # fmt: skip


def run(
    arguments: Sequence[object], variables: Mapping[str, str] | None = None, *, text: str = "", timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """A Python process from its start to its end, as `subprocess.run` with `capture_output` and `text`.

    Args:
        arguments: those of the interpreter, after `-W error` or not: `-m module ...`, `-c code ...` or `script ...`.
        variables: of its environment, beside those of this process: names that begin with "HFAX_", and XLA_FLAGS,
            which is read when JAX's backend starts.
        text: what it reads from stdin.
        timeout_s: seconds after which it is killed.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    with tempfile.TemporaryDirectory(prefix="hfax-process-") as folder:
        streams = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        for path in streams:
            path.write_text(text if path.name == "stdin" else "")
        process = _process(arguments, variables or {}, streams)
        try:
            process.join(timeout_s)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(list(map(str, arguments)), timeout_s, stderr=streams[2].read_bytes())
        finally:
            process.kill()
            process.join(20)
        out, err = (path.read_text() for path in streams[1:])
        return subprocess.CompletedProcess(list(map(str, arguments)), process.exitcode, out, err)


class Started:
    """A Python process, with the part of `subprocess.Popen` that tests need and stderr as a pipe of text.

    Args:
        arguments: as for `run`.
        variables: as for `run`.
    """

    def __init__(self, arguments: Sequence[object], variables: Mapping[str, str]) -> None:
        reading, writing = _FORKS.Pipe(duplex=False)
        with reading, writing:
            self._process = _process(arguments, variables, [None, None, writing])
            self.stderr = os.fdopen(os.dup(reading.fileno()))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, or None."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Its exit status, once it has ended."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"it has not ended in {timeout_s} s"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _process(arguments: Sequence[object], variables: Mapping[str, str], streams: Sequence[object]):
    late = [name for name in variables if not (name.startswith("HFAX_") or name == "XLA_FLAGS")]
    assert not late, f"read when the packages were imported: {late}"
    process = _FORKS.Process(target=_become, args=(list(map(str, arguments)), {**os.environ, **variables}, streams))
    process.start()
    return process


def _become(arguments: list[str], environment: dict[str, str], streams: Sequence[object]) -> None:
    """In the process that was forked: what the interpreter does with a command line."""
    for descriptor, stream in enumerate(streams):
        if stream is not None:
            source = stream.fileno() if hasattr(stream, "fileno") else os.open(str(stream), os.O_RDWR)
            os.dup2(source, descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)
    if arguments[0] == "-W":
        warnings.simplefilter(arguments[1])
        arguments = arguments[2:]
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
