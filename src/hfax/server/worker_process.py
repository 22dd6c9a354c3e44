"""The processes that read requests: one that has the tokenizer, and workers forked from it, each with limits.

`python -m hfax.server.worker_process FD` is the first of them; FD is a Unix socket to the server. It gets a pickled
`RequestReader`, imports what that needs, and then forks a worker for each socket that it is sent, so that a worker is ready a few
milliseconds after the one that it replaces was killed. It must stay free of threads, which do not survive a fork.

A worker answers tasks one by one. A task that uses more processor time than it may ends the worker with SIGPROF; memory beyond the
limit is a MemoryError, or ends it. `workers` is the server's side.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

from hfax.server.memory import give_memory_back, mapped_bytes, resident_bytes

if TYPE_CHECKING:
    from hfax.server.request_reader import RequestReader

LENGTH = struct.Struct("!Q")
"""Before every pickled value but a worker's answers."""
ANSWER = struct.Struct("!?Q")
"""Before a worker's answer: whether the worker ends after it, and the answer's length."""
_KEPT_BYTES = 16 << 20
"""A worker whose memory has grown by more than this ends after its task, which gives the memory back."""
_NICENESS = 5
"""Added to a worker's niceness, so that the engine's threads come first."""
FORK, REAP = b"F", b"R"
"""Commands of the server: fork a worker for the socket sent with it; end a worker, and tell how it ended."""


def send(to: socket.socket, value: Any) -> None:
    """Send a pickled value with its length."""
    data = pickle.dumps(value, protocol=5)
    to.sendall(LENGTH.pack(len(data)) + data)


def receive(source: socket.socket) -> Any:
    """Receive what `send` sent.

    Raises:
        EOFError: the other side is closed.
    """
    (length,) = LENGTH.unpack(_exactly(source, LENGTH.size))
    return pickle.loads(_exactly(source, length))


def _exactly(source: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        if not (count := source.recv_into(view)):
            raise EOFError
        view = view[count:]
    return bytes(data)


def main() -> None:
    """Fork workers until the server ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when this ends, by closing the socket
        signal.signal(number, signal.SIG_IGN)
    try:
        reader: RequestReader = receive(control)
        reader.warm_up()
    except EOFError:
        return
    except BaseException as error:
        send(control, f"{type(error).__name__}: {error}")
        return
    send(control, "")
    workers: set[int] = set()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            command, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if command == FORK:
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _work(reader, socket.socket(fileno=descriptors[0]))
                os.close(descriptors[0])
                workers.add(pid)
                send(control, pid)
            elif command == REAP:
                pid = receive(control)
                code = -signal.SIGKILL  # of another process like this one, with which it ended
                if pid in workers:
                    workers.remove(pid)
                    os.kill(pid, signal.SIGKILL)  # it is not reaped yet, so the id is still its own
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                send(control, code)
            else:
                break
    for pid in workers:
        os.kill(pid, signal.SIGKILL)


def _work(reader: RequestReader, tasks: socket.socket) -> None:
    """Answer tasks until the server closes the socket."""
    code = 1
    try:
        os.nice(_NICENESS)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_memory(receive(tasks))
        before = resident_bytes()
        is_last = False
        while not is_last:
            kind, arguments, cpu_s = receive(tasks)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            data = pickle.dumps(_answer(reader, kind, arguments), protocol=5)
            signal.setitimer(signal.ITIMER_PROF, 0)
            del arguments
            if resident_bytes() > before + _KEPT_BYTES:
                give_memory_back()
            is_last = resident_bytes() > before + _KEPT_BYTES
            tasks.sendall(ANSWER.pack(is_last, len(data)) + data)
        code = 0
    except (EOFError, ConnectionError):
        code = 0
    finally:
        os._exit(code)


def _answer(reader: RequestReader, kind: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """The result, as ("done", result) or ("error", arguments of an ApiError) or ("memory", None)."""
    from hfax.server.failures import ApiError, as_api_error

    try:
        return "done", getattr(reader, kind)(*arguments)
    except MemoryError:
        return "memory", None
    except ApiError as error:
        found = error
    except BaseException as error:  # a panic in a Rust library derives from BaseException
        found = as_api_error(error)
        if found.status >= 500:
            sys.stderr.write(f"hfax: reading a request failed: {type(error).__name__}: {error}"[:2000] + "\n")
    return "error", (found.status, found.message, found.param, found.code, found.headers)


def _limit_memory(more_bytes: int) -> None:
    """Let this process map so much more than it has."""
    most = mapped_bytes() + more_bytes
    with contextlib.suppress(OSError, ValueError):  # macOS takes no limit
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
