"""Valid traffic during an attack: short greedy completions, and /health in a loop, each measured.

`python -m hfax.bench.attacks.witness` is a process of its own, so that the attackers' work does not slow its clock. It reads its
settings as a line of JSON from stdin, and writes each measurement as a line of JSON until stdin is closed. Times are of
`time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hfax.bench.attacks.case import COMPLETIONS, Target, head, post, valid_body
from hfax.bench.attacks.raw_client import Address, exchange

PROMPTS = ("Return a new", "Raise an error if", "Append an object to")
_MAX_TOKENS = 8
_PAUSE_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One valid request, or one of /health.

    Args:
        what: "valid" or "health".
        started: when it was sent, in seconds of `time.monotonic`.
        seconds: until the whole response was read.
        result: the status, or how it ended without one.
        prompt: the prompt's number; 0 for /health.
        text: the completion's text; "" for /health, and if there is none.
    """

    what: str
    started: float
    seconds: float
    result: str
    prompt: int = 0
    text: str = ""


async def watch(
    address: Address,
    health: Address,
    target: Target,
    timeout_s: float,
    report: Callable[[Measurement], None],
    ended: asyncio.Event,
    num_clients: int = 2,
) -> None:
    """Send valid requests, and return when the last ones are answered after `ended` is set.

    Args:
        address: the server's.
        health: where /health is asked for.
        target: the valid client's key, and the model.
        timeout_s: timeout of a request, in seconds.
        report: called with each measurement.
        ended: no more requests are sent once it is set.
        num_clients: clients that send completions.
    """

    async def complete(client: int) -> None:
        number = client
        while not ended.is_set():
            prompt = number % len(PROMPTS)
            body = valid_body(
                COMPLETIONS, json.dumps(target.model), prompt=PROMPTS[prompt], max_tokens=_MAX_TOKENS, temperature=0
            )
            started = time.monotonic()
            outcome = await exchange(address, post(target, COMPLETIONS, body), timeout_s=timeout_s)
            text = _text(outcome.body) if outcome.status == 200 else ""
            report(
                Measurement(
                    what="valid",
                    started=started,
                    seconds=outcome.seconds,
                    result=outcome.label,
                    prompt=prompt,
                    text=text,
                )
            )
            number += 1
            await asyncio.sleep(_PAUSE_S)

    async def ask_health() -> None:
        while not ended.is_set():
            started = time.monotonic()
            asked = dataclasses.replace(target, host=health.name)
            outcome = await exchange(health, [head(asked, "/health", None, method="GET")], timeout_s=timeout_s)
            report(Measurement(what="health", started=started, seconds=outcome.seconds, result=outcome.label))
            await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(ask_health(), *map(complete, range(num_clients)))


def _text(body: bytes) -> str:
    try:
        return str(json.loads(body)["choices"][0]["text"])
    except (ValueError, KeyError, IndexError, TypeError):
        return ""


async def _main() -> None:
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    address, health, target = Address(**given["address"]), Address(**given["health"]), Target(**given["target"])
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, daemon=True).start()

    def write(one: Measurement) -> None:
        sys.stdout.write(json.dumps(dataclasses.asdict(one)) + "\n")
        sys.stdout.flush()

    await watch(address, health, target, given["timeout_s"], write, ended)


if __name__ == "__main__":
    asyncio.run(_main())
