"""Load on a server that speaks the OpenAI API, and how it bears it.

Draws requests from a seed (when they come, how long prompts and texts are, what prompts share), sends them as streams of
/v1/completions, and turns what comes back into figures. It knows nothing of who serves; the same command measures hfax and its
peers.
"""

from __future__ import annotations

import asyncio
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
"""A server that loads is waited for so long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Whole numbers from `low` to `high`, drawn with the same probability each."""

    low: int
    high: int

    @classmethod
    def read(cls, option: str, text: str) -> Range:
        """From "128", or "16:512".

        Raises:
            InvalidInputError: it is neither.
        """
        low, _, high = text.partition(":")
        try:
            found = cls(low=int(low), high=int(high or low))
        except ValueError:
            found = cls(low=0, high=-1)
        if not 0 < found.low <= found.high:
            raise InvalidInputError(
                f"{option} {text}.", "It is a number, or two as LOW:HIGH.", f"For instance {option} 16:512."
            )
        return found

    def draw(self, numbers: random.Random) -> int:
        """One of them."""
        return numbers.randint(self.low, self.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of a server.

    Args:
        url: of the server, without /v1.
        model: its name there; None asks the server.
        api_key: to send.
        num_requests: in all.
        rate: requests a second, at the times of a Poisson process; None: as soon as `concurrency` allows.
        concurrency: requests at once; None: any number.
        prompt_tokens: of prompts, without the shared ones.
        output_tokens: of texts; they do not end before.
        shared_tokens: that all prompts of a group begin with.
        num_groups: of prompts with the same beginning.
        vocabulary: ids that prompts are drawn from, 100 up to this.
        temperature: of the texts.
        seed: of everything that is drawn.
        timeout_s: of one request.
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
    """What one request saw; seconds since it was sent.

    Args:
        prompt_tokens: of the prompt.
        wanted: tokens that were asked for.
        tokens: that came, as the server counts them.
        first: until the first text.
        gaps: between the texts that came.
        total: until the end.
        error: why it failed; None if it did not.
    """

    prompt_tokens: int
    wanted: int
    tokens: int = 0
    first: float | None = None
    gaps: list[float] = dataclasses.field(default_factory=list)
    total: float = 0.0
    error: str | None = None


def run_load(load: Load, on_progress: Callable[[int, int], None] = lambda done, failed: None) -> dict[str, Any]:
    """Put the load on the server.

    Args:
        load: what is asked.
        on_progress: told how many requests are done, and how many failed.

    Returns:
        `load`, `requests`, `failed`, `errors` (what happened, and how often), `seconds`, `requests_per_second`,
        `output_tokens_per_second`, `total_tokens_per_second`, and of `time_to_first_token`, `inter_token_latency`,
        `time_per_output_token` and `end_to_end` the mean and percentiles in seconds.

    Raises:
        HfaxError: nobody answers at the address.
    """
    return asyncio.run(_run(load, on_progress))


async def _run(load: Load, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    try:
        import httpx
    except ImportError as error:
        raise UnsupportedOptionError(
            "The load generator needs httpx.", str(error), "pip install 'hfax[bench]'"
        ) from error

    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=load.url, headers=headers, timeout=load.timeout_s, limits=limits) as client:
        model = load.model or await _ask_model(client)
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
        while answer.status_code == 503 and time.monotonic() < deadline:  # it loads
            await asyncio.sleep(1)
            answer = await client.get("/v1/models")
        answer.raise_for_status()
        return answer.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise HfaxError(
            f"{client.base_url} did not say which model it serves.",
            str(error) or type(error).__name__,
            "Check the address and the key, or pass --model.",
        ) from error


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
            sample.error = "no text came"
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
    """What was measured: throughput, and the seconds that requests saw."""
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
    """A PNG: throughput and latencies, a bar a report.

    Raises:
        UnsupportedOptionError: matplotlib is not installed.
    """
    plt = pyplot()
    names = [f"{r['load']['url']}\n{r['load']['model']}" for r in reports]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    axes[0].bar(names, [r["output_tokens_per_second"] for r in reports])
    axes[0].set(title="output tokens a second")
    for place, name in ((1, "time_to_first_token"), (2, "inter_token_latency")):
        for offset, percentile in enumerate(_PERCENTILES):
            heights = [1e3 * r[name].get(f"p{percentile}", 0.0) for r in reports]
            axes[place].bar(np.arange(len(reports)) + 0.27 * offset, heights, width=0.25, label=f"p{percentile}")
        axes[place].set_xticks(np.arange(len(reports)) + 0.27, names)
        axes[place].set(title=f"{name.replace('_', ' ')}, ms")
        axes[place].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
