import random
import socket

import pytest

from hfax.launch import ports
from hfax.launch.ports import free_port


def test_the_kernel_hands_the_port_to_no_connection():
    first, last = map(int, ports._EPHEMERAL.read_text().split())
    assert not any(first <= free_port() <= last for _ in range(50))


def test_all_of_the_ports_are_free(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        port = free_port(2)
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        draws = iter([port, port, port + 2])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(draws))
        assert free_port(2) == port + 2
