"""A minimal HTTP/1.1 client on asyncio streams: sends any bytes, and reports how the connection ended.

Reads while it sends, since a server may answer and close before it has read everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
import time
from urllib.parse import urlsplit

from hfax.bench.attacks.case import Parts
from hfax.errors import InvalidInputError

_MAX_LINE = 1 << 20
_KEPT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    is_tls: bool = False

    @classmethod
    def of(cls, url: str) -> Address:
        """Parse a URL; its path is ignored.

        Raises:
            InvalidInputError: it is no http or https URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInputError(
                f"{url} is not a server's URL.", "It must begin with http:// or https://.", "Pass http://HOST:PORT."
            )
        is_tls = parts.scheme == "https"
        return cls(host=parts.hostname, port=port or (443 if is_tls else 80), is_tls=is_tls)

    @property
    def name(self) -> str:
        """The Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """How an exchange ended.

    Args:
        status: status code of the response; None: no response was read.
        ended: "answered"; "closed" or "reset" by the server without a whole response; "timeout"; "refused", no connection was
            made; "left", the client disconnected as planned.
        has_sent_all: everything was sent.
        is_head: the request was a HEAD, so the response has no body.
        body: the response's body, at most 1 MiB of it.
        seconds: duration of the exchange.
    """

    status: int | None = None
    ended: str = "closed"
    has_sent_all: bool = False
    is_head: bool = False
    body: bytes = b""
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """The status, or how the exchange ended without one."""
        return str(self.status) if self.status is not None and self.ended in ("answered", "left") else self.ended


async def exchange(
    address: Address, parts: Parts, *, timeout_s: float, leaves_after_s: float | None = None, reads: bool = True
) -> Outcome:
    """Open a connection, send `parts`, and read one response.

    Args:
        address: the server's.
        parts: bytes to send, and pauses in seconds.
        timeout_s: timeout for the whole exchange, in seconds.
        leaves_after_s: disconnect after so many seconds; None: stay.
        reads: False: read nothing, and disconnect after `leaves_after_s`.

    Returns:
        The outcome. Network errors are outcomes, not exceptions.
    """
    outcome, started = Outcome(), time.monotonic()
    limit = timeout_s if leaves_after_s is None else min(timeout_s, leaves_after_s)
    try:
        async with asyncio.timeout(limit):
            await _exchange(address, parts, outcome, reads=reads)
    except TimeoutError:
        outcome.ended = "timeout" if leaves_after_s is None else "left"
    except (ConnectionError, ssl.SSLError):
        outcome.ended = "reset"
    except OSError:
        outcome.ended = "refused"
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        outcome.ended = "closed"
    outcome.seconds = time.monotonic() - started
    return outcome


async def _exchange(address: Address, parts: Parts, outcome: Outcome, *, reads: bool) -> None:
    try:
        context = ssl.create_default_context() if address.is_tls else None
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=_MAX_LINE)
    except ConnectionError as error:
        raise OSError(str(error)) from error
    sending = asyncio.create_task(_send(writer, parts, outcome))
    try:
        if not reads:
            await sending
            await asyncio.sleep(float("inf"))
        await _read(reader, outcome)
        outcome.ended = "answered"
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await sending
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, parts: Parts, outcome: Outcome) -> None:
    try:
        for part in parts:
            if isinstance(part, bytes):
                outcome.is_head = outcome.is_head or part.startswith(b"HEAD ")
                writer.write(part)
                await writer.drain()
            else:
                await asyncio.sleep(part)
        outcome.has_sent_all = True
    except ConnectionError:  # the response may still be read
        pass


async def _read(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    """Read one response; status codes below 200 are skipped."""
    status, headers = 100, dict[bytes, bytes]()
    while status < 200:
        line = await reader.readuntil(b"\n")
        status = int(line.split()[1]) if line.startswith(b"HTTP/1.") and len(line.split()) > 1 else _no_status(line)
        headers = {}
        while (line := (await reader.readuntil(b"\n")).strip()) != b"":
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        if status == 101:
            break
    outcome.status = status
    if status in (101, 204, 304) or outcome.is_head:
        return
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        while (size := int((await reader.readuntil(b"\n")).split(b";")[0], 16)) > 0:
            _keep(outcome, await reader.readexactly(size))
            await reader.readuntil(b"\n")
    elif b"content-length" in headers:
        left = int(headers[b"content-length"])
        while left > 0 and (piece := await reader.read(min(left, 1 << 16))):
            left -= len(piece)
            _keep(outcome, piece)
        if left > 0:
            raise asyncio.IncompleteReadError(b"", left)
    else:
        while piece := await reader.read(1 << 16):
            _keep(outcome, piece)


def _no_status(line: bytes) -> int:
    raise ValueError(f"no status line: {line[:80]!r}")


def _keep(outcome: Outcome, piece: bytes) -> None:
    outcome.body += piece[: _KEPT_BYTES - len(outcome.body)]
