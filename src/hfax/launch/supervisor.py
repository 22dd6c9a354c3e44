"""Watching the processes of a run: when one ends badly, all end, at once and with one message.

Each machine has a supervisor, which starts the run's processes there. The supervisor of process 0 listens on the port after the
coordinator's; the others keep a connection to it open and tell how their processes ended. A connection that breaks, or stays
silent, is a machine that is gone. JAX's own heartbeats would notice as well, later and in many words.
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
from typing import Any

from hfax import __version__
from hfax.launch.cluster import AUTOMATIC, Member, checked_address

_BEAT_S = 5
_SILENCE_S = 20
_KILL_S = 5
"""Between asking a process to end and making it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended.

    Args:
        code: the exit code for the launcher.
        reason: for people; empty after success.
    """

    code: int
    reason: str = ""


def supervise(
    members: Sequence[Member], command: Sequence[str], environment: Mapping[str, str], *, start_s: float
) -> Ending:
    """Start the run's processes of this machine and wait for the end of all of it.

    Args:
        members: those processes.
        command: what each runs: a script, or hfax and a verb, and its arguments.
        environment: of all of them.
        start_s: how long to wait for the other machines.
    """
    return asyncio.run(_Supervisor(members, command, environment, start_s).run())


class _Supervisor:
    def __init__(
        self, members: Sequence[Member], command: Sequence[str], environment: Mapping[str, str], start_s: float
    ) -> None:
        self.members, self.command, self.environment, self.start_s = members, command, environment, start_s
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
                number, self._end, Ending(code=code, reason="" if code == 130 else "It was told to end.")
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
                        code=1, reason=f"Port {port + 1}, the one after the coordinator's, cannot be used: {error}"
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
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hfax.launch.child", *self.command, env=environment, start_new_session=True
        )

    async def _watch(self, member: Member, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        await self._ended(member.process_id, code, socket.gethostname())

    async def _ended(self, process_id: int, code: int, host: str) -> None:
        self.done.add(process_id)
        if code != 0:
            # the machine that lost a process tells the others, before they see what follows from it
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
        """On process 0's machine."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.all_there.wait(), self.start_s)
            return
        missing = sorted(set(range(1, self.total)) - set(self.writers))
        self._end(
            Ending(
                code=1,
                reason=f"Of {self.total} processes, {', '.join(map(str, missing))} did not come within {self.start_s:.0f} s. "
                "Start hfax launch on every machine, with its own --process-id.",
            )
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One other machine, on process 0's."""
        process_id = None
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), _SILENCE_S))
            process_id = int(hello["id"])
            mine = {"processes": self.total, "version": __version__}
            if {name: hello.get(name) for name in mine} != mine or process_id in self.writers:
                reason = f"Process {process_id} says {hello}, process 0 {mine}."
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
                writer.close()  # somebody who does not belong to the run

    async def _report(self, host: str, port: int) -> None:
        """On another machine than process 0's."""
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
                self._end(Ending(code=1, reason=f"The machine of process {process_id} ({host}) is silent."))
                return
            if not line:
                if process_id not in self.done or process_id == 0:
                    self._end(Ending(code=1, reason=f"The launcher of process {process_id} on {host} is gone."))
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
    """End a process and what it started; by asking first, or at once."""
    for number in (signal.SIGTERM, signal.SIGKILL) if is_asked else (signal.SIGKILL,):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_S)


def _how(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
