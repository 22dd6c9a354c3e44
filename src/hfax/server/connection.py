"""HTTP connections with limits: size of a request's head, time to receive it, time for a client to read its answer.

uvicorn limits none of them where httptools is installed, and the last two nowhere. The body's limits are the guard's.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hfax.server.failures import ApiError
from hfax.server.guard import MAX_HEAD_BYTES
from hfax.server.settings import Settings

_PIECE_BYTES = 16 << 10
"""Bytes parsed in one step of the event loop: a chunk of one byte takes six, and each as long to parse as a large one."""
KEEP_ALIVE_S = 15
"""Seconds that a connection may be idle between two requests."""


class Connection(H11Protocol):
    """uvicorn's connection with time limits.

    Args:
        head_timeout_s: seconds to receive a request's first line and headers, from the connection's or the request's first byte.
        write_timeout_s: seconds in which a client has to read something of what waits for it.
        options: uvicorn's own arguments.
    """

    def __init__(self, *, head_timeout_s: float, write_timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._head_timeout_s, self._write_timeout_s = head_timeout_s, write_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unparsed = bytearray()

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called as soon as something is not read
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._head_timer = _stopped(self._head_timer)
        self._write_timer = _stopped(self._write_timer)
        self._unparsed.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client; many of them in steps between which other connections have their turn."""
        if self._unparsed or len(data) > _PIECE_BYTES:
            if not self._unparsed:
                self.loop.call_soon(self._parse_piece)
            self._unparsed += data
            self.transport.pause_reading()
            return
        self._parse(data)

    def _parse_piece(self) -> None:
        if self.transport.is_closing():
            self._unparsed.clear()
        if not self._unparsed:
            return
        piece = bytes(self._unparsed[:_PIECE_BYTES])
        del self._unparsed[:_PIECE_BYTES]
        self._parse(piece)
        if self._unparsed:
            self.transport.pause_reading()  # the parser may have resumed it
            self.loop.call_soon(self._parse_piece)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    @property
    def _is_waiting(self) -> bool:
        """Whether a head must come next, or the rest of a body that was answered before it came."""
        is_answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        return self.conn.their_state is h11.IDLE or is_answered

    def _watch_head(self) -> None:
        """Keep the timer running while a head is incomplete; further bytes of it give no more time."""
        if not self._is_waiting or self.transport.is_closing():
            self._head_timer = _stopped(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._close_for_head)

    def _close_for_head(self) -> None:
        self._head_timer = None
        if self._is_waiting:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Go on to the next request; until its first byte, only the limit of idle connections counts."""
        self._head_timer = _stopped(self._head_timer)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client has read everything."""
        self._write_timer = _stopped(self._write_timer)
        super().resume_writing()

    def _watch_reader(self, left: int) -> None:
        self._write_timer = _stopped(self._write_timer)
        self._write_timer = self.loop.call_later(self._write_timeout_s, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        """Cut the connection off unless fewer bytes wait than before."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._watch_reader(left)
        else:
            self._write_timer = None
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP request, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(400, msg).body).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def make_config(app: Any, settings: Settings) -> uvicorn.Config:
    """uvicorn's configuration for the server's application."""
    protocol: Any = functools.partial(
        Connection, head_timeout_s=settings.head_timeout_s, write_timeout_s=settings.write_timeout_s
    )
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.drain_timeout_s),
    )
