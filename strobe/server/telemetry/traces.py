"""OpenTelemetry: a span of each request, sent to a collector by OTLP over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

_ATTRIBUTES = {
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "client": "client.address",
    "error": "error.type",
    "request_id": "http.request.header.x-request-id",
    "model": "gen_ai.response.model",
    "answer_id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reason": "gen_ai.response.finish_reasons",
    "speculation": "strobe.speculation.method",
    "acceptance_length": "strobe.speculation.acceptance_length",
}
"""Attributes by fields of the access log, with the names of OpenTelemetry's conventions."""
_SECONDS = {
    "queue_ms": "gen_ai.latency.time_in_queue",
    "first_token_ms": "gen_ai.latency.time_to_first_token",
    "duration_ms": "gen_ai.latency.e2e",
}
"""Those in seconds, by fields in milliseconds, with vLLM's names."""


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint. Raises ValueError if it is no URL or OpenTelemetry is not installed."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"otlp_traces_endpoint is {endpoint!r}, but must be a URL, such as "
            "http://localhost:4318/v1/traces."
        )
    try:
        import opentelemetry.exporter.otlp.proto.http as _  # noqa: F401
    except ImportError:
        raise ValueError(
            f"otlp_traces_endpoint is {endpoint!r}, but OpenTelemetry is not installed; install "
            "strobe[otel], or leave the option out."
        ) from None
    return endpoint


class Traces:
    """Exports spans in the background, the last ones when the process ends; what a collector does
    not take is dropped."""

    def __init__(self, endpoint: str):
        """endpoint: of the collector's traces, such as http://localhost:4318/v1/traces."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "strobe")})
        provider: Any = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer: Any = provider.get_tracer("strobe")

    def record(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        fields: Mapping[str, Any],
        arrived: float,
        seconds: float,
    ) -> None:
        """Export a request's span, a child of the one in its `traceparent` header. fields: of the
        access log; arrived: seconds since 1970."""
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, Status, StatusCode

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        attributes = {
            **{name: fields.get(field) for field, name in _ATTRIBUTES.items()},
            **{n: fields[f] / 1e3 for f, n in _SECONDS.items() if fields.get(f) is not None},
        }
        begin = int(arrived * 1e9)
        span: Any = self._tracer.start_span(
            f"{fields['method']} {fields['path']}",
            propagate.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=begin,
        )
        if fields["status"] >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(begin + int(seconds * 1e9))
