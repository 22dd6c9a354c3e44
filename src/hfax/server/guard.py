"""Access control and size limits: the outermost layer of the server.

Checks the Host, the Origin, the API key and the size of the body of every request before it reaches a route. Unhandled
exceptions become JSON errors here.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from hfax.server.failures import ApiError, as_api_error
from hfax.server.memory import give_memory_back
from hfax.server.settings import Settings

logger = logging.getLogger(__name__)
access = logging.getLogger("hfax.access")

OPEN_PATHS = ("/health",)
_PROBES = ("/health", "/ready", "/metrics")
"""Polled every few seconds; the access log has their answers at DEBUG, unless they are refused."""
"""Routes that do not require an API key."""
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
MAX_HEAD_BYTES = 32 << 10
"""Maximum bytes of a request's first line and headers."""
MAX_HEADERS = 100
_LARGE_BODY = 1 << 20
"""After the answer to a larger body, memory is given back to the system."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

Scope = dict[str, Any]


class Guard:
    """ASGI middleware that wraps the server's application.

    Args:
        app: the wrapped ASGI application.
        settings: the server's settings.
        on_request: called after each response with the method, path and status.
    """

    def __init__(self, app: Any, settings: Settings, on_request: Callable[[str, str, int], None]) -> None:
        self._app, self._settings, self._on_request = app, settings, on_request
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._is_loopback = settings.host in _LOOPBACK
        self._num_buffered = 0

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # WebSockets are not supported: close the connection
        started, status, has_started = time.perf_counter(), 500, False
        body = bytearray()  # counted in `_num_buffered` while this request lasts

        async def watched(message: Any) -> None:
            nonlocal status, has_started
            if message["type"] == "http.response.start":
                status, has_started = message["status"], True
                message = {**message, "headers": [*message.get("headers", []), *_SAFETY]}
            await send(message)

        try:
            _check_head(scope)
            headers = _headers(scope)
            self._check_host(headers)
            scope.setdefault("state", {})["key"] = self._check_key(scope["path"], headers)
            if scope["method"] not in _WITHOUT_BODY:
                await self._read_body(body, headers, receive)
                receive = _replayed(bytes(body), receive)
            await self._app(scope, receive, watched)
        except _Disconnected:
            status = 499
        except Exception as error:
            failure = as_api_error(error)
            if failure.status >= 500:
                logger.error("%s %s failed", scope["method"], _printable(scope["path"]), exc_info=error)
            if not has_started:
                await _answer(failure, watched)
        finally:
            self._num_buffered -= len(body)
            self._on_request(scope["method"], scope["path"], status)
            self._log(scope, status, time.perf_counter() - started)
        if len(body) > _LARGE_BODY:
            body.clear()
            await asyncio.to_thread(give_memory_back)
        return None

    def _check_host(self, headers: dict[str, str]) -> None:
        """Check the Origin, and on loopback the Host too, against DNS rebinding from a browser."""
        settings = self._settings
        origin = headers.get("origin")
        if origin is not None and not self._is_own_origin(origin, headers.get("host", "")):
            raise ApiError(
                403,
                "Cross-origin requests are not allowed. Start the server with --allowed-origin.",
                code="origin_refused",
            )
        if not self._is_loopback or "*" in settings.allowed_hosts:
            return
        name = _host_name(headers.get("host", ""))
        if name not in (*_LOOPBACK, *settings.allowed_hosts):
            raise ApiError(
                403,
                "This Host is not allowed. Start the server with --allowed-host.",
                code="host_refused",
            )

    def _is_own_origin(self, origin: str, host: str) -> bool:
        allowed = self._settings.allowed_origins
        if "*" in allowed or origin in allowed:
            return True
        try:
            found = urlsplit(origin).netloc
        except ValueError:
            return False
        return bool(found) and found.lower() == host.lower()

    def _check_key(self, path: str, headers: dict[str, str]) -> str:
        """Return an identifier of the request's API key; "" if the server requires none.

        Raises:
            ApiError: 401, the key is missing or wrong.
        """
        if not self._digests or path in OPEN_PATHS:
            return ""
        digest = hashlib.sha256(_brought(headers.get("authorization", "")).encode("utf-8", "surrogateescape")).digest()
        # compare with every key, in constant time
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="hfax", charset="UTF-8"'},
            )
        return digest.hex()[:16]

    async def _read_body(self, body: bytearray, headers: dict[str, str], receive: Any) -> None:
        """Append the whole body, within its time limit and the size limits of one body and of all."""
        _check_type(headers)
        most = self._settings.max_body_bytes
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Disconnected
                    part = message.get("body", b"")
                    self._num_buffered += len(part)
                    body += part
                    if len(body) > most:
                        raise _too_large(most)
                    if self._num_buffered > self._settings.max_buffered_bytes:
                        raise _out_of_buffers()
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            raise ApiError(408, "Timed out waiting for the request body.", code="body_timeout") from None

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        level = logging.DEBUG if scope["path"] in _PROBES and status in (200, 503) else logging.INFO
        if not access.isEnabledFor(level):
            return
        client = (scope.get("client") or ("-",))[0]
        extra = {k: v for k, v in scope.get("state", {}).items() if k in ("request_id", "user") and v}
        if self._settings.json_logs:
            line = {
                "time": time.time(),
                "client": client,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
            }
            access.log(level, "%s", json.dumps({**line, "seconds": round(seconds, 4), **extra}))
        else:
            rest = "".join(f" {name}={json.dumps(value)}" for name, value in extra.items())
            path = _printable(scope["path"])
            text = '%s "%s %s" %s %.3fs%s'
            access.log(level, text, _printable(client), scope["method"], path, status, seconds, rest)


class _Disconnected(Exception):
    """The client disconnected before sending the whole request."""


_SAFETY = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


def _check_head(scope: Scope) -> None:
    """Raise `ApiError` (431) for a head over the limits; the connection bounds one that is not yet complete."""
    size = len(scope.get("raw_path", b"")) + len(scope.get("query_string", b""))
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES or len(scope["headers"]) > MAX_HEADERS:
        raise ApiError(
            431,
            f"The request's head exceeds {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers.",
            code="head_too_large",
            headers={"Connection": "close"},
        )


def _printable(text: str) -> str:
    """Text from a client for a line of the log: control characters, quotes and the like are escaped, as in a string literal."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return text
    return "".join(_escaped(c) for c in text)


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else ascii(character)[1:-1]


def _headers(scope: Scope) -> dict[str, str]:
    """Headers by lowercase name, the first of each; conflicting Host or Authorization headers are rejected."""
    found: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        if name in ("host", "authorization", "content-length", "origin") and found.get(name, value) != value:
            raise ApiError(400, f"The request has two conflicting {name} headers.")
        found.setdefault(name, value)
    return found


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.rpartition(":")[2].isdecimal() and ":" in host else host.lower()


def _brought(authorization: str) -> str:
    """The API key in an Authorization header: Bearer KEY, or Basic with the key as password, as browsers send it."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


def _check_type(headers: dict[str, str]) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("", "application/json") and not kind.endswith("+json"):
        raise ApiError(400, "The Content-Type must be application/json.")


def _replayed(body: bytes, receive: Any) -> Any:
    sent = False

    async def replay() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body exceeds {most} bytes.", code="body_too_large", headers={"Connection": "close"})


def _out_of_buffers() -> ApiError:
    headers = {"Connection": "close", "Retry-After": "1"}
    return ApiError(503, "Too many request bodies are being received. Retry later.", code="busy", headers=headers)


async def _answer(failure: ApiError, send: Any) -> None:
    body = json.dumps(failure.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in failure.headers.items()]
    await send({"type": "http.response.start", "status": failure.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
