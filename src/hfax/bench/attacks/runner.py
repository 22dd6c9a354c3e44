"""Runs hostile cases against a server while valid traffic goes on, and measures what happens to both.

The valid traffic is measured alone first, then during each class. It has an API key of its own, so a server that treats clients
fairly can keep it apart. Measures only; `report` judges.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from hfax.bench.attacks import memory
from hfax.bench.attacks.case import Case, Target, head
from hfax.bench.attacks.cases import CLASSES, make_cases, sample
from hfax.bench.attacks.raw_client import Address, Outcome, exchange
from hfax.bench.attacks.witness import Measurement
from hfax.errors import HfaxError, InvalidInputError

MEMORY_SHARE, MEMORY_BYTES = 0.05, 64 << 20
"""Memory may grow during a class by this share, or by so many bytes if that is more."""
_LOADING_S = 300.0
_SLOW_MORE_S = 2.0
"""Slow clients wait so long for a response after they have sent everything."""
_SETTLED = 3
"""Valid requests sent after a class's last case and answered before the next class begins."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack's settings.

    Args:
        url: the server's URL.
        model: model name on the server; None queries the server.
        api_key: API key of the valid traffic.
        attack_key: API key of the attackers; None: `api_key`.
        classes: names of classes, see `cases.CLASSES`.
        seed: determines everything random in the cases.
        each: cases of each class, sampled; None: all.
        timeout_s: timeout of each request, in seconds.
        concurrency: hostile cases at a time; floods run one by one.
        health_url: URL of the server that is asked for /health, if it has a port of its own; None: `url`.
        max_health_s: longest allowed answer of /health, in seconds.
        pid: process id of the server, if it runs on this machine, to measure its memory with that of its children.
        alone_s: duration of the measurement without attackers, in seconds.
        slow_s: how long slow clients dawdle, in seconds.
        flood: connections of a flood.
        pause_s: longest pause after a class until the server's memory is given back, in seconds.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    attack_key: str | None = None
    classes: tuple[str, ...] = CLASSES
    seed: int = 0
    each: int | None = None
    timeout_s: float = 60.0
    concurrency: int = 8
    health_url: str | None = None
    max_health_s: float = 1.0
    pid: int | None = None
    alone_s: float = 10.0
    slow_s: float = 30.0
    flood: int = 500
    pause_s: float = 15.0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.classes if name not in CLASSES]:
            raise InvalidInputError(
                f"--classes {unknown[0]} is unknown.", f"The classes are {', '.join(CLASSES)}.", "Pass some of them."
            )


@dataclasses.dataclass(kw_only=True)
class _Stage:
    """What was measured of one class, or of the valid traffic alone."""

    name: str
    started: float = dataclasses.field(default_factory=time.monotonic)
    cases: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    memory_before: dict[str, int] = dataclasses.field(default_factory=dict)
    memory_after: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def run_attack(
    attack: Attack, on_progress: Callable[[str, int, int], None] = lambda name, done, total: None
) -> dict[str, Any]:
    """Attack a server.

    Args:
        attack: the settings.
        on_progress: called with the class's name, and the numbers of its cases that are done and of all.

    Returns:
        `attack`, the settings without keys; `load`, the machine's load average before and after; and `stages`, "alone" and each
        class. A stage has `cases` (name, number of `results` by label, start and duration in seconds, whether the server broke
        the connection), `results` of all, `valid` and `health` (number, failures by label, slowest in seconds, and the cases
        that ran meanwhile; `valid` also the number of changed texts), and memory in bytes before and after, by source.

    Raises:
        HfaxError: the server does not respond.
    """
    return asyncio.run(_run(attack, on_progress))


async def _run(attack: Attack, on_progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    address, load = Address.of(attack.url), os.getloadavg()
    model = attack.model or await _ask_model(address, attack)
    valid = Target(host=address.name, model=model, api_key=attack.api_key)
    hostile = dataclasses.replace(
        valid, api_key=attack.attack_key or attack.api_key, slow_s=attack.slow_s, flood=attack.flood
    )
    stages: list[_Stage] = []
    health = Address.of(attack.health_url or attack.url)
    async with _watching(address, health, valid, attack.timeout_s) as seen:
        alone = _Stage(name="alone", memory_before=await _memory(address, attack))
        stages.append(alone)
        await asyncio.sleep(attack.alone_s)
        await _settle(seen, attack)
        alone.memory_after, alone.seconds = await _memory(address, attack), time.monotonic() - alone.started
        for name in attack.classes:
            cases = make_cases(attack.seed, [name])
            cases = cases if attack.each is None else sample(cases, attack.each, attack.seed)
            stage = _Stage(name=name, memory_before=await _memory(address, attack))
            stages.append(stage)
            await _send_all(attack, address, hostile, cases, stage, on_progress)
            stage.seconds = time.monotonic() - stage.started
            await _settle(seen, attack)
            await _await_memory(address, attack, stage)
    return {
        "attack": dataclasses.asdict(attack) | {"api_key": None, "attack_key": None, "model": model},
        "load": {"before": load, "after": os.getloadavg()},
        "stages": _summaries(stages, seen),
    }


@contextlib.asynccontextmanager
async def _watching(
    address: Address, health: Address, target: Target, timeout_s: float
) -> AsyncIterator[list[Measurement]]:
    """Valid traffic from another process while the block runs; the list grows with what it measures."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hfax.bench.attacks.witness",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    settings = {
        "address": dataclasses.asdict(address),
        "health": dataclasses.asdict(health),
        "target": dataclasses.asdict(target),
        "timeout_s": timeout_s,
    }
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    seen: list[Measurement] = []

    async def hear(lines: asyncio.StreamReader) -> None:
        async for line in lines:
            seen.append(Measurement(**json.loads(line)))

    assert process.stdout is not None
    hearing = asyncio.create_task(hear(process.stdout))
    try:
        yield seen
        process.stdin.close()
        await hearing
        await process.wait()
    finally:
        hearing.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _settle(seen: list[Measurement], attack: Attack) -> None:
    """Wait until valid requests that were sent from now on are answered, or time out."""
    started = time.monotonic()
    while sum(one.what == "valid" and one.started > started for one in seen) < _SETTLED:
        if time.monotonic() > started + 2 * attack.timeout_s:
            return
        await asyncio.sleep(0.05)


async def _send_all(
    attack: Attack,
    address: Address,
    target: Target,
    cases: list[Case],
    stage: _Stage,
    on_progress: Callable[[str, int, int], None],
) -> None:
    gate = asyncio.Semaphore(1 if stage.name == "floods" else attack.concurrency)

    async def one(case: Case) -> None:
        async with gate:
            started = time.monotonic()
            outcomes = await _play(case, address, target, attack.timeout_s)
        stage.cases.append(
            {
                "name": case.name,
                "results": dict(collections.Counter(outcome.label for outcome in outcomes)),
                "started": started,
                "seconds": time.monotonic() - started,
                "is_broken": case.must_answer and any(_is_broken(outcome) for outcome in outcomes),
            }
        )
        on_progress(stage.name, len(stage.cases), len(cases))

    await asyncio.gather(*map(one, cases))


async def _play(case: Case, address: Address, target: Target, timeout_s: float) -> list[Outcome]:
    """Open all connections of a case at once."""
    leaves_after_s = case.leaves_after_s
    if case.kind == "slow":
        leaves_after_s = target.slow_s + (_SLOW_MORE_S if case.reads else 0)
    exchanges = (
        exchange(
            address,
            case.parts(target, index),
            timeout_s=max(timeout_s, leaves_after_s or 0),
            leaves_after_s=leaves_after_s,
            reads=case.reads,
        )
        for index in range(case.num_connections(target))
    )
    return list(await asyncio.gather(*exchanges))


def _is_broken(outcome: Outcome) -> bool:
    """Whether the server closed the connection without a response, although it had got the whole request."""
    return outcome.has_sent_all and outcome.ended in ("closed", "reset")


async def _memory(address: Address, attack: Attack) -> dict[str, int]:
    """The server's memory in bytes by source: "metrics", and "processes" if the process id is known."""
    target = Target(host=address.name, model="", api_key=attack.api_key)
    outcome = await exchange(address, [head(target, "/metrics", None, method="GET")], timeout_s=attack.timeout_s)
    found = {
        "metrics": memory.of_metrics(outcome.body) if outcome.status == 200 else None,
        "processes": None if attack.pid is None else await asyncio.to_thread(memory.of_processes, attack.pid),
    }
    return {source: size for source, size in found.items() if size is not None}


async def _await_memory(address: Address, attack: Attack, stage: _Stage) -> None:
    """Measure the memory until it is back within its limit, or the pause is over."""
    deadline = time.monotonic() + attack.pause_s
    while True:
        stage.memory_after = await _memory(address, attack)
        if not grown(stage.memory_before, stage.memory_after) or time.monotonic() > deadline:
            return
        await asyncio.sleep(0.5)


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """The sources by which memory exceeds its limit."""
    return [
        source
        for source, size in after.items()
        if source in before and size - before[source] > max(MEMORY_SHARE * before[source], MEMORY_BYTES)
    ]


def _summaries(stages: list[_Stage], seen: list[Measurement]) -> list[dict[str, Any]]:
    """Each stage with the measurements that began in it."""
    ends = [*(stage.started for stage in stages[1:]), float("inf")]
    texts: dict[int, str] = {}
    found = []
    for stage, end in zip(stages, ends, strict=True):
        own = [one for one in seen if stage.started <= one.started < end]
        valid = [one for one in own if one.what == "valid"]
        for one in valid:
            if one.result == "200":
                texts.setdefault(one.prompt, one.text)
        results: collections.Counter[str] = collections.Counter()
        for case in stage.cases:
            results.update(case["results"])
        found.append(
            {
                "name": stage.name,
                "seconds": stage.seconds,
                "cases": stage.cases,
                "results": dict(sorted(results.items())),
                "valid": _summary(valid, stage.cases)
                | {"changed": sum(one.result == "200" and one.text != texts[one.prompt] for one in valid)},
                "health": _summary([one for one in own if one.what == "health"], stage.cases),
                "memory_before": stage.memory_before,
                "memory_after": stage.memory_after,
            }
        )
    return found


def _summary(measured: list[Measurement], cases: list[dict[str, Any]]) -> dict[str, Any]:
    slowest = max(measured, key=lambda one: one.seconds, default=None)
    during = (
        []
        if slowest is None
        else [
            case["name"]
            for case in cases
            if case["started"] < slowest.started + slowest.seconds
            and slowest.started < case["started"] + case["seconds"]
        ]
    )
    return {
        "count": len(measured),
        "failed": dict(collections.Counter(one.result for one in measured if one.result != "200")),
        "slowest_s": 0.0 if slowest is None else slowest.seconds,
        "slowest_during": during,
    }


async def _ask_model(address: Address, attack: Attack) -> str:
    target = Target(host=address.name, model="", api_key=attack.api_key)
    deadline = time.monotonic() + _LOADING_S
    while True:
        outcome = await exchange(address, [head(target, "/v1/models", None, method="GET")], timeout_s=attack.timeout_s)
        if outcome.status != 503 or time.monotonic() > deadline:  # 503: the model is loading
            break
        await asyncio.sleep(1)
    try:
        return str(json.loads(outcome.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HfaxError(
            f"Could not query the model name from {attack.url}.",
            f"GET /v1/models: {outcome.label}.",
            "Check the URL and --api-key, or pass --model.",
        ) from error
