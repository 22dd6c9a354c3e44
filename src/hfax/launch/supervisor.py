"""Supervises the processes of a run: if one fails, all are stopped at once, with a single message.

Each machine has a supervisor that starts the run's local processes. The supervisor of process 0 listens on the port after the
coordinator's; the others keep a connection open to it and report exit codes. A broken or silent connection means a lost machine.
JAX's own heartbeats would detect this too, but later and with long tracebacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from hfax import __version__
from hfax.launch.cluster import AUTOMATIC, Member, checked_address
from hfax.launch.labels import copy_labelled

_BEAT_S = 5
_SILENCE_S = 20
_KILL_S = 5
"""Seconds between SIGTERM and SIGKILL."""
_LAST_LINES_S = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended.

    Args:
        code: the launcher's exit code.
        reason: human-readable reason; empty after success.
    """

    code: int
    reason: str = ""


def supervise(
    members: Sequence[Member],
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    start_s: float,
    is_labelled: bool = False,
) -> Ending:
    """Start this machine's processes of the run, and wait for the whole run to end.

    Args:
        members: this machine's processes.
        command: the command of each process: a script, or hfax and a command name, with arguments.
        environment: their environment variables.
        start_s: timeout for the other machines to connect, in seconds.
        is_labelled: put `[process id]` before each line of the processes' output. The stdout of an hfax command is passed on as it
            is, since only process 0 writes to it.
    """
    return asyncio.run(_Supervisor(members, command, environment, start_s, is_labelled).run())


class _Supervisor:
    def __init__(
        self,
        members: Sequence[Member],
        command: Sequence[str],
        environment: Mapping[str, str],
        start_s: float,
        is_labelled: bool,
    ) -> None:
        self.members, self.command, self.environment, self.start_s = members, command, environment, start_s
        self.is_labelled = is_labelled
        self.copies: list[asyncio.Task[None]] = []
        self.over: asyncio.Future[Ending] = None  # type: ignore[assignment]
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self.done: set[int] = set()
        self.all_there: asyncio.Event = None  # type: ignore[assignment]
        first = members[0]
        self.total = first.num_processes
        self.is_alone = first.coordinator == AUTOMATIC or len(members) == self.total

    async def run(self) -> Ending:
        loop = asyncio.get_running_loop()
        self.over, self.all_there = loop.create_future(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            code = 128 + number
            loop.add_signal_handler(
                number, self._end, Ending(code=code, reason="" if code == 130 else "It was terminated.")
            )
        tasks = []
        server = None
        if not self.is_alone:
            host, port = checked_address(self.members[0].coordinator)
            if self.members[0].process_id == 0:
                try:
                    server = await asyncio.start_server(self._serve, None, port + 1)
                except OSError as error:
                    return Ending(
                        code=1, reason=f"Cannot listen on port {port + 1}, the one after the coordinator's: {error}"
                    )
                tasks.append(asyncio.create_task(self._wait_for_all()))
            else:
                tasks.append(asyncio.create_task(self._report(host, port + 1)))
        processes = [await self._start(member) for member in self.members]
        tasks += [asyncio.create_task(self._watch(m, p)) for m, p in zip(self.members, processes, strict=True)]
        ending = await self.over
        self._tell_all({"end": ending.reason, "code": ending.code})
        with contextlib.suppress(Exception):
            await asyncio.gather(*(w.drain() for w in self.writers.values()))
        is_asked = ending.code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        await asyncio.gather(*(_stop(p, is_asked) for p in processes))
        if self.copies:  # the last lines; a process of a process may keep a pipe open
            await asyncio.wait(self.copies, timeout=_LAST_LINES_S)
        tasks += self.copies
        for task in tasks:
            task.cancel()
        if server is not None:
            server.close()
        return ending

    def _end(self, ending: Ending) -> None:
        if not self.over.done():
            self.over.set_result(ending)

    # ------------------------------------------------------------------------------------------------ own processes

    async def _start(self, member: Member) -> asyncio.subprocess.Process:
        environment = {**self.environment, **member.environment()}
        outputs: dict[str, Any] = {}
        if self.is_labelled:
            # else a pipe gets a script's lines long after they are printed
            environment.setdefault("PYTHONUNBUFFERED", "1")
            names = ("stderr",) if self.command[0] == "hfax" else ("stdout", "stderr")
            outputs = dict.fromkeys(names, asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hfax.launch.child", *self.command, env=environment, start_new_session=True, **outputs
        )
        for name in outputs:
            copying = self._copy(getattr(process, name), getattr(sys, name).buffer, f"[{member.process_id}] ")
            self.copies.append(asyncio.create_task(copying))
        return process

    async def _copy(self, reader: asyncio.StreamReader, out: BinaryIO, label: str) -> None:
        try:
            await copy_labelled(reader, out, label)
        except OSError:  # as for a program that writes to a closed pipe
            self._end(Ending(code=128 + signal.SIGPIPE))

    async def _watch(self, member: Member, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        await self._ended(member.process_id, code, socket.gethostname())

    async def _ended(self, process_id: int, code: int, host: str) -> None:
        self.done.add(process_id)
        if code != 0:
            # report the failure to other machines before they see its consequences
            self._end(Ending(code=1, reason=f"Process {process_id} of {self.total} on {host} {_how(code)}."))
        elif self.is_alone and len(self.done) == len(self.members):
            self._end(Ending(code=0))
        elif not self.is_alone:
            self._tell_all({"exit": 0, "id": process_id})
            if self.members[0].process_id == 0 and len(self.done) == self.total:
                self._end(Ending(code=0))

    # --------------------------------------------------------------------------------------------------- other machines

    def _tell_all(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for writer in self.writers.values():
            with contextlib.suppress(OSError):
                writer.write(line)

    async def _wait_for_all(self) -> None:
        """Wait for all other processes to connect; runs on process 0's machine."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.all_there.wait(), self.start_s)
            return
        missing = sorted(set(range(1, self.total)) - set(self.writers))
        self._end(
            Ending(
                code=1,
                reason=f"Of {self.total} processes, {', '.join(map(str, missing))} did not connect within {self.start_s:.0f} s. "
                "Start hfax launch on every machine, with its own --process-id.",
            )
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the connection of one other machine; runs on process 0's machine."""
        process_id = None
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), _SILENCE_S))
            process_id = int(hello["id"])
            mine = {"processes": self.total, "version": __version__}
            if {name: hello.get(name) for name in mine} != mine or process_id in self.writers:
                reason = f"Process {process_id} does not match process 0: {hello} versus {mine}."
                self.writers[process_id] = writer
                self._end(Ending(code=1, reason=reason))
                return
            self.writers[process_id] = writer
            if len(self.writers) == self.total - 1:
                self.all_there.set()
            beat = asyncio.create_task(_beat(writer))
            try:
                await self._listen(reader, process_id, hello["host"])
            finally:
                beat.cancel()
        except asyncio.CancelledError:
            return  # the run is over
        except (OSError, ValueError, KeyError, TypeError, TimeoutError):
            if process_id is not None:
                self._end(Ending(code=1, reason=f"The connection to process {process_id} broke."))
            else:
                writer.close()  # not a member of the run

    async def _report(self, host: str, port: int) -> None:
        """Connect to process 0's supervisor; runs on every other machine."""
        me = self.members[0].process_id
        deadline = asyncio.get_running_loop().time() + self.start_s
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port)
                break
            except OSError as error:
                if asyncio.get_running_loop().time() > deadline:
                    where = f"{host}:{port}"
                    reason = f"Process {me} did not reach process 0 at {where} within {self.start_s:.0f} s ({error})."
                    self._end(Ending(code=1, reason=reason))
                    return
                await asyncio.sleep(1)
        self.writers[0] = writer
        hello = {"id": me, "host": socket.gethostname(), "processes": self.total, "version": __version__}
        writer.write(json.dumps(hello).encode() + b"\n")
        for process_id in self.done:
            self._tell_all({"exit": 0, "id": process_id})
        beat = asyncio.create_task(_beat(writer))
        try:
            await self._listen(reader, 0, host)
        except (OSError, ValueError, TimeoutError):
            self._end(Ending(code=1, reason="The connection to process 0 broke."))
        finally:
            beat.cancel()

    async def _listen(self, reader: asyncio.StreamReader, process_id: int, host: str) -> None:
        while not self.over.done():
            try:
                line = await asyncio.wait_for(reader.readline(), _SILENCE_S)
            except TimeoutError:
                self._end(Ending(code=1, reason=f"The machine of process {process_id} ({host}) stopped responding."))
                return
            if not line:
                if process_id not in self.done or process_id == 0:
                    self._end(Ending(code=1, reason=f"The launcher of process {process_id} on {host} disconnected."))
                return
            message = json.loads(line)
            if "end" in message:
                self._end(Ending(code=message["code"], reason=message["end"]))
            elif "exit" in message:
                await self._ended(message["id"], message["exit"], host)


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(_BEAT_S)
        writer.write(b'{"beat": 1}\n')


async def _stop(process: asyncio.subprocess.Process, is_asked: bool) -> None:
    """Stop a process group: SIGTERM first if `is_asked`, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL) if is_asked else (signal.SIGKILL,):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_S)


def _how(code: int) -> str:
    """Describe an exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
