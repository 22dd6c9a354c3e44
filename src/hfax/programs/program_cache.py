"""Compiled programs: compiled once, cached in memory and on disk.

Turns a pure function and example arguments into an executable, unless one with the same key is cached. The key covers everything
that shapes the program: versions of the tracing and compiling packages, the device, the model's class and configuration, and the
shapes of the arguments. A program found on disk is loaded without tracing or compiling. This module does not know what a program
computes.

Files are pickles, as are JAX's serialized executables. The folder is created with owner-only permissions, and files owned by
another user are not opened.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import logging
import os
import pickle
import platform
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.interpreters import partial_eval

from hfax.errors import OutOfMemoryError
from hfax.kernels import precision
from hfax.kernels.cpu import library
from hfax.kernels.quantized import has_packed
from hfax.kernels.target import compiler_options, compiling_for
from hfax.load.placement import check_fits
from hfax.phases import phase
from hfax.programs.batch_invariance import batch_invariant
from hfax.programs.compiler_options import DECODE_OPTIONS
from hfax.programs.executables import load_executable
from hfax.programs.program_files import program_folder, read_program, write_program
from hfax.programs.program_records import why_missing
from hfax.programs.versions import source_digest, version_of
from hfax.sharding.layout import Layout, describe

logger = logging.getLogger(__name__)

_VERSIONED = ("hfax", "jax", "jaxlib", "libtpu", "torch", "torchax", "transformers")
_CHECKED_BYTES = 64 << 20
"""Programs that need less memory run without checking how much is free."""

_OUT_OF_MEMORY_FIX = (
    "Use a smaller batch, a shorter prompt, fewer max_new_tokens, or a smaller dtype (dtype='bfloat16')."
)


@dataclasses.dataclass(frozen=True)
class _Ahead:
    threads: ThreadPoolExecutor
    pending: list[Future[Program]]


_ahead: ContextVar[_Ahead | None] = ContextVar("hfax_compiling_ahead", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """An executable, and static information about its results from the trace.

    Args:
        name: name in logs.
        execute: takes and returns pytrees of arrays, like the function it was compiled from; for an abstract layout, returns
            abstract arrays.
        note: the `note` that the traced function returned (picklable).
        results: the abstract arrays of what it returns.
        packed: returns the file that `ProgramCache` reads on a machine with the devices; None for a program that is still compiled.
        unread: names of the inputs that no result depends on, if `get` got `inputs_at`.
    """

    name: str
    execute: Callable[..., Any]
    note: Any
    results: Any
    packed: Callable[[], bytes] | None = None
    unread: tuple[str, ...] = ()

    def run(self, *args: Any) -> Any:
        """The results for these arguments; within `compiling_ahead`, abstract arrays."""
        return self.execute(*args) if _ahead.get() is None else jax.tree.map(lambda array: array, self.results)


@contextlib.contextmanager
def compiling_ahead() -> Iterator[None]:
    """Within the block, programs are compiled and not run: they return abstract arrays.

    On one device, programs are compiled side by side, and the block ends when all are. Over several devices, how a program's
    results are sharded is known once it is compiled, so they are compiled one after the other.

    Raises:
        OutOfMemoryError: at the end of the block, see `ProgramCache.get`.
    """
    pending: list[Future[Program]] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="hfax-compile") as threads:
        token = _ahead.set(_Ahead(threads, pending))
        try:
            yield
        finally:
            _ahead.reset(token)
            concurrent.futures.wait(pending)
    for future in pending:
        future.result()


class ProgramCache:
    """The programs of one model. Several threads may ask for programs; each is compiled once.

    Args:
        model_key: identifies the traced module, by the names of what it depends on: class, configuration, source of custom code.
        layout: devices of the programs, and shardings of their arguments.
        bundled: folder of programs compiled ahead of time for this layout, searched first.
        before_tracing: called with the name of a program that is on no disk, before it is traced; it may raise.
    """

    def __init__(
        self,
        model_key: Mapping[str, str],
        layout: Layout,
        *,
        bundled: Path | None = None,
        before_tracing: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._model_key = dict(model_key)
        self._before_tracing = before_tracing
        self._layout = layout
        self._device = layout.device
        self.bundled = bundled
        self._programs: dict[str, Future[Program]] = {}
        self._lock = threading.Lock()
        self.made: dict[str, Program] = {}
        """Every program so far, by its file name in a bundle."""
        self.run_by_operation: set[str] = set()
        """Names of the forward passes that are no programs, since they read too many values (`hfax.tracing.host_reads`)."""

    def get(
        self,
        name: str,
        static_key: Any,
        function: Callable[..., tuple[Any, Any]],
        args: tuple[Any, ...],
        *,
        donate: tuple[int, ...] = (),
        is_loop: bool = False,
        is_step: bool = False,
        is_batch_invariant: bool = False,
        inputs_at: int | None = None,
    ) -> Program:
        """The program for `function` on arguments shaped like `args`.

        Args:
            name: name for logs and phases, such as `prefill[1, 64]`.
            static_key: everything that the trace depends on besides the shapes of the arguments; its repr must be complete.
            function: a pure function; returns `(results, note)` with a static note.
            args: example arguments: builtin containers of arrays, or `jax.ShapeDtypeStruct`s.
            donate: positions of donated arguments.
            is_loop: the program is a decoding loop over the weights, compiled without hoisting out of it on CPU.
            is_step: the program has few rows, as a decoding step; a loop's steps have.
            is_batch_invariant: a row's results must not depend on the number of rows (`hfax.programs.batch_invariance`).
            inputs_at: position of an argument, a dict of arrays, for which to compute the program's `unread`.

        Raises:
            OutOfMemoryError: the program does not fit the device, according to the compiler.
            UnsupportedModelError: with `is_batch_invariant`, results depend on the number of rows.
        """
        leaves, tree = jax.tree.flatten(args)
        shapes = [(tuple(leaf.shape), str(leaf.dtype), _split(leaf)) for leaf in leaves]
        options = (static_key, donate, is_loop, is_step, is_batch_invariant)
        memory_key = repr((name, options, tree, shapes, _jax_settings()))
        with self._lock:
            future = self._programs.get(memory_key)
            if is_new := future is None:
                future = self._programs[memory_key] = Future()
        ahead = _ahead.get()
        if is_new:
            file = f"{_digest(self._layout.key, repr(self._model_key), memory_key)}.program"
            parts = {
                "name": name,
                "options": repr(options),
                "shapes": repr((tree, shapes)),
                "settings of JAX and torch": repr(_jax_settings()),
                **self._model_key,
                "layout over devices": self._layout.key,
                **environment_parts(self._device),
            }
            try:
                if (program := self._find(name, file)) is None:
                    self._before_tracing(name)
                    self._explain(name, parts)
                    traced = self._trace(name, function, args, donate, is_batch_invariant, inputs_at)
                    xla_options = self._xla_options(args, is_loop, is_step)
                    if ahead is not None and self._layout.plan is None:
                        compiling = functools.partial(
                            self._compile_later, future, memory_key, traced, xla_options, file, parts
                        )
                        ahead.threads.submit(contextvars.copy_context().run, compiling)
                        ahead.pending.append(future)
                        return self._unfinished(traced, future)
                    program = self._compile(traced, xla_options, file, parts)
                self._keep(future, program, file)
            except BaseException as error:
                self._drop(future, memory_key, error)
                raise
        if not future.done():
            with phase("compile", name):  # by another thread
                return future.result()
        return future.result()

    def store(self, folder: Path) -> dict[str, str]:
        """Write every program so far into a bundle's folder; returns their names by file."""
        for file, program in self.made.items():
            assert program.packed is not None
            (folder / file).write_bytes(program.packed())
        return {file: program.name for file, program in self.made.items()}

    def _keep(self, future: Future[Program], program: Program, file: str) -> None:
        self.made[file] = program
        future.set_result(program)

    def _drop(self, future: Future[Program], memory_key: str, error: BaseException) -> None:
        """Fail for all who wait; the next call tries again."""
        with self._lock:
            del self._programs[memory_key]
        future.set_exception(error)

    def _compile_later(
        self,
        future: Future[Program],
        memory_key: str,
        traced: _Traced,
        xla_options: dict[str, str | bool],
        file: str,
        parts: dict[str, str],
    ) -> None:
        try:
            self._keep(future, self._compile(traced, xla_options, file, parts), file)
        except BaseException as error:
            self._drop(future, memory_key, error)

    def _unfinished(self, traced: _Traced, future: Future[Program]) -> Program:
        """A program that is being compiled; waits for that before it runs."""
        one = jax.sharding.SingleDeviceSharding(self._device)
        return Program(
            name=traced.name,
            execute=lambda *args: future.result().execute(*args),
            note=traced.note,
            results=jax.tree.map(lambda array: describe(array, one), traced.results),
            unread=traced.unread,
        )

    def _find(self, name: str, file: str) -> Program | None:
        if self._layout.is_described:
            return None
        if self.bundled is not None and (path := self.bundled / file).is_file():
            return _unpack(path.read_bytes(), name, self._layout, path)
        path = self._path(file)
        return read_program(path, lambda packed: _unpack(packed, name, self._layout, path))

    def _path(self, file: str) -> Path:
        """The path of the program on this machine."""
        return program_folder() / f"{_digest(environment_key(self._device), file)}.program"

    def _trace(
        self,
        name: str,
        function: Callable[..., tuple[Any, Any]],
        args: tuple[Any, ...],
        donate: tuple[int, ...],
        is_batch_invariant: bool,
        inputs_at: int | None,
    ) -> _Traced:
        notes: list[Any] = []

        def noting(*args: Any) -> Any:
            results, note = function(*args)
            notes.append(note)
            return results

        with (
            phase("trace", name),
            compiling_for(self._device, mesh=self._layout.mesh, is_batch_invariant=is_batch_invariant),
        ):
            whole = batch_invariant(noting) if is_batch_invariant else noting
            trace = jax.jit(whole, donate_argnums=donate).trace(*args)
            unread = () if inputs_at is None else _unread(trace.jaxpr.jaxpr, args, inputs_at)
            lowered = trace.lower()
        return _Traced(name=name, lowered=lowered, results=trace.out_info, note=notes[-1], unread=unread)

    def _explain(self, name: str, parts: dict[str, str]) -> None:
        if logger.isEnabledFor(logging.INFO) and not self._layout.is_described:
            logger.info("%s is made: %s", name, why_missing(program_folder(), parts))

    def _xla_options(self, args: tuple[Any, ...], is_loop: bool, is_step: bool) -> dict[str, str | bool]:
        is_packed = has_packed(args)
        options = compiler_options(self._device, has_few_rows=is_loop or is_step, has_packed_weights=is_packed)
        return options | (DECODE_OPTIONS.get(self._device.platform, {}) if is_loop else {})

    def _compile(
        self, traced: _Traced, xla_options: dict[str, str | bool], file: str, parts: dict[str, str]
    ) -> Program:
        name = traced.name
        with phase("compile", name):
            try:
                compiled = traced.lowered.compile(compiler_options=xla_options or None)
            except jax.errors.JaxRuntimeError as error:
                raise _as_out_of_memory(error, name) or error from error

        def packed() -> bytes:
            return pickle.dumps((*serialize_executable.serialize(compiled), traced.note, traced.unread))

        results = _results(compiled)
        static: dict[str, Any] = {"name": name, "note": traced.note, "unread": traced.unread, "results": results}
        if self._layout.is_described:
            return Program(**static, execute=lambda *args: results, packed=packed)
        write_program(self._path(file), packed, parts)
        return Program(**static, execute=_guarded(compiled, name, self._device), packed=packed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced:
    """A traced function, to be compiled."""

    name: str
    lowered: Any
    results: Any
    note: Any
    unread: tuple[str, ...]


def _results(compiled: Any) -> Any:
    """The abstract arrays that an executable returns."""
    return jax.tree.map(describe, compiled.out_info, compiled.output_shardings)


def _unread(jaxpr: Any, args: tuple[Any, ...], at: int) -> tuple[str, ...]:
    """Names in the dict `args[at]` that no result depends on."""
    _, is_read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return inputs_without([index for index, read in enumerate(is_read) if read], args, at)


def inputs_without(read: Collection[int], args: tuple[Any, ...], at: int) -> tuple[str, ...]:
    """Names in the dict of arrays `args[at]` that are not among the leaves of the arguments with indices `read`."""
    first = len(jax.tree.leaves(args[:at]))
    return tuple(name for index, name in enumerate(sorted(args[at]), first) if index not in read)


def _split(array: Any) -> str:
    """The sharding of an array over a mesh; empty for one device."""
    return str(getattr(getattr(array, "sharding", None), "spec", ""))


def environment_key(device: jax.Device) -> str:
    """Everything a program depends on besides the model: versions, device, compiler flags, hfax's kernels."""
    return _digest(*environment_parts(device).values())


def environment_parts(device: jax.Device) -> dict[str, str]:
    """What `environment_key` covers, by name."""
    return {**_environment_parts(device), "kernels of hfax": kernels_digest(device.platform)}


@functools.cache
def _environment_parts(device: jax.Device) -> dict[str, str]:
    return {
        **{name: version_of(name) for name in _VERSIONED},
        "device": f"{device.platform}/{device.device_kind}x{jax.device_count()}/{jax.process_count()}",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "Python": sys.version.split()[0],
        "machine": platform.machine(),
        "processor": library.processor_features() if device.platform == "cpu" else "",
        "source of hfax": source_digest(),
    }


def kernels_digest(platform: str) -> str:
    """Digest of hfax's kernels, or why there are none. Also registers them with XLA, which must happen before a program that calls
    them is loaded."""
    return (library.problem() or library.digest()) if platform == "cpu" else ""


def _jax_settings() -> tuple[Any, ...]:
    """Settings of JAX and torch that affect traces, and that a user may change at any time."""
    config: Any = jax.config
    return config.jax_enable_x64, precision.setting()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _guarded(compiled: Any, name: str, device: jax.Device) -> Callable[..., Any]:
    needed = _new_bytes(compiled)

    def run(*args: Any) -> Any:
        if needed > _CHECKED_BYTES:
            check_fits(needed, device, f"{name} (results and temporaries)", _OUT_OF_MEMORY_FIX)
        try:
            return compiled(*args)
        except jax.errors.JaxRuntimeError as error:
            raise _as_out_of_memory(error, name) or error from error

    return run


def _new_bytes(compiled: Any) -> int:
    """Memory of a program besides its arguments, in bytes; 0 if the runtime does not report it."""
    try:
        stats = compiled.memory_analysis()
        return stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    except (NotImplementedError, AttributeError, jax.errors.JaxRuntimeError):
        return 0


def _as_out_of_memory(error: Exception, name: str) -> OutOfMemoryError | None:
    if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
        return None
    return OutOfMemoryError(
        f"{name} does not fit the device's memory.",
        str(error).splitlines()[0],
        _OUT_OF_MEMORY_FIX,
    )


def _unpack(packed: bytes, name: str, layout: Layout, path: Path) -> Program:
    payload, in_tree, out_tree, note, unread = pickle.loads(packed)
    compiled = load_executable(payload, in_tree, out_tree, layout)
    execute = _guarded(compiled, name, layout.device)
    results = _results(compiled)
    return Program(name=name, execute=execute, note=note, results=results, packed=path.read_bytes, unread=unread)
