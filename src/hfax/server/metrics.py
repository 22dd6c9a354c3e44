"""The server's Prometheus metrics, with vLLM's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily

if TYPE_CHECKING:
    from hfax.engine.engine import Engine
    from hfax.server.workers import WorkerPool

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Metrics:
    """The metrics of one server, from when it is made until it is closed.

    Args:
        prefix: metric name prefix: "hfax:", or "vllm:" for dashboards built for vLLM.
        model_name: value of the `model_name` label.
    """

    def __init__(self, prefix: str, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(
            registry=self.registry
        )  # resident memory, processor time and open files of the server's process
        self._prefix, self._label = prefix, model_name
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence.", _SECONDS
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the last token.", _SECONDS
        )
        self.prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.text_size = self._histogram("request_generation_tokens", "Generated tokens per sequence.", _TOKENS)
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens computed per engine step.", _TOKENS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, computed or cached.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._success = Counter(
            f"{prefix}request_success", "Finished sequences.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._http = Counter(
            "http_requests", "HTTP responses sent.", ["method", "path", "status"], registry=self.registry
        )
        self._num_compiled = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        self.registry.register(_Collected(prefix, model_name, {"xla_compilations": lambda: self._num_compiled}))

    def close(self) -> None:
        """Stop counting the programs that this process compiles."""
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        self._num_compiled += event == _COMPILED

    def finished(self, reason: str) -> None:
        """Count a finished sequence."""
        self._success.labels(self._label, reason).inc()

    def answered(self, method: str, path: str, status: int) -> None:
        """Count an HTTP response."""
        self._http.labels(method, path, str(status)).inc()

    def follow(self, engine: Engine) -> None:
        """Export an engine's state."""
        core, pages = engine.core, engine.pages
        self._gauge("num_requests_running", "Running sequences.", lambda: len(core.scheduler.running))
        self._gauge("num_requests_waiting", "Waiting sequences.", lambda: core.num_waiting)
        self._gauge(
            "num_programs_left",
            "Sets of programs that are being compiled in the background.",
            lambda: engine.num_programs_left,
        )
        counters: dict[str, Callable[[], float]] = {"num_preemptions": lambda: core.scheduler.num_preemptions}
        if pages is not None:
            self._gauge(
                "kv_cache_usage_perc",
                "Fraction of KV-cache pages in use.",
                lambda: pages.num_held / pages.num_pages,
            )
            counters["prefix_cache_queries"] = lambda: pages.counts.queries
            counters["prefix_cache_hits"] = lambda: pages.counts.hits
        self.registry.register(_Collected(self._prefix, self._label, counters))

    def follow_workers(self, workers: WorkerPool) -> None:
        """Export the state of the processes that read requests."""
        self._gauge("request_workers_busy", "Worker processes that read a request.", lambda: workers.num_busy)
        self._gauge("num_requests_unread", "Requests that wait to be read.", lambda: workers.num_waiting)
        killed: dict[str, Callable[[], float]] = {"request_workers_killed": lambda: workers.num_killed}
        self.registry.register(_Collected(self._prefix, self._label, killed))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, what: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"{self._prefix}{name}", what, ["model_name"], registry=self.registry)
        gauge.labels(self._label).set_function(read)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        found = Histogram(f"{self._prefix}{name}", what, ["model_name"], buckets=buckets, registry=self.registry)
        return found.labels(self._label)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"{self._prefix}{name}", what, ["model_name"], registry=self.registry).labels(self._label)


class _Collected:
    """Counters kept elsewhere and read at collection time."""

    def __init__(self, prefix: str, label: str, counters: dict[str, Callable[[], float]]) -> None:
        self._prefix, self._label, self._counters = prefix, label, counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the metrics for prometheus_client."""
        for name, read in self._counters.items():
            family = CounterMetricFamily(f"{self._prefix}{name}", name.replace("_", " "), labels=["model_name"])
            family.add_metric([self._label], read())
            yield family
