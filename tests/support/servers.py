"""`hfax serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import processes

import hfax

SOURCE = Path(hfax.__file__).parents[1]


def _healthy(client: httpx.Client) -> bool:
    """False while the model loads, and where nothing listens any more: the caller looks whether the process lives."""
    try:
        return client.get("/health").status_code == 200
    except httpx.ConnectError:
        return False


@contextlib.contextmanager
def started(
    *arguments: str, flags: tuple[str, ...] = (), waits: bool = True, **variables: str
) -> Iterator[tuple[subprocess.Popen | processes.Started, httpx.Client, list[str]]]:
    """A server of its own, ready, with its lines on stderr.

    Args:
        arguments: of `hfax serve`; without a port, a free one is taken.
        flags: of the interpreter, which is then started anew rather than forked.
        waits: until the model is loaded.
        variables: of its environment.
    """
    command = [*flags, "-m", "hfax", "serve", *arguments]
    if "--port" not in arguments and "HFAX_PORT" not in variables:
        command += ["--port", "0"]
    if flags or "PYTHONPATH" in variables:
        environment = {"PYTHONPATH": str(SOURCE), **os.environ, **variables}
        process = subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True)
    else:
        process = processes.Started(command, variables)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + 240
        while not any("Listening on" in line for line in lines):
            assert process.poll() is None, "".join(lines)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        address = next(line.split()[2].rstrip(",") for line in lines if "Listening on" in line)
        with httpx.Client(base_url=address, timeout=60) as client:
            while waits and not _healthy(client):
                if process.poll() is not None:
                    reader.join(20)
                    raise AssertionError("".join(lines))
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield process, client, lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        reader.join(20)
        process.stderr.close()
