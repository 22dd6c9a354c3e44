"""Ports for servers that another process opens a little later."""

import random
import re
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_TRIES = 100


def free_port(count: int = 1) -> int:
    """Find a TCP port of 127.0.0.1 that is still free when another process opens it.

    What the kernel hands out for port 0 may be taken by any outgoing connection until then. Ports below the range of those
    (`ip_local_port_range`) are only taken by servers.

    Args:
        count: how many consecutive ports must be free.

    Returns:
        The first of the ports.
    """
    draw = random.SystemRandom()  # processes that look for a port at the same moment draw different ones
    candidates = (draw.randrange(_LOWEST, _first_ephemeral() - count) for _ in range(_TRIES))
    found = (port for port in candidates if all(_bound(port + i) is not None for i in range(count)))
    port = next(found, None) or _bound(0)
    if port is None:
        raise OSError("No TCP port of 127.0.0.1 is free.")
    return port


def _first_ephemeral() -> int:
    found = re.match(r"\d+", _EPHEMERAL.read_text()) if _EPHEMERAL.exists() else None
    first = 32_768 if found is None else int(found[0])
    return first if first > 2 * _LOWEST else 65_536


def _bound(port: int) -> int | None:
    """The port, after it was bound and closed again; None if it is taken. Port 0 stands for one of the kernel's choice."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return None
        return probe.getsockname()[1]
