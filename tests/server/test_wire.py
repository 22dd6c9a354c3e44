"""What goes over the wire: heads that are too large or too slow, readers that do not read, addresses, and the access log."""

from __future__ import annotations

import json
import logging
import socket
import time

import pytest

from hfax.server.connection import Connection
from hfax.server.settings import Settings

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def connected(running, receive_bytes: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(20)
    raw.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
    return raw


def answered(raw: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    found = b""
    try:
        while data := raw.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return found


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


def test_chunks_of_a_byte_leave_other_connections_their_turn(server, monkeypatch):
    """100,000 of them held the event loop for half a second; now each step of it parses 16 KiB."""
    sizes = []
    parse = Connection._parse
    monkeypatch.setattr(Connection, "_parse", lambda self, data: (sizes.append(len(data)), parse(self, data))[1])
    body = json.dumps({"model": "demo", "prompt": "a " * 15_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with connected(server) as raw:
        raw.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + chunks
        )
        answer = answered(raw)
    assert status_of(answer) == 200
    with server.client() as client:
        whole = client.post("/tokenize", content=body, headers={"Content-Type": "application/json"}).json()
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == whole
    assert len(sizes) > len(chunks) // (16 << 10)
    assert max(sizes) <= 16 << 10


def test_heads_over_the_limits_are_refused(server):
    """With httptools installed there was no limit: a head could fill the memory."""
    for more, status in (
        (b"X-A: 1\r\n" * 90, 200),
        (b"X-A: 1\r\n" * 101, 431),
        (b"X-A: " + b"a" * 30_000 + b"\r\n", 200),
        (b"X-A: " + b"a" * 40_000 + b"\r\n", 431),
    ):
        with connected(server) as raw:
            raw.sendall(HEAD + more + b"Connection: close\r\n\r\n")
            answer = answered(raw)
        assert status_of(answer) == status
        if status == 431:
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "head_too_large"
    with connected(server) as raw:
        raw.sendall(b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(raw.recv(4096)) == 431


def test_a_head_without_an_end_is_cut_off(server):
    with connected(server) as raw:
        raw.sendall(HEAD + b"X-A: ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            raw.sendall(b"a" * (64 << 20))


def test_bytes_that_are_no_request_get_an_error_of_the_api(server):
    with connected(server) as raw:
        raw.sendall(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        answer = answered(raw)
    assert status_of(answer) == 400
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD], ids=["nothing", "a word", "half a head"])
def test_a_connection_that_sends_no_request_is_closed(make_server, sent):
    with make_server(head_timeout_s=0.5) as running, connected(running) as raw:
        raw.sendall(sent)
        started = time.monotonic()
        assert answered(raw) == b""
        assert time.monotonic() - started > 0.3


def test_a_head_that_drips_is_closed_also_as_second_on_a_connection(make_server):
    with make_server(head_timeout_s=0.5) as running, connected(running) as raw:
        raw.sendall(HEAD + b"\r\n")
        assert status_of(raw.recv(4096)) == 200
        time.sleep(0.7)  # between requests the limit for idle connections counts
        raw.sendall(HEAD + b"\r\n")
        assert status_of(raw.recv(4096)) == 200
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            drip(raw)


def test_a_body_that_drips_after_its_answer_is_cut_off(make_server):
    with make_server(head_timeout_s=0.5, api_keys=("secret",)) as running, connected(running) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert status_of(raw.recv(4096)) == 401
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            drip(raw)


def drip(raw: socket.socket) -> None:
    """Send a head that never ends, a byte at a time, for five seconds."""
    for byte in b"GET /" + b"a" * 45:
        raw.sendall(bytes([byte]))
        time.sleep(0.1)


def test_slow_answers_do_not_count_as_slow_heads(make_server):
    with make_server(head_timeout_s=0.3) as running, running.client() as client:
        body = {"model": "demo", "prompt": "Return a new", "max_tokens": 400, "ignore_eos": True, "n": 8}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/health").status_code == 200


def ask_for_pages(raw: socket.socket, count: int) -> None:
    """Ask for the chat page many times at once; the answers are more than the buffers on the way hold."""
    raw.sendall((b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"\r\n") * (count - 1))
    raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")


def test_a_reader_that_does_not_read_is_cut_off(make_server):
    """Its answer stayed in memory, and its connection open, for as long as it liked."""
    with make_server(write_timeout_s=0.5) as running, connected(running, 4096) as raw:
        ask_for_pages(raw, 3000)
        time.sleep(5)
        assert answered(raw).count(b"HTTP/1.1 200 OK") < 2900


def test_a_slow_reader_gets_all(make_server):
    with make_server(write_timeout_s=1.0) as running, connected(running, 1 << 16) as raw:
        ask_for_pages(raw, 1000)
        found = b""
        while data := raw.recv(1 << 20):
            found += data
            time.sleep(0.02)
        assert found.count(b"HTTP/1.1 200 OK") == 1000


def test_a_stream_nobody_reads_ends_and_frees_its_pages(make_server):
    with make_server(write_timeout_s=0.5, config={"max_num_seqs": 8}) as running:
        body = json.dumps(
            {
                "model": "demo",
                "prompt": "Return a new",
                "max_tokens": 450,
                "ignore_eos": True,
                "stream": True,
                "n": 16,
                "logprobs": 20,
            }
        ).encode()
        with connected(running, receive_bytes=2048) as raw:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            raw.sendall(head + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
            running.wait_until(lambda: running.engine.core.scheduler.has_work)
            running.wait_until(lambda: not running.engine.core.scheduler.has_work)
            running.wait_until(lambda: _access_count(running) > 0)
            assert _access_count(running) == 1


def _access_count(running) -> float:
    with running.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("http_requests_total") and "/v1/completions" in line
    )


# --------------------------------------------------------------------------------------------------- addresses and the log


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hfax.access"), "propagate", True)
    caplog.set_level(logging.INFO, logger="hfax.access")
    return caplog


@pytest.mark.parametrize("json_logs", [False, True])
def test_a_path_cannot_forge_a_line_of_the_log(make_server, logged, json_logs):
    path = '/x%0d%0aFORGED%20"%20200%1b[31m%7f%c2%85%e2%80%a8%e2%80%ae'
    with make_server(json_logs=json_logs) as running, running.client() as client:
        client.get(path)
        client.post("/v1/completions", json={"model": "demo", "prompt": "a", "max_tokens": 1, "user": "me\n\x7f\x9b"})
    lines = [record.getMessage() for record in logged.records if record.name == "hfax.access"]
    assert len(lines) == 2
    for line in lines:
        assert line.isprintable(), line
    assert "FORGED" in lines[0]
    if json_logs:
        assert json.loads(lines[0])["path"].startswith('/x\r\nFORGED "')
    else:
        assert lines[0].replace('\\"', "").count('"') == 2


def test_probes_are_logged_at_debug_and_a_refused_one_like_any_request(make_server, logged):
    with make_server(api_keys=("secret",)) as running, running.client() as client:
        for path in ("/health", "/ready", "/metrics"):
            client.get(path, headers={"Authorization": "Bearer secret"})
        client.get("/ready", headers={"Authorization": "Bearer wrong"})
    (line,) = [record.getMessage() for record in logged.records if record.name == "hfax.access"]
    assert '"GET /ready" 401' in line


def test_a_forwarded_address_counts_from_trusted_proxies_alone(make_server, logged):
    """uvicorn believes a proxy on loopback by default: any local client could write any address into the log."""
    forwarded = {"X-Forwarded-For": "203.0.113.7"}
    for proxies, address in (((), "127.0.0.1"), (("192.0.2.1",), "127.0.0.1"), (("127.0.0.1",), "203.0.113.7")):
        logged.clear()
        with make_server(trusted_proxies=proxies) as running, running.client() as client:
            client.get("/v1/models", headers=forwarded)
        (line,) = [record.getMessage() for record in logged.records if record.name == "hfax.access"]
        assert line.split()[0] == address


def test_the_limits_are_those_of_the_documentation():
    settings = Settings(model="demo", served_model_names=("demo",))
    assert (settings.head_timeout_s, settings.write_timeout_s, settings.trusted_proxies) == (20.0, 30.0, ())
