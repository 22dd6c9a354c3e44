"""What a server is told when it starts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A server's settings.

    Args:
        model: what to serve: Hub id, folder or "demo".
        served_model_names: under which it is asked for; the first one is shown.
        api_keys: one of which a request must bring; none: everybody may ask.
        host: address to listen on.
        port: likewise.
        allowed_hosts: names that a request's Host may have beside loopback's; "*" for any.
        allowed_origins: of pages of other sites that may ask; "*" for any.
        max_body_bytes: of a request.
        body_timeout_s: in which a request's body must be there.
        step_timeout_s: a step of the engine that takes longer, and three times longer than any before it, means that it hangs.
        keep_alive_s: a stream that has nothing to say says so this often.
        drain_timeout_s: for running requests, after the server was told to stop.
        template_timeout_s: for a chat template, and for a grammar.
        image_hosts: names of hosts that images may be fetched from; none: images only as data.
        metrics_prefix: before the names of metrics.
        json_logs: the access log is JSON lines.
        otlp_endpoint: where traces go; None: nowhere.
    """

    model: str
    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 20.0
    step_timeout_s: float = 8.0
    keep_alive_s: float = 5.0
    drain_timeout_s: float = 60.0
    template_timeout_s: float = 5.0
    image_hosts: tuple[str, ...] = ()
    metrics_prefix: str = "hfax:"
    json_logs: bool = False
    otlp_endpoint: str | None = None
