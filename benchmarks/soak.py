"""Ten minutes of mixed load on `hfax serve demo`: `python benchmarks/soak.py`.

A fifth of the clients leave midway, one in twenty sends something malformed, some ask for more than there is, and every half minute
a burst of ten times the queue comes at once. Afterwards: valid requests that failed, pages that are still held, the memory
between a fifth of the time and the end, and compilations after the server was ready. Results go to benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

QUEUE = 16


class Soak:
    """The load, and what came of it."""

    def __init__(self, url: str, pid: int, seconds: float) -> None:
        self.url, self.pid, self.seconds = url, pid, seconds
        self.counts: collections.Counter[str] = collections.Counter()
        self.numbers = random.Random(0)
        self.memory: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Until the time is over."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            started = time.monotonic()
            tasks: set[asyncio.Task[None]] = set()
            next_burst = started + 30
            while (now := time.monotonic()) - started < self.seconds:
                count = 1
                if now >= next_burst:
                    count, next_burst = 10 * QUEUE, now + 30
                for _ in range(count):
                    task = asyncio.create_task(self.one(client))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                if int(now) != int(self.memory[-1][0]) if self.memory else True:
                    self.memory.append((now, self.resident()))
                await asyncio.sleep(self.numbers.expovariate(12))
            await asyncio.gather(*tasks)

    async def one(self, client: httpx.AsyncClient) -> None:
        """A request of some kind."""
        draw = self.numbers.random()
        body: dict[str, Any] = {
            "model": "demo",
            "prompt": "Return a new " + "list of names " * self.numbers.randint(0, 60),
            "max_tokens": self.numbers.randint(1, 60),
            "temperature": self.numbers.choice([0, 0.8]),
        }
        body |= self.numbers.choice(
            [{}, {}, {"logprobs": 2}, {"repetition_penalty": 1.2}, {"stop": ["list"]}, {"n": 2}]
        )
        try:
            if draw < 0.2:
                await self.leave(client, body)
            elif draw < 0.25:
                answer = await client.post(
                    "/v1/completions", content=self.numbers.choice([b"{", b"[]", b'{"prompt": 1}', b"\xff"])
                )
                self.counts["malformed, 400" if answer.status_code == 400 else f"malformed, {answer.status_code}!"] += 1
            elif draw < 0.3:
                over = self.numbers.choice([{"prompt": "a " * 3000}, {"n": 1000}, {"max_tokens": 100_000}])
                answer = await client.post("/v1/completions", json=body | over)
                self.counts[
                    "over limits, 400" if answer.status_code == 400 else f"over limits, {answer.status_code}!"
                ] += 1
            else:
                answer = await client.post("/v1/completions", json=body)
                known = {200: "valid, answered", 429: "valid, queue full"}
                self.counts[known.get(answer.status_code, f"valid, {answer.status_code}!")] += 1
        except httpx.HTTPError as error:
            self.counts[f"{type(error).__name__}!"] += 1

    async def leave(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        """A client that goes away before its answer is whole."""
        if self.numbers.random() < 0.5:
            with contextlib.suppress(httpx.TimeoutException):
                await client.post("/v1/completions", json=body | {"max_tokens": 200, "ignore_eos": True}, timeout=0.1)
        else:
            async with client.stream(
                "POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 200}
            ) as answer:
                async for _ in answer.aiter_lines():
                    break
        self.counts["left midway"] += 1

    def resident(self) -> float:
        """Of the server, MB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def metric(url: str, name: str) -> float:
    """One number of /metrics."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"hfax:{name}")).split()[-1])


def main() -> None:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    minutes = parser.parse_args().minutes
    command = [
        sys.executable,
        "-m",
        "hfax",
        "serve",
        "demo",
        "--port",
        "0",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "8",
    ]
    server = subprocess.Popen(
        [*command, "--max-num-queued-reqs", str(QUEUE), "--num-pages", "80"], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    url = ""
    for line in server.stderr:
        if "Listening on" in line:
            url = line.split()[2].rstrip(",")
            break
    threading.Thread(target=lambda: collections.deque(server.stderr or (), maxlen=0), daemon=True).start()
    try:
        while httpx.get(f"{url}/health").status_code != 200:
            time.sleep(0.5)
        compiled = metric(url, "xla_compilations_total")
        soak = Soak(url, server.pid, 60 * minutes)
        asyncio.run(soak.run())
        time.sleep(2)
        early = soak.memory[len(soak.memory) // 5][1]
        late = soak.resident()
        report = {
            "minutes": minutes,
            "counts": dict(soak.counts),
            "unexpected": {k: v for k, v in soak.counts.items() if k.endswith("!")},
            "requests_running": metric(url, "num_requests_running"),
            "requests_waiting": metric(url, "num_requests_waiting"),
            "share_of_pages_held": metric(url, "kv_cache_usage_perc"),
            "preemptions": metric(url, "num_preemptions_total"),
            "compilations_after_ready": metric(url, "xla_compilations_total") - compiled,
            "memory_mb": {"after a fifth": early, "at the end": late, "growth": late / early - 1},
        }
        print(json.dumps(report, indent=2))
        if minutes >= 10:
            (Path(__file__).parent / "results" / "soak.json").write_text(json.dumps(report, indent=2) + "\n")
    finally:
        server.terminate()
        print("exit code", server.wait(60))


if __name__ == "__main__":
    main()
