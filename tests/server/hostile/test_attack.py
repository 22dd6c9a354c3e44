"""A server under attack: valid requests get the same texts, nothing is left behind, and it ends in time.

How long requests take under attack is not claimed here, since it depends on the machine: `hfax bench attack` measures it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import httpx
import processes
import pytest

from hfax.bench.attacks import report
from hfax.bench.attacks.case import Target
from hfax.bench.attacks.cases import CLASSES, make_cases, sample
from hfax.bench.attacks.memory import of_metrics, of_processes
from hfax.bench.attacks.raw_client import Address, exchange
from hfax.bench.attacks.runner import Attack, run_attack
from hfax.errors import InvalidInputError

KEYS = ("first", "second")
CONFIG = {"max_waiting": 1000}
"""All that a client may have waiting fits, since the engine's queue does not know clients."""


def stand(running, **options) -> dict:
    """Attack a server, and check what must hold on any machine."""
    found = run_attack(Attack(url=running.url, api_key=KEYS[0], attack_key=KEYS[1], timeout_s=300, **options))
    assert [stage["name"] for stage in found["stages"]] == ["alone", *CLASSES]
    for stage in found["stages"]:
        name = stage["name"]
        faults = {case["name"]: case["results"] for case in stage["cases"] if is_fault(case)}
        assert faults == {}, name
        assert "timeout" not in stage["results"], stage["cases"]
        assert [case["name"] for case in stage["cases"] if case["is_broken"]] == [], name
        assert stage["valid"]["count"] > 0, name
        assert (stage["valid"]["failed"], stage["valid"]["changed"]) == ({}, 0), name
        assert stage["health"]["failed"] == {}, name
    scheduler, workers = running.engine.core.scheduler, running.served.workers
    running.wait_until(lambda: not scheduler.has_work and not workers.num_waiting and not workers.num_busy, 120)
    running.wait_until(lambda: running.app._num_buffered == 0)
    assert running.engine.pages.num_held == 0
    assert running.served.state == "ready"
    return found


def is_fault(case: dict) -> bool:
    return any(label.isdigit() and int(label) >= 500 and label != "503" for label in case["results"])


def test_a_sample_of_all_attacks_changes_no_valid_text_and_leaves_nothing(make_server):
    with make_server(config=CONFIG, api_keys=KEYS) as running:
        found = stand(running, each=7, slow_s=1.0, flood=40, alone_s=1.0, pause_s=0.0)
        assert sum(len(stage["cases"]) for stage in found["stages"]) >= 60
        with running.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
            assert of_metrics(client.get("/metrics").content) > 64 << 20
    assert report.table_of(found).row_count == 1 + len(CLASSES)


@pytest.mark.sweep
def test_all_attacks_change_no_valid_text_and_leave_nothing(make_server):
    with make_server(config=CONFIG, api_keys=KEYS) as running:
        found = stand(running, slow_s=20.0, flood=500, alone_s=1.0, pause_s=0.0)
        assert sum(len(stage["cases"]) for stage in found["stages"]) == len(make_cases(0))


FLOODS = ("expensive grammars", "long generations", "images", "large prompts")


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*(name for name in CLASSES if name != "floods"), *FLOODS])
def test_sigterm_in_the_middle_of_an_attack_ends_the_server_in_time(name):
    """Within its drain timeout and 5 s, whatever it is computing: all cases of a class at once, or one that comes 300 times."""
    drain_s = 10
    process = processes.Started(
        ["-m", "hfax", "serve", "demo", "--port", "0", "--drain-timeout", drain_s, "--max-model-len", "512"], {}
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")), daemon=True)
    reader.start()
    try:
        url = wait_for(lambda: next((line.split()[2].rstrip(",") for line in lines if "Listening on" in line), None))
        address = Address.of(url)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
        cases = make_cases(0, ["floods" if name in FLOODS else name])
        if name in FLOODS:
            cases = [case for case in cases if case.name == name] * 300
        target = Target(host=address.name, model="demo")

        async def flood() -> list:
            exchanges = (exchange(address, case.parts(target, i), timeout_s=120) for i, case in enumerate(cases))
            return await asyncio.gather(*exchanges)

        outcomes: list = []
        flooding = threading.Thread(target=lambda: outcomes.extend(asyncio.run(flood())))
        flooding.start()
        time.sleep(3)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert process.wait(drain_s + 60) == 0
        assert time.monotonic() - started < drain_s + 5
        flooding.join(150)
        assert len(outcomes) == len(cases) > 0
        assert "timeout" not in {outcome.label for outcome in outcomes}
    finally:
        process.kill()
        process.wait(20)
        reader.join(20)
        process.stderr.close()


def wait_for(condition, timeout_s: float = 240):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


# ----------------------------------------------------------------------------------------------------------------- the attack


def test_cases_are_many_and_the_same_for_the_same_seed():
    cases = make_cases(3)
    assert len(cases) >= 500
    assert {case.kind for case in cases} == set(CLASSES)
    assert len({str(case) for case in cases}) == len(cases)
    target = Target(host="localhost:1", model="demo", api_key="k")
    again = {str(case): case for case in make_cases(3)}
    for case in sample(cases, 4, seed=1):
        assert list(case.parts(target, 0)) == list(again[str(case)].parts(target, 0)), case


def test_a_report_names_what_was_violated():
    quiet = {"count": 3, "failed": {}, "slowest_s": 0.2, "slowest_during": [], "changed": 0}
    stage = {"name": "json", "cases": [], "valid": quiet, "health": quiet, "memory_before": {}, "memory_after": {}}
    attack = {"max_health_s": 1.0}
    assert report.violations({"attack": attack, "stages": [stage, stage]}) == []
    bad = {
        **stage,
        "cases": [
            {"name": "a", "results": {"500": 1, "503": 2}, "is_broken": False},
            {"name": "b", "results": {}, "is_broken": True},
        ],
        "valid": quiet | {"failed": {"timeout": 2}, "slowest_s": 5.3, "slowest_during": ["a"]},
        "health": quiet | {"slowest_s": 1.1},
        "memory_before": {"metrics": 100 << 20, "processes": 2000 << 20},
        "memory_after": {"metrics": 163 << 20, "processes": 2101 << 20},
    }  # fmt: skip
    assert report.violations({"attack": attack, "stages": [stage, bad]}) == [
        "json: 2 of 3 valid requests failed: timeout x 2",
        "json: a valid request took 5.3 s; alone, at most 0.2 s (during a)",
        "json: /health took 1.10 s; the limit is 1 s",
        "json: statuses of 500 or more: a",
        "json: connections closed without an answer: b",
        "json: memory (processes) grew from 2000 to 2101 MB",
    ]


def test_memory_of_processes_is_that_of_the_machine():
    import os

    assert of_processes(os.getpid()) > 10 << 20
    assert of_processes(2**30) is None
    assert of_metrics(b"# HELP\nprocess_resident_memory_bytes 1.5e+08\n") == 150_000_000


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "200"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n", "204"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "200"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", "closed"),
        (b"HTTP/1.0 500 No\r\n\r\nok", "500"),
        (b"hello\r\n\r\n", "closed"),
        (b"", "closed"),
    ],
)
def test_the_raw_client_tells_answers_from_broken_connections(answer, label):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def ask() -> str:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = Address(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        outcome = await exchange(address, [b"GET / HTTP/1.1\r\n", 0.01, b"\r\n"], timeout_s=60)
        server.close()
        gone = await exchange(address, [b"GET / HTTP/1.1\r\n\r\n"], timeout_s=60)
        assert gone.label == "refused"
        return outcome.label

    assert asyncio.run(ask()) == label


def test_wrong_settings_are_refused():
    with pytest.raises(InvalidInputError, match="unknown"):
        Attack(url="http://localhost", classes=("made up",))
    with pytest.raises(InvalidInputError, match="URL"):
        Address.of("localhost:8000")
