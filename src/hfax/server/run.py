"""The server's lifecycle: loading, listening, signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from socket import socket as Socket

import uvicorn

from hfax.server.app import make_app, make_health_app
from hfax.server.connection import make_config
from hfax.server.health import HealthServer
from hfax.server.loading import Load, Loaded, OnStep
from hfax.server.memory import freeze_heap, give_memory_back
from hfax.server.served import Served
from hfax.server.settings import Settings

logger = logging.getLogger(__name__)

_WATCH_S = 0.2
_TIDY_S = 2.0


class _Server(uvicorn.Server):
    """A uvicorn server without its own signal handling (it re-raises signals on exit), with a callback once the port is open."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[Socket] | None = None) -> None:
        """Start listening, and call `on_listening`."""
        await super().startup(sockets)
        self._on_listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_serve`."""
        yield


def run_server(
    settings: Settings,
    load: Load,
    on_listening: Callable[[str, str | None], None],
) -> BaseException | None:
    """Run the server until it is stopped.

    Args:
        settings: the server's settings.
        load: loads the model.
        on_listening: called with the server's URL, and that of `health_port` if there is one, once the ports are open.

    Returns:
        The failure that ended the server; None after a normal shutdown.

    Raises:
        OSError: the port is in use.
    """
    return asyncio.run(_serve(settings, load, on_listening))


async def _serve(
    settings: Settings, load: Load, on_listening: Callable[[str, str | None], None]
) -> BaseException | None:

    def load_and_freeze(on_step: OnStep) -> Loaded:
        loaded = load(on_step)
        freeze_heap()
        return loaded

    served = Served(settings, load_and_freeze)
    config = make_config(make_app(served), settings)
    socket = config.bind_socket()
    health = None if settings.health_port is None else HealthServer(make_health_app(served), settings)
    address = _url(*socket.getsockname()[:2])
    server = _Server(config, lambda: on_listening(address, None if health is None else _url(*health.address)))

    def stop() -> None:
        if served.state == "stopping":
            server.force_exit = True
        logger.info("stopping: running requests have %.0f s to finish", settings.drain_timeout_s)
        served.stop()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop)
    served.start()
    if health is not None:
        health.start()
    beside = [asyncio.create_task(_watch(served, server)), asyncio.create_task(_tidy(served))]
    try:
        await server.serve(sockets=[socket])
    finally:
        for task in beside:
            task.cancel()
        failure = served.failure
        if served.state == "dead" and failure is None:
            failure = RuntimeError("the engine died")
        served.close()
        if health is not None:
            await asyncio.to_thread(health.stop)
    return failure


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _tidy(served: Served) -> None:
    """Give unused memory back to the system when the server has nothing to do."""
    num_read = 0
    while True:
        await asyncio.sleep(_TIDY_S)
        if served.is_idle and served.num_read != num_read:
            num_read = served.num_read
            await asyncio.to_thread(give_memory_back)


async def _watch(served: Served, server: uvicorn.Server) -> None:
    """Shut the server down if the model fails to load or the engine dies."""
    while True:
        await asyncio.sleep(_WATCH_S)
        if served.state in ("failed", "dead"):
            await asyncio.sleep(_WATCH_S)  # let waiting requests get their error first
            server.should_exit = True
            return
