"""Coordination between the processes of a run: process 0 broadcasts, the others receive.

All processes must make the same calls with the same arguments, or multi-process programs deadlock. `agree` broadcasts values that
a process would otherwise choose itself, such as a random seed; with `drive`, only process 0 decides what is called. Messages go
through the key-value store of JAX's distributed runtime, hosted by the coordinator in process 0: waiting uses no device and has no
time limit.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

_FOLDER = "hfax"
_POLL_MS = 10_000
_KEPT = 256
"""Number of messages between barriers, at which old messages are deleted."""
_BARRIER_MS = 600_000

_sent = 0


class Interrupted(Exception):
    """Process 0 aborted a call; raised only in the other processes."""


def agree(value: Any) -> Any:
    """Broadcast process 0's value; every process must call this. Returns `value` itself in a single-process run.

    Only for state that all processes share; a process with its own model must not call it.

    Raises:
        Interrupted: process 0 aborted the call.
    """
    kind, found = _exchange("value", value)
    if kind != "value":
        raise Interrupted
    return found


def announce(kind: str, content: Any) -> None:
    """In process 0: send a message to the other processes, which receive it with `hear`."""
    _exchange(kind, content)


def hear() -> tuple[str, Any]:
    """In the other processes: receive the next message of any kind."""
    return _exchange("", None)


def follow(call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """In the other processes: make the calls that process 0 announces, until it announces the end.

    Each call is followed by "done" or "failed". A call that fails in process 0 also fails or is aborted here; a call that fails
    only here ends this process, and with it the run.

    Args:
        call: makes a call, given a method name, arguments and keyword arguments.
    """
    while True:
        kind, content = hear()
        if kind == "end":
            return
        if kind != "call":
            continue
        failure: Exception | None = None
        try:
            call(*content)
        except Interrupted:
            continue  # "failed" was heard
        except Exception as error:
            failure = error
        while kind not in ("done", "failed"):
            kind, _ = hear()
        if kind == "done" and failure is not None:
            raise failure


def _exchange(kind: str, content: Any) -> tuple[str, Any]:
    global _sent
    jax = sys.modules.get("jax")  # without JAX there are no multi-process runs
    if jax is None or jax.process_count() == 1:
        return kind, content
    client = _client()
    key = f"{_FOLDER}/{_sent // _KEPT}/{_sent % _KEPT}"
    if jax.process_index() == 0:
        client.key_value_set_bytes(key, pickle.dumps((kind, content)))
        message = kind, content
    else:
        message = pickle.loads(_wait_for(client, key))
    _sent += 1
    if _sent % _KEPT == 0:  # all processes must have read the folder before it is deleted
        client.wait_at_barrier(f"{_FOLDER}-{_sent}", _BARRIER_MS)
        if jax.process_index() == 0:
            client.key_value_delete(f"{_FOLDER}/{_sent // _KEPT - 1}/")
    return message


def _wait_for(client: Any, key: str) -> bytes:
    while True:
        try:
            return client.blocking_key_value_get_bytes(key, _POLL_MS)
        except Exception as error:  # the runtime has no specific exception classes
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _client() -> Any:
    """The key-value store's client. JAX has no public API for it; orbax and Flax use the same private one."""
    from jax._src import distributed

    return distributed.global_state.client
