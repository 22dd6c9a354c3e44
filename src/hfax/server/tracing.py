"""OpenTelemetry tracing; a no-op without an endpoint."""

from __future__ import annotations

from typing import Any

from hfax.errors import UnsupportedOptionError


class Tracing:
    """Exports spans over OTLP.

    Args:
        endpoint: an OTLP/HTTP collector, "http://host:4318/v1/traces"; None: tracing is off.

    Raises:
        UnsupportedOptionError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._tracer: Any = None
        self._provider: Any = None
        if endpoint is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise UnsupportedOptionError(
                "Tracing requires OpenTelemetry, which is not installed.", str(error), "Run: pip install 'hfax[otel]'"
            ) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "hfax"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("hfax")

    def start(self, name: str, params: Any, request_id: str) -> Span:
        """Start the span of one request."""
        if self._tracer is None:
            return Span(None)
        span = self._tracer.start_span(name)
        span.set_attribute("gen_ai.request.id", request_id)
        span.set_attribute("gen_ai.request.temperature", params.temperature)
        span.set_attribute("gen_ai.request.top_p", params.top_p)
        span.set_attribute("gen_ai.request.n", params.n)
        return Span(span)

    def close(self) -> None:
        """Flush remaining spans, and shut down."""
        if self._provider is not None:
            self._provider.shutdown()


class Span:
    """One request's span; a no-op without a span.

    Args:
        span: an OpenTelemetry span, or None.
    """

    def __init__(self, span: Any) -> None:
        self._span = span

    def event(self, name: str) -> None:
        """Record an event."""
        if self._span is not None:
            self._span.add_event(name)

    def finish(self, num_prompt_tokens: int, num_completion_tokens: int) -> None:
        """End the span after a response."""
        if self._span is not None:
            self._span.set_attribute("gen_ai.usage.prompt_tokens", num_prompt_tokens)
            self._span.set_attribute("gen_ai.usage.completion_tokens", num_completion_tokens)
            self._span.end()

    def fail(self, error: BaseException) -> None:
        """End the span with an error."""
        if self._span is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.end()
