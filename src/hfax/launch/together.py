"""What the processes of a run agree on: process 0 says, the others hear.

Every process of a run must make the same calls with the same arguments, or programs that span the processes wait for each other
for ever. `agree` settles what a process would otherwise decide by itself, a random seed or when to look at a text; `drive` lets
process 0 alone decide what is called. Messages go through the key-value store of JAX's distributed runtime, which the coordinator
holds in process 0: no device is involved, so waiting costs nothing and may last.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

_FOLDER = "hfax"
_POLL_MS = 10_000
_KEPT = 256
"""Messages after which the processes wait for one another, and the old ones are removed."""
_BARRIER_MS = 600_000

_sent = 0


class Interrupted(Exception):
    """Process 0 left a call in which others still follow it. Only they see it."""


def agree(value: Any) -> Any:
    """Process 0's value, in every process of the run; each must ask. `value` itself in a run of one.

    For what belongs to all of them: a process with a model of its own asks nobody.

    Raises:
        Interrupted: process 0 left the call.
    """
    kind, found = _exchange("value", value)
    if kind != "value":
        raise Interrupted
    return found


def announce(kind: str, content: Any) -> None:
    """In process 0: send what the others' `hear` gives them."""
    _exchange(kind, content)


def hear() -> tuple[str, Any]:
    """In the others: the next message, whatever its kind."""
    return _exchange("", None)


def follow(call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """In the other processes: make the calls that process 0 announces, until it says that there are no more.

    A call is followed by "done" or "failed". One that fails in process 0 fails here, too, or is left; one that fails here alone
    ends this process, and with it the run.

    Args:
        call: makes one: gets the name of a method, arguments and keyword arguments.
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
    jax = sys.modules.get("jax")  # a backend without it has no runs of several processes
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
    if _sent % _KEPT == 0:  # everyone has read the folder before it goes
        client.wait_at_barrier(f"{_FOLDER}-{_sent}", _BARRIER_MS)
        if jax.process_index() == 0:
            client.key_value_delete(f"{_FOLDER}/{_sent // _KEPT - 1}/")
    return message


def _wait_for(client: Any, key: str) -> bytes:
    while True:
        try:
            return client.blocking_key_value_get_bytes(key, _POLL_MS)
        except Exception as error:  # the runtime's errors have no classes of their own
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _client() -> Any:
    """JAX exports no way to this store; orbax and Flax reach for it in the same place."""
    from jax._src import distributed

    return distributed.global_state.client
