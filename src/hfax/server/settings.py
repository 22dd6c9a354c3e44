"""Server settings, fixed at startup."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A server's settings.

    Args:
        model: the model to serve: Hub id, folder or "demo".
        served_model_names: model names accepted in requests; the first is the one reported.
        api_keys: accepted API keys; empty: no authentication.
        host: address to listen on.
        port: port to listen on.
        health_port: another port that answers /health, /ready and /metrics, without a key; None: none.
        allowed_hosts: Host header values accepted besides loopback names; "*" for any.
        allowed_origins: origins allowed for cross-origin requests; "*" for any.
        max_body_bytes: maximum size of a request body.
        body_timeout_s: timeout for receiving a request body.
        head_timeout_s: seconds to receive a request's first line and headers; also for a connection that sends nothing.
        write_timeout_s: a client that reads nothing of its answer for this long is disconnected.
        step_timeout_s: an engine step that takes longer than this, and three times longer than any before it, counts as hung.
        keep_alive_s: interval of keep-alive comments in an idle stream.
        drain_timeout_s: time for running requests to finish at shutdown.
        request_workers: worker processes that read requests, at least 2.
        request_cpu_s: processor time for reading a request (validation, chat template, tokens and grammar), in seconds; four
            times as much with images.
        request_memory_bytes: memory for reading a request.
        max_waiting_reads: maximum number of requests that wait to be read; of one client, half of them.
        max_buffered_bytes: maximum size of all request bodies held at a time.
        max_embeddings_waiting: maximum number of embedding requests that wait.
        max_host_memory_bytes: requests are refused while the server's resident memory exceeds this; None: no limit.
        image_hosts: host names that images may be fetched from; empty: data: URLs only.
        trusted_proxies: addresses or networks of reverse proxies whose X-Forwarded-For and X-Forwarded-Proto headers count.
        metrics_prefix: prefix of metric names.
        json_logs: write the access log as JSON lines.
        otlp_endpoint: OTLP endpoint for traces; None: no tracing.
    """

    model: str
    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    health_port: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 20.0
    head_timeout_s: float = 20.0
    write_timeout_s: float = 30.0
    step_timeout_s: float = 8.0
    keep_alive_s: float = 5.0
    drain_timeout_s: float = 60.0
    request_workers: int = 2
    request_cpu_s: float = 1.0
    request_memory_bytes: int = 1 << 30
    max_waiting_reads: int = 128
    max_buffered_bytes: int = 256 << 20
    max_embeddings_waiting: int = 64
    max_host_memory_bytes: int | None = None
    image_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    metrics_prefix: str = "hfax:"
    json_logs: bool = False
    otlp_endpoint: str | None = None
