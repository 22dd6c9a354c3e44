"""Worker processes for work whose cost a client chooses, behind a bounded and fair queue.

A task that exceeds its processor time or memory is killed with its worker, and answered with an error; the next task gets a new
worker. Clients wait in turns: a free worker takes the next task of the client that was served longest ago, so one client cannot
keep the others out. One worker never takes expensive tasks, so that cheap ones do not wait behind them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from hfax.server import worker_process
from hfax.server.failures import ApiError

logger = logging.getLogger(__name__)

_PATIENCE = 10.0
_PATIENCE_S = 10.0
"""By the clock, a task may take this many times its processor time, and so many seconds more: on a busy machine it gets little of a
core."""
_ENDS = {-signal.SIGPROF: "cpu", -signal.SIGKILL: "late"}
"""Outcome of a task by its worker's exit code: its timer, or somebody else, such as the kernel. Otherwise memory."""
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 2.0
_THREADS_OFF = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of the worker processes; threads do not survive a fork."""


@dataclasses.dataclass(eq=False)
class _Task:
    client: str
    is_expensive: bool
    cpu_s: float
    data: bytes
    answer: asyncio.Future[Any]


class WorkerPool:
    """Worker processes that run the methods of one object. For use from one event loop, but for `start` and `close`.

    Args:
        num_workers: number of worker processes, at least 2.
        memory_bytes: memory that a worker may use for a task.
        max_waiting: maximum number of waiting tasks; of one client, half of them.
    """

    def __init__(self, *, num_workers: int, memory_bytes: int, max_waiting: int) -> None:
        self.num_workers, self.memory_bytes, self.max_waiting = num_workers, memory_bytes, max_waiting
        self.num_killed = 0
        """Workers that ended because of their task."""
        self._waiting: dict[str, collections.deque[_Task]] = {}
        self._served: dict[str, int] = {}
        """For each client with a running or waiting task, the number of its last started one; none if it has just come."""
        self._num_served = 0
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._running: dict[_Task, asyncio.Future[None]] = {}
        self._forks: _ForkServer | None = None

    def start(self, target: Any) -> None:
        """Start the process that workers are forked from, and wait until it is ready. Blocks.

        Args:
            target: the object whose methods tasks name; it is pickled.

        Raises:
            RuntimeError: the process did not start.
        """
        self._forks = _ForkServer(pickle.dumps(target, protocol=5))
        self._forks.start()

    def close(self) -> None:
        """End all workers at once; running tasks fail. Thread-safe."""
        self._is_closed = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._close_connections)
        if self._forks is not None:
            self._forks.close()

    def _close_connections(self) -> None:
        for worker in self._workers:
            worker.close()

    @property
    def num_busy(self) -> int:
        """Number of workers that run a task."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of waiting tasks."""
        return sum(map(len, self._waiting.values()))

    @property
    def is_exhausted(self) -> bool:
        """Whether new tasks are refused."""
        return self.num_waiting >= self.max_waiting

    async def run(self, kind: str, *arguments: Any, client: str, is_expensive: bool, cpu_s: float, what: str) -> Any:
        """Run a method in a worker.

        Args:
            kind: the method's name.
            arguments: its arguments.
            client: whose task it is; clients are served in turns.
            is_expensive: the task may need much processor time.
            cpu_s: processor time of the task, in seconds.
            what: description of the work, for errors.

        Raises:
            ApiError: the method raised it; or 400, the task exceeded its limits; 429, too many of this client's tasks are
                waiting; 503, too many tasks are waiting, or the machine is too busy.
        """
        if self._is_closed:
            raise _busy(503, "The server is stopping.")
        self._loop = asyncio.get_running_loop()
        own = self._waiting.get(client, ())
        if len(own) >= max(self.max_waiting // 2, 1):
            raise _busy(429, "Too many of your requests are waiting to be read. Retry later.")
        if self.is_exhausted:
            raise _busy(503, "Too many requests are waiting to be read. Retry later.")
        data = pickle.dumps((kind, arguments, cpu_s), protocol=5)
        task = _Task(client, is_expensive, cpu_s, data, asyncio.Future())
        self._waiting.setdefault(client, collections.deque()).append(task)
        self._dispatch()
        try:
            outcome, value = await task.answer
        except asyncio.CancelledError:
            self._drop(task)
            raise
        if outcome == "done":
            return value
        if outcome == "error":
            status, message, param, code, headers = value
            raise ApiError(status, message, param=param, code=code, headers=headers)
        if outcome == "cpu":
            raise ApiError(400, f"{what} took more than {cpu_s:g} s of processor time.", code="too_expensive")
        if outcome == "memory":
            raise ApiError(400, f"{what} took more than {self.memory_bytes >> 20} MB of memory.", code="too_expensive")
        raise _busy(503, f"{what} took too long, since the server is busy. Retry later.")

    def _dispatch(self) -> None:
        """Give waiting tasks to free workers."""
        while self.num_busy < self.num_workers and (task := self._next()) is not None:
            self._running[task] = asyncio.ensure_future(self._work(task))

    def _next(self) -> _Task | None:
        """Remove and return the next task, of the client that was served longest ago."""
        takes_expensive = sum(task.is_expensive for task in self._running) < self.num_workers - 1
        for client in sorted(self._waiting, key=lambda name: self._served.get(name, -1)):
            tasks = self._waiting[client]
            for task in tasks:
                if takes_expensive or not task.is_expensive:
                    tasks.remove(task)
                    self._num_served += 1
                    self._served[client] = self._num_served
                    if not tasks:
                        del self._waiting[client]
                    return task
        return None

    def _drop(self, task: _Task) -> None:
        """Remove a task that nobody waits for any more, if it has not started."""
        tasks = self._waiting.get(task.client, ())
        if task not in tasks:
            return
        self._waiting[task.client].remove(task)
        if not tasks:
            del self._waiting[task.client]
            self._forget(task.client)

    def _forget(self, client: str) -> None:
        """Drop what is known of a client if none of its tasks is running or waiting."""
        if client not in self._waiting and all(task.client != client for task in self._running):
            self._served.pop(client, None)

    async def _work(self, task: _Task) -> None:
        outcome: tuple[str, Any] = ("late", None)
        try:
            if not task.answer.cancelled():  # its client may have left since it was dispatched
                outcome = await self._ask(task)
        except Exception as error:
            logger.error("a worker process failed: %s: %s", type(error).__name__, error)
        finally:
            del self._running[task]
            self._forget(task.client)
            if not task.answer.done():
                task.answer.set_result(outcome)
            self._dispatch()

    async def _ask(self, task: _Task) -> tuple[str, Any]:
        assert self._forks is not None
        worker = self._idle.pop() if self._idle else await self._make_worker()
        keeps = False
        try:
            keeps, answer = await asyncio.wait_for(worker.ask(task.data), _PATIENCE_S + task.cpu_s * _PATIENCE)
            return answer
        except TimeoutError:
            self.num_killed += 1
            return "late", None
        except (EOFError, ConnectionError):  # IncompleteReadError is an EOFError
            self.num_killed += 1
            return _ENDS.get(await self._end(worker), "memory"), None
        finally:
            if keeps:
                self._idle.append(worker)
            else:
                await self._end(worker)

    async def _end(self, worker: _Worker) -> int:
        """End a worker, if it has not ended; returns its exit code, negative for a signal."""
        if worker.code is None:
            assert self._forks is not None
            worker.code = await asyncio.to_thread(self._forks.reap, worker.pid)
            worker.close()
            self._workers.discard(worker)
        return worker.code

    async def _make_worker(self) -> _Worker:
        assert self._forks is not None
        ours, theirs = socket.socketpair()
        try:
            worker = await _Worker.open(await asyncio.to_thread(self._forks.fork, theirs), ours)
        except BaseException:
            ours.close()  # the worker, if there is one, ends
            raise
        self._workers.add(worker)
        if self._is_closed:
            worker.close()
        await worker.send(self.memory_bytes)
        return worker


class _Worker:
    """One worker process, and the connection to it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid, self._reader, self._writer = pid, reader, writer
        self.code: int | None = None
        """Its exit code, once it has ended."""

    @staticmethod
    async def open(pid: int, connection: socket.socket) -> _Worker:
        return _Worker(pid, *await asyncio.open_connection(sock=connection))

    async def send(self, value: Any) -> None:
        await self._write(pickle.dumps(value, protocol=5))

    async def ask(self, data: bytes) -> tuple[bool, tuple[str, Any]]:
        """Send a pickled task; returns whether the worker takes another one, and the answer."""
        await self._write(data)
        head = worker_process.ANSWER
        is_last, length = head.unpack(await self._reader.readexactly(head.size))
        return not is_last, pickle.loads(await self._reader.readexactly(length))

    async def _write(self, data: bytes) -> None:
        self._writer.write(worker_process.LENGTH.pack(len(data)))
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


class _ForkServer:
    """The process that workers are forked from; it is replaced if it ends. Thread-safe.

    Args:
        target: what it gets, pickled.
    """

    def __init__(self, target: bytes) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process, and wait until it is ready.

        Raises:
            RuntimeError: it did not start.
        """
        with self._lock:
            self._start()

    def fork(self, connection: socket.socket) -> int:
        """Fork a worker for this end of a connection, which is closed here; returns its process id."""
        with self._lock, connection:
            try:
                return self._fork(connection)
            except (OSError, EOFError):
                if self._is_closed:
                    raise
                logger.warning("the process that reads requests ended; it is started again")
                self._end()
                self._start()
                return self._fork(connection)

    def reap(self, pid: int) -> int:
        """End a worker; returns its exit code, negative for the signal that it ended with."""
        with self._lock, contextlib.suppress(OSError, EOFError):
            if self._control is not None:
                self._control.sendall(worker_process.REAP)
                worker_process.send(self._control, pid)
                return worker_process.receive(self._control)
        return -signal.SIGKILL  # the process has ended, and with it its workers

    def close(self) -> None:
        """End the process and its workers."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # its standard error is the server's; without -m's warning of an import of the module before
            command = [
                sys.executable,
                "-c",
                "from hfax.server.worker_process import main; main()",
                str(theirs.fileno()),
            ]
            environment = {**os.environ, **_THREADS_OFF, "JAX_PLATFORMS": "cpu"}
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._control = ours
        ours.settimeout(_START_TIMEOUT_S)
        try:
            ours.sendall(worker_process.LENGTH.pack(len(self._target)) + self._target)
            problem = worker_process.receive(ours)
        except (OSError, EOFError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self._end()
            raise RuntimeError(f"The process that reads requests did not start: {problem}")

    def _fork(self, theirs: socket.socket) -> int:
        if self._control is None:
            raise OSError("closed")
        socket.send_fds(self._control, [worker_process.FORK], [theirs.fileno()])
        return worker_process.receive(self._control)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)  # it ends its workers
            self._process.kill()
            self._process.wait()
            self._process = None


def _busy(status: int, message: str) -> ApiError:
    return ApiError(status, message, code="busy", headers={"Retry-After": "1"})
