"""/health, /ready and /metrics on a port of their own.

They are answered by an event loop in another thread, so a flood on the server's port does not delay them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import uvicorn

from hfax.server.connection import make_config
from hfax.server.settings import Settings

_MAX_CONNECTIONS = 64
_STOP_S = 2.0


class HealthServer:
    """Serves an application from a thread.

    Args:
        app: an ASGI application.
        settings: the server's settings; `health_port` must be set.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, app: Any, settings: Settings) -> None:
        assert settings.health_port is not None
        config = make_config(app, dataclasses.replace(settings, port=settings.health_port, drain_timeout_s=0.0))
        config.limit_concurrency = _MAX_CONNECTIONS
        self._socket = config.bind_socket()
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port; returns once it is closed."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))
