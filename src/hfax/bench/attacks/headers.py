"""Malformed and oversized HTTP: what is wrong before a body is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from hfax.bench.attacks.case import COMPLETIONS, Case, Parts, Target, head, valid_body

_LINES = {
    "X-Forwarded-For forged": ["X-Forwarded-For: 203.0.113.7", "X-Real-IP: 127.0.0.1", "Forwarded: for=127.0.0.1;proto=https"],
    "X-Forwarded-For of 60 kB": ["X-Forwarded-For: " + "127.0.0.1, " * 5000],
    "X-Original-URL": ["X-Original-URL: /admin", "X-Rewrite-URL: /admin"],
    "another Host forwarded": ["X-Forwarded-Host: evil.example", "X-HTTP-Method-Override: DELETE"],
    "a foreign Origin": ["Origin: https://evil.example"],
    "an invalid Origin": ["Origin: http://["],
    "two Origins": ["Origin: https://evil.example", "Origin: null"],
    "two keys": ["Authorization: Bearer wrong"],
    "a Basic key that is no base64": ["Authorization: Basic @@@@"],
    "a key of 60 kB": ["Authorization: Bearer " + "x" * 60_000],
    "a key of high bytes": ["Authorization: Bearer \xff\xfe"],
    "an upgrade to WebSocket": ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
                                "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="],
    "an upgrade to HTTP/2": ["Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__"],
    "expects 100-continue": ["Expect: 100-continue"],
    "expects something": ["Expect: the-unexpected"],
    "a compressed body": ["Content-Encoding: gzip"],
    "cookies": ["Cookie: " + "a=b; " * 10_000],
    "ranges": ["Range: bytes=" + ",".join(f"{i}-" for i in range(5000))],
    "a foreign charset": ["Content-Type: application/json; charset=utf-7"],
}  # fmt: skip
_WRONG_LINES = {
    "two Hosts": ["Host: evil.example"],
    "two lengths": ["Content-Length: 5"],
    "a negative length": ["Content-Length: -1"],
    "a length of 10**30": ["Content-Length: " + "9" * 30],
    "a length of +5": ["Content-Length: +5"],
    "a length in hexadecimal": ["Content-Length: 0x10"],
    "a length in other digits": ["Content-Length: ٣".encode().decode("latin-1")],
    "a folded line": ["X-A: b\r\n c"],
    "a space before the colon": ["X-A : b"],
    "no colon": ["nothing"],
    "no name": [": b"],
    "a NUL": ["X-A: b\0c"],
    "a NUL in a name": ["X\0A: b"],
    "a lone CR": ["X-A: b\rX-B: c"],
    "a lone LF": ["X-A: b\nX-B: c"],
    "TE and CL": ["Transfer-Encoding: chunked"],
    "an unknown TE": ["Transfer-Encoding: cow"],
    "TE twice": ["Transfer-Encoding: chunked", "Transfer-Encoding: identity"],
    "a hidden TE": ["Transfer-Encoding: xchunked", "Transfer-Encoding:\x0bchunked"],
    "10,000 lines": [f"X-{i}: {i}" for i in range(10_000)],
    "10,000 lines of one name": ["X-A: b"] * 10_000,
}
_CHUNKS = {
    "no number": b"hello\r\nworld\r\n0\r\n\r\n",
    "a negative size": b"-5\r\nhello\r\n0\r\n\r\n",
    "a size of 2**64": b"10000000000000000\r\nhello\r\n0\r\n\r\n",
    "a size of 1 MB of digits": b"0" * (1 << 20) + b"5\r\nhello\r\n0\r\n\r\n",
    "an extension of 1 MB": b"5;" + b"x" * (1 << 20) + b"\r\nhello\r\n0\r\n\r\n",
    "no end": b"5\r\nhello\r\n",
    "a wrong end": b"5\r\nhelloworld\r\n0\r\n\r\n",
    "a trailer": b"0\r\nHost: evil.example\r\nContent-Length: 5\r\n\r\n",
    "10,000 trailers": b"0\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\n",
    "100,000 of a byte": b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n",
}
_RAW = {
    "nothing": b"\r\n\r\n\r\n",
    "noise": bytes(range(256)) * 400,
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 600,
    "HTTP/0.9": b"GET /health\r\n",
    "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
    "no Host": b"GET /health HTTP/1.1\r\n\r\n",
    "no version": b"GET /health HTTP\r\n\r\n",
    "a method of 100 kB": b"G" * 100_000 + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a request line of tabs": b"GET\t/health\tHTTP/1.1\r\nHost: localhost\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.9\r\n",
    "Redis": b"*1\r\n$8\r\nFLUSHALL\r\n",
}
_PATHS = {
    "a forged log line": "/x%0d%0aFORGED",
    "a terminal escape": "/%1b[2J%1b]0;owned%07",
    "invalid UTF-8": "/%ff%fe",
    "NUL": "/%00",
    "above the root": "/../../../../etc/passwd",
    "above the root, encoded": "/%2e%2e/%2e%2e/etc/passwd",
    "a model above the root": "/v1/models/..%2f..%2fetc%2fpasswd",
    "two slashes": "//v1//completions",
    "a query of 50 kB": "/health?" + "a=b&" * 12_500,
    "a path of 50 kB": "/" + "a" * 50_000,
    "an asterisk": "*",
    "absolute": "http://evil.example/v1/completions",
    "absolute, of a file": "file:///etc/passwd",
    "an unknown percent": "/%zz",
}

_PATIENCE_S = 10.0
"""Clients that send no whole request leave after so many seconds."""


def header_cases(seed: int) -> Iterator[Case]:
    """Requests whose HTTP is hostile."""
    del seed
    for name, lines in _LINES.items():
        yield _case(name, lambda target, index, lines=lines: _with(target, lines))
    for name, lines in _WRONG_LINES.items():
        yield _case(name, lambda target, index, lines=lines: _with(target, lines), must_answer=False)
    for size in (1, 48):
        yield _case(f"a header of {size} MB", lambda target, index, size=size: _large(target, size), must_answer=False)
    for name, chunks in _CHUNKS.items():
        yield _case(f"chunks: {name}", lambda target, index, chunks=chunks: _chunked(target, chunks), must_answer=False)
    for name, data in _RAW.items():
        yield dataclasses.replace(
            _case(name, lambda target, index, data=data: [data], must_answer=False), leaves_after_s=_PATIENCE_S
        )
    for name, path in _PATHS.items():
        for method in ("GET", "POST"):
            yield _case(
                f"{method} {name}",
                lambda target, index, path=path, method=method: [head(target, path, 0, method=method)],
                must_answer=False,
            )
    for method in ("DELETE", "TRACE", "CONNECT", "OPTIONS", "HEAD", "PROPFIND", "get"):
        yield _case(
            f"{method} of a route", lambda target, index, method=method: [head(target, COMPLETIONS, 0, method=method)],
            must_answer=False,
        )  # fmt: skip
    yield _case(
        "1,000 requests on one connection", lambda target, index: [_kept_open(target) * 1000], must_answer=False
    )
    yield _case("a request smuggled in a body", _smuggled, must_answer=False)


def _case(name: str, parts: Callable[[Target, int], Parts], *, must_answer: bool = True) -> Case:
    return Case(kind="headers", name=name, parts=parts, must_answer=must_answer)


def _with(target: Target, lines: list[str]) -> Iterator[bytes]:
    body = valid_body(COMPLETIONS, f'"{target.model}"')
    yield head(target, COMPLETIONS, len(body), *lines)
    yield body


def _large(target: Target, megabytes: int) -> Iterator[bytes]:
    yield head(target, "/health", None, method="GET")[:-2] + b"X-A: "
    for _ in range(megabytes):
        yield b"a" * (1 << 20)
    yield b"\r\n\r\n"


def _chunked(target: Target, chunks: bytes) -> Iterator[bytes]:
    yield head(target, COMPLETIONS, None, "Transfer-Encoding: chunked")
    yield chunks


def _kept_open(target: Target) -> bytes:
    return head(target, "/health", None, method="GET").replace(b"Connection: close", b"Connection: keep-alive")


def _smuggled(target: Target, index: int) -> Iterator[bytes]:
    inner = head(target, "/smuggled", None, method="GET")
    yield head(target, COMPLETIONS, len(inner) + 5, "Transfer-Encoding: chunked")
    yield b"0\r\n\r\n" + inner
