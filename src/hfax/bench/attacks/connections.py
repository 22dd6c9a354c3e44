"""Slow clients, and floods of connections."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from hfax.bench.attacks.case import CHAT, COMPLETIONS, Case, Parts, Target, head, post, valid_body
from hfax.bench.attacks.images import as_url, png
from hfax.bench.attacks.schemas import PRIMES

_STEPS = 50
"""Pauses of a client that sends byte by byte; together they take `Target.slow_s`."""


def slow_cases(seed: int) -> Iterator[Case]:
    """Clients that send or read slowly, or not at all; twenty of each at once."""
    del seed
    for name, parts in {
        "a silent connection": lambda target, index: [target.slow_s],
        "a request line without an end": lambda target, index: _dripping(target, b"", b"GET /" + b"a" * _STEPS),
        "a header byte by byte": lambda target, index: _dripping(
            target, head(target, "/health", 0)[:-2], b"X-A: " + b"b" * _STEPS
        ),
        "headers one by one": _header_lines,
        "a body byte by byte": lambda target, index: _dripping(
            target, head(target, COMPLETIONS, 10_000), b" " * _STEPS
        ),
        "chunks byte by byte": lambda target, index: _dripping(
            target, head(target, COMPLETIONS, None, "Transfer-Encoding: chunked"), b"1\r\n \r\n" * (_STEPS // 6)
        ),
        "a body that stays away": lambda target, index: [head(target, COMPLETIONS, 100), target.slow_s],
        "a large body that stays away": lambda target, index: [
            head(target, COMPLETIONS, 8 << 20) + b" " * (4 << 20),
            target.slow_s,
        ],
    }.items():
        yield Case(kind="slow", name=name, parts=parts, must_answer=False, num_connections=lambda target: 20)
    for name, path, more in (
        ("a stream that is not read", COMPLETIONS, {}),
        ("a chat stream that is not read", CHAT, {"n": 8}),
    ):
        yield Case(
            kind="slow", name=name, parts=_generating(path, stream=True, **more), must_answer=False, reads=False,
            num_connections=lambda target: 20,
        )  # fmt: skip
    yield Case(
        kind="slow", name="a response that is not read", parts=_generating(COMPLETIONS, logprobs=20), must_answer=False,
        reads=False, num_connections=lambda target: 20,
    )  # fmt: skip


def flood_cases(seed: int) -> Iterator[Case]:
    """Hundreds of connections at once."""
    del seed

    def flood(name: str, parts: Callable[[Target, int], Parts], *, leaves_after_s: float | None = None) -> Case:
        return Case(
            kind="floods", name=name, parts=parts, must_answer=False, leaves_after_s=leaves_after_s,
            num_connections=lambda target: target.flood,
        )  # fmt: skip

    bombs = [{"type": "image_url", "image_url": {"url": as_url(png(5792, 5792))}}] * 2
    messages = [{"role": "user", "content": [*bombs, {"type": "text", "text": "a"}]}]
    yield flood("valid", _posting(COMPLETIONS))
    yield flood("invalid", _posting(COMPLETIONS, prompt=5))
    yield flood("health", lambda target, index: [head(target, "/health", None, method="GET")])
    yield flood("wrong keys", lambda target, index: _with_wrong_key(target))
    yield flood("long generations", _generating(COMPLETIONS, n=8), leaves_after_s=5.0)
    yield flood("expensive grammars", _grammars)
    yield flood("large prompts", _posting(COMPLETIONS, prompt="word " * 20_000))
    yield flood("images", _posting(CHAT, messages=messages))
    yield flood(
        "disconnects in a body", lambda target, index: [head(target, COMPLETIONS, 1000) + b"{"], leaves_after_s=0.5
    )
    yield flood("disconnects in a stream", _generating(COMPLETIONS, stream=True), leaves_after_s=2.0)
    yield flood("disconnects before an answer", _grammars, leaves_after_s=0.3)
    yield flood("connections alone", lambda target, index: [], leaves_after_s=3.0)


def _posting(path: str, **fields: object) -> Callable[[Target, int], Parts]:
    return lambda target, index: post(target, path, valid_body(path, json.dumps(target.model), **fields))


def _generating(path: str, **fields: object) -> Callable[[Target, int], Parts]:
    """Generations that are as long as most servers allow."""
    return _posting(path, max_tokens=400, ignore_eos=True, **fields)


def _grammars(target: Target, index: int) -> Parts:
    """A grammar that no cache has: a multiple of a large prime, with another title for each connection."""
    schema = {"title": str(index), "type": "integer", "multipleOf": PRIMES[0]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return post(target, CHAT, valid_body(CHAT, json.dumps(target.model), response_format=wanted))


def _with_wrong_key(target: Target) -> Parts:
    yield head(target, COMPLETIONS, 2).replace(f"{target.api_key}".encode(), b"wrong") + b"{}"


def _dripping(target: Target, start: bytes, rest: bytes) -> Parts:
    yield start
    for place in range(len(rest)):
        yield rest[place : place + 1]
        yield target.slow_s / len(rest)


def _header_lines(target: Target, index: int) -> Parts:
    yield head(target, "/health", None, method="GET")[:-2]
    for number in range(_STEPS):
        yield f"X-{number}: {number}\r\n".encode()
        yield target.slow_s / _STEPS
