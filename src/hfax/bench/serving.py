"""Load test of an OpenAI-compatible server.

Samples requests from a seed (arrival times, prompt and output lengths, shared prefixes), sends them as streaming /v1/completions
requests, and computes throughput and latency. It is independent of the server; the same command measures hfax and its peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hfax.bench.drawing import pyplot
from hfax.errors import HfaxError, InvalidInputError, UnsupportedOptionError

_PERCENTILES = (50, 90, 99)
_LOADING_S = 300.0
"""Timeout for a server that is still loading."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Integers from `low` to `high` inclusive, sampled uniformly."""

    low: int
    high: int

    @classmethod
    def read(cls, option: str, text: str) -> Range:
        """Parse "128" or "16:512".

        Raises:
            InvalidInputError: the text has neither form.
        """
        low, _, high = text.partition(":")
        try:
            found = cls(low=int(low), high=int(high or low))
        except ValueError:
            found = cls(low=0, high=-1)
        if not 0 < found.low <= found.high:
            raise InvalidInputError(
                f"{option} {text} is invalid.",
                "It must be a number or LOW:HIGH.",
                f"Pass, for example, {option} 16:512.",
            )
        return found

    def draw(self, numbers: random.Random) -> int:
        """Sample one integer."""
        return numbers.randint(self.low, self.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Load-test settings.

    Args:
        url: the server's URL, without /v1.
        model: model name on the server; None queries the server.
        api_key: API key to send.
        num_requests: total number of requests.
        rate: requests per second, as a Poisson process; None: as fast as `concurrency` allows.
        concurrency: maximum concurrent requests; None: unlimited.
        prompt_tokens: prompt length in tokens, without the shared prefix.
        output_tokens: output length in tokens; EOS is ignored.
        shared_tokens: length in tokens of the prefix shared by all prompts of a group.
        num_groups: number of prompt groups with a shared prefix.
        vocabulary: prompt token ids are sampled from 100 up to this.
        temperature: sampling temperature.
        seed: random seed for everything sampled.
        timeout_s: timeout per request, in seconds.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    num_requests: int = 100
    rate: float | None = None
    concurrency: int | None = None
    prompt_tokens: Range = dataclasses.field(default_factory=lambda: Range(low=128, high=128))
    output_tokens: Range = dataclasses.field(default_factory=lambda: Range(low=64, high=64))
    shared_tokens: int = 0
    num_groups: int = 1
    vocabulary: int = 1000
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float = 600.0


@dataclasses.dataclass(kw_only=True)
class Sample:
    """Measurements of one request; times in seconds.

    Args:
        prompt_tokens: prompt length, in tokens.
        wanted: requested output tokens.
        tokens: received output tokens, as counted by the server.
        first: time to the first chunk.
        gaps: times between chunks.
        total: time to the end of the response.
        error: why the request failed; None on success.
    """

    prompt_tokens: int
    wanted: int
    tokens: int = 0
    first: float | None = None
    gaps: list[float] = dataclasses.field(default_factory=list)
    total: float = 0.0
    error: str | None = None


def run_load(load: Load, on_progress: Callable[[int, int], None] = lambda done, failed: None) -> dict[str, Any]:
    """Run the load test.

    Args:
        load: load-test settings.
        on_progress: called with the numbers of completed and failed requests.

    Returns:
        `load`, `requests`, `failed`, `errors` (error to count), `seconds`, `requests_per_second`,
        `output_tokens_per_second`, `total_tokens_per_second`, and mean and percentiles in seconds of `time_to_first_token`,
        `inter_token_latency`, `time_per_output_token` and `end_to_end`.

    Raises:
        HfaxError: the server does not respond.
    """
    return asyncio.run(_run(load, on_progress))


async def _run(load: Load, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    try:
        import httpx
    except ImportError as error:
        raise UnsupportedOptionError(
            "The load test requires httpx.", str(error), "Run: pip install 'hfax[bench]'"
        ) from error

    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=load.url, headers=headers, timeout=load.timeout_s, limits=limits) as client:
        model = load.model or await _ask_model(client)
        await _wait_for_programs(client)
        bodies = _bodies(load, model)
        gate = asyncio.Semaphore(load.concurrency or load.num_requests)
        samples: list[Sample] = []

        async def one(body: dict[str, Any]) -> None:
            async with gate:
                sample = await _send(client, body)
            samples.append(sample)
            on_progress(len(samples), sum(s.error is not None for s in samples))

        numbers = random.Random(load.seed + 1)
        started = time.perf_counter()
        tasks = []
        for body in bodies:
            tasks.append(asyncio.create_task(one(body)))
            if load.rate is not None:
                await asyncio.sleep(numbers.expovariate(load.rate))
        await asyncio.gather(*tasks)
        return _report(load, model, samples, time.perf_counter() - started)


async def _ask_model(client: Any) -> str:
    import httpx

    deadline = time.monotonic() + _LOADING_S
    try:
        answer = await client.get("/v1/models")
        while answer.status_code == 503 and time.monotonic() < deadline:  # the model is loading
            await asyncio.sleep(1)
            answer = await client.get("/v1/models")
        answer.raise_for_status()
        return answer.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise HfaxError(
            f"Could not query the model name from {client.base_url}.",
            str(error) or type(error).__name__,
            "Check --url and --api-key, or pass --model.",
        ) from error


async def _wait_for_programs(client: Any) -> None:
    """Wait until an hfax server compiles nothing any more; other servers have no such field."""
    import httpx

    deadline = time.monotonic() + _LOADING_S
    with contextlib.suppress(httpx.HTTPError, ValueError, AttributeError):
        while (await client.get("/health")).json().get("programs_left") and time.monotonic() < deadline:
            await asyncio.sleep(1)


def _bodies(load: Load, model: str) -> list[dict[str, Any]]:
    numbers = random.Random(load.seed)

    def ids(count: int) -> list[int]:
        return [numbers.randrange(100, max(load.vocabulary, 101)) for _ in range(count)]

    shared = [ids(load.shared_tokens) for _ in range(load.num_groups)]
    bodies = []
    for index in range(load.num_requests):
        prompt = shared[index % load.num_groups] + ids(load.prompt_tokens.draw(numbers))
        bodies.append(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": load.output_tokens.draw(numbers),
                "temperature": load.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return bodies


async def _send(client: Any, body: dict[str, Any]) -> Sample:
    import httpx

    sample = Sample(prompt_tokens=len(body["prompt"]), wanted=body["max_tokens"])
    started = newest = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                sample.error = f"status {answer.status_code}"
                return sample
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    sample.error = f"in the stream: {str(event['error'].get('message'))[:80]}"
                    return sample
                if event.get("usage"):
                    sample.tokens = event["usage"]["completion_tokens"]
                if not event.get("choices"):
                    continue
                now = time.perf_counter()
                if sample.first is None:
                    sample.first = now - started
                else:
                    sample.gaps.append(now - newest)
                newest = now
        if sample.first is None:
            sample.error = "no output received"
    except (httpx.HTTPError, ValueError) as error:
        sample.error = type(error).__name__
    finally:
        sample.total = time.perf_counter() - started
    return sample


def _report(load: Load, model: str, samples: list[Sample], seconds: float) -> dict[str, Any]:
    good = [s for s in samples if s.error is None]
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    tokens = sum(s.tokens for s in good)
    prompts = sum(s.prompt_tokens for s in good)
    shown = dataclasses.asdict(load) | {"model": model, "api_key": None}
    return {
        "load": shown,
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": errors,
        "seconds": seconds,
        "prompt_tokens": prompts,
        "output_tokens": tokens,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "total_tokens_per_second": (tokens + prompts) / seconds,
        "time_to_first_token": _spread([s.first for s in good if s.first is not None]),
        "inter_token_latency": _spread([gap for s in good for gap in s.gaps]),
        "time_per_output_token": _spread([(s.total - (s.first or 0)) / (s.tokens - 1) for s in good if s.tokens > 1]),
        "end_to_end": _spread([s.total for s in good]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found = {"mean": float(np.mean(values))}
    return found | {f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES} | {"max": float(max(values))}


def table_of(report: dict[str, Any]) -> list[Table]:
    """A table of throughput, and a table of latencies."""
    total = Table(
        title=f"{report['requests']} requests in {report['seconds']:.1f} s, {report['failed']} failed",
        title_justify="left",
    )
    for column in ("requests/s", "output tokens/s", "all tokens/s", "prompt tokens", "output tokens"):
        total.add_column(column, justify="right")
    total.add_row(
        f"{report['requests_per_second']:.2f}",
        f"{report['output_tokens_per_second']:.1f}",
        f"{report['total_tokens_per_second']:.1f}",
        str(report["prompt_tokens"]),
        str(report["output_tokens"]),
    )
    seconds = Table()
    seconds.add_column("milliseconds")
    columns = ("mean", *(f"p{p}" for p in _PERCENTILES), "max")
    for column in columns:
        seconds.add_column(column, justify="right")
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "end_to_end"):
        spread = report[name]
        seconds.add_row(name.replace("_", " "), *(f"{1e3 * spread[c]:.1f}" if spread else "" for c in columns))
    return [total, seconds]


def plot(reports: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG: throughput and latencies, one bar per report.

    Raises:
        UnsupportedOptionError: matplotlib is not installed.
    """
    plt = pyplot()
    names = [f"{r['load']['url']}\n{r['load']['model']}" for r in reports]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    axes[0].bar(names, [r["output_tokens_per_second"] for r in reports])
    axes[0].set(title="output tokens/s")
    for place, name in ((1, "time_to_first_token"), (2, "inter_token_latency")):
        for offset, percentile in enumerate(_PERCENTILES):
            heights = [1e3 * r[name].get(f"p{percentile}", 0.0) for r in reports]
            axes[place].bar(np.arange(len(reports)) + 0.27 * offset, heights, width=0.25, label=f"p{percentile}")
        axes[place].set_xticks(np.arange(len(reports)) + 0.27, names)
        axes[place].set(title=f"{name.replace('_', ' ')}, ms")
        axes[place].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
