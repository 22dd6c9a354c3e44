"""The record of one hostile case, and how well-formed requests around hostile bodies are built.

A case is what is sent on a connection: bytes, and pauses between them. It does not know what a server answers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
_PIECE_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What the requests of cases contain.

    Args:
        host: value of the Host header.
        model: model name on the server.
        api_key: API key of the attacker; None: no Authorization header.
        slow_s: how long slow clients dawdle, in seconds.
        flood: connections of a flood.
    """

    host: str
    model: str
    api_key: str | None = None
    slow_s: float = 30.0
    flood: int = 500


Parts = Iterable[bytes | float]
"""What is sent on a connection: bytes, and pauses in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A hostile case.

    Args:
        kind: the class.
        name: short name, unique in its class.
        parts: makes what is sent on one connection; called once per connection, with the connection's number.
        must_answer: the HTTP is well-formed, so that a connection closed without an answer is a fault of the server. False: the
            server may close the connection.
        num_connections: makes the number of connections opened at once.
        reads: whether the response is read.
        leaves_after_s: seconds after which the client disconnects; None: it stays. Slow clients leave after `Target.slow_s`.
    """

    kind: str
    name: str
    parts: Callable[[Target, int], Parts]
    must_answer: bool = True
    num_connections: Callable[[Target], int] = lambda target: 1
    reads: bool = True
    leaves_after_s: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def head(target: Target, path: str, length: int | None, *extra: str, method: str = "POST") -> bytes:
    """The head of a well-formed request.

    Args:
        target: whose Host and key are sent.
        path: the request's target.
        length: the Content-Length; None: no such header.
        extra: more header lines.
        method: the HTTP method.
    """
    lines = [f"{method} {path} HTTP/1.1", f"Host: {target.host}", "Connection: close"]
    if method == "POST":
        lines.append("Content-Type: application/json")
    if target.api_key:
        lines.append(f"Authorization: Bearer {target.api_key}")
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, *extra, "", ""]).encode("latin-1")


def post(target: Target, path: str, body: bytes) -> Iterator[bytes]:
    """A well-formed POST, in pieces."""
    yield head(target, path, len(body))
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


def body_case(kind: str, name: str, path: str, body: Callable[[str], bytes]) -> Case:
    """A case whose body is hostile; `body` gets the model's name as JSON."""
    return Case(
        kind=kind, name=name, parts=lambda target, index: post(target, path, body(json.dumps(target.model)))
    )  # fmt: skip


def field_case(kind: str, name: str, path: str, /, **fields: Any) -> Case:
    """A case with hostile fields in a body that is otherwise valid, and short if it is answered."""
    return body_case(kind, name, path, lambda model: valid_body(path, model, **fields))


def valid_body(path: str, model: str, /, **fields: Any) -> bytes:
    """A short request's body.

    Args:
        path: the route.
        model: model name, as JSON.
        fields: more fields, or other values; bytes are JSON already.
    """
    found: dict[str, Any] = {"model": model.encode()}
    if path == COMPLETIONS:
        found |= {"prompt": "Return a new", "max_tokens": 2}
    elif path == CHAT:
        found |= {"messages": [{"role": "user", "content": "Return a new"}], "max_tokens": 2}
    found |= fields
    items = (
        json.dumps(name).encode() + b":" + (value if isinstance(value, bytes) else json.dumps(value).encode())
        for name, value in found.items()
    )
    return b"{" + b",".join(items) + b"}"
