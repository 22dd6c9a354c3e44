"""Hostile schemas and regular expressions: compiled, or refused within the limits of the process that reads them.

The limit of processor time is enforced by the worker pool, so the claim does not depend on the machine's speed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx
import pytest

from hfax.bench.attacks.case import CHAT, COMPLETIONS, valid_body
from hfax.bench.attacks.cases import schema_format
from hfax.bench.attacks.regexes import regexes
from hfax.bench.attacks.schemas import schemas

FORMATS = {f"schema {name}": schema_format(schema) for name, schema in schemas(0).items()} | {
    f"regex {name}": {"type": "regex", "regex": regex} for name, regex in regexes(0).items()
}
EXPENSIVE = ("schema multipleOf 62615533", "regex counted '.*a.{100}'", "schema 2 to the 40 by allOf")
"""In every run, beside every sixteenth."""
_TRIES = 5


def ask(client: httpx.Client, wanted, path: str = CHAT) -> httpx.Response:
    """Ask again while the machine is too busy to tell."""
    for _ in range(_TRIES):
        answer = client.post(
            path,
            content=valid_body(path, '"demo"', response_format=wanted, max_tokens=1),
            headers={"Content-Type": "application/json"},
        )
        if answer.status_code != 503:
            break
    return answer


def check(server, names: Sequence[str]) -> None:
    wrong = {}
    with server.client() as client:
        plain = {"model": "demo", "prompt": "Return a new", "max_tokens": 4, "temperature": 0}
        before = client.post(COMPLETIONS, json=plain).json()["choices"]
        for name in names:
            answer = ask(client, FORMATS[name])
            after = client.post(COMPLETIONS, json=plain)
            if answer.status_code not in (200, 400) or after.status_code != 200 or after.json()["choices"] != before:
                wrong[name] = answer.status_code, answer.text[:300], after.status_code
            elif answer.status_code == 400 and not json.loads(answer.content)["error"]["message"]:
                wrong[name] = "no message"
    assert wrong == {}
    server.wait_until(lambda: not server.engine.core.scheduler.has_work)
    assert server.engine.pages.num_held == 0


def test_there_are_many_of_each():
    assert len(schemas(0)) >= 120
    assert len(regexes(0)) >= 80
    assert json.dumps(list(FORMATS.values()), default=repr) == json.dumps(
        [*map(schema_format, schemas(0).values()), *({"type": "regex", "regex": r} for r in regexes(0).values())], default=repr
    )  # fmt: skip


def test_a_sample_is_compiled_or_refused(server):
    check(server, [*EXPENSIVE, *list(FORMATS)[::16]])


def test_a_worker_that_a_schema_costs_is_replaced(server):
    killed = server.served.workers.num_killed
    with server.client() as client:
        answer = ask(client, FORMATS["schema multipleOf 62615533"])
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "too_expensive"
        assert ask(client, {"type": "regex", "regex": "a"}).status_code == 200
    assert server.served.workers.num_killed > killed


@pytest.mark.sweep
@pytest.mark.timeout(3000)
def test_all_are_compiled_or_refused(make_server):
    with make_server() as running:
        check(running, list(FORMATS))
