"""The port of /health answers whatever the server's own port is doing."""

import dataclasses
import threading
from collections.abc import Iterator

import httpx
import pytest

from hfax.phases import meter, phase
from hfax.server.app import make_health_app
from hfax.server.health import HealthServer


@pytest.fixture
def running(make_server):
    with make_server() as running:
        yield running


@pytest.fixture
def health(running) -> Iterator[httpx.Client]:
    settings = dataclasses.replace(running.served.settings, health_port=0)
    server = HealthServer(make_health_app(running.served), settings)
    server.start()
    host, port = server.address
    try:
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=60) as client:
            yield client
    finally:
        server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{host}:{port}/health")


def test_it_answers_while_the_event_loop_does_not(running, health):
    """Waited for on the other port, the answer would never come: the loop goes on only afterwards."""
    began, may_go_on = threading.Event(), threading.Event()

    async def block() -> str:
        began.set()
        assert may_go_on.wait(120)
        return "done"

    running.app._app.add_api_route("/block", block)
    with running.client() as client:
        thread = threading.Thread(target=client.get, args=("/block",))
        thread.start()
        try:
            assert began.wait(60)
            assert health.get("/health").json() == {"status": "ready"}
            assert health.get("/ready").status_code == 200
            assert b"hfax:num_requests_running" in health.get("/metrics").content
        finally:
            may_go_on.set()
            thread.join(60)


def test_it_knows_nothing_else_and_asks_for_no_key(health):
    assert health.get("/v1/models").status_code == 404
    assert health.post("/v1/completions", json={"prompt": "x"}).status_code == 404
    assert health.get("/openapi.json").status_code == 404


def test_a_server_that_loads_weights_says_how_many_bytes_are_left(make_server):
    release = threading.Event()

    def work():
        with phase("load", "/secret/folder"):
            meter().expect(3_000_000_000)
            meter().add(1_000_000_000)
            assert release.wait(60)

    with make_server(waits=False, before_loading=work) as running, running.client() as client:
        running.wait_until(lambda: running.served.progress.as_json().get("bytes_loaded"))
        found = client.get("/health").json()
        assert (found["bytes_loaded"], found["bytes_total"]) == (1_000_000_000, 3_000_000_000)
        assert {"seconds_left", "phase"} < found.keys()
        refused = client.post("/v1/completions", json={"model": "demo", "prompt": "x"})
        assert "loading: load 1.00 of 3.00 GB" in refused.json()["error"]["message"]
        release.set()


def test_a_server_that_loads_says_how_far_it_is(make_server):
    """To probes and to requests, without the path of what it loads."""
    release = threading.Event()

    def work():
        with phase("compile", "step[8]"):
            pass
        with phase("load", "/secret/folder"), phase("compile", "step[32]"):
            assert release.wait(60)

    with make_server(waits=False, before_loading=work) as running, running.client() as client:
        running.wait_until(lambda: running.served.progress.as_json()["phase"] == "compile step[32]")
        found = client.get("/health")
        assert found.status_code == 503
        assert found.json().pop("seconds") >= 0
        assert {**found.json(), "seconds": 0} == {
            "status": "loading",
            "phase": "compile step[32]",
            "programs_compiled": 1,
            "seconds": 0,
        }
        refused = client.post("/v1/completions", json={"model": "demo", "prompt": "x"})
        assert refused.status_code == 503
        assert "loading: compile step[32], 1 programs compiled" in refused.json()["error"]["message"]
        assert "secret" not in found.text + refused.text
        release.set()
        running.wait_until(lambda: running.served.state == "ready", 120)
        assert client.get("/health").json() == {"status": "ready"}
