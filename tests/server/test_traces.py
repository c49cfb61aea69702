"""Spans of requests, as a collector receives them."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from strobe.server.server_settings import ServerConfig
from tests.server.support.asgi_client import call
from tests.server.support.polling import PATIENCE
from tests.server.support.scripted_server import Script, app

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 8}


@contextmanager
def collector() -> Iterator[tuple[str, queue.Queue[Any]]]:
    """A collector's URL, and the spans that it receives."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: queue.Queue[Any] = queue.Queue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        spans.put((resource.resource, span))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dict."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def test_span_of_a_chat_has_its_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with collector() as (endpoint, spans):
        served = app(Script("one two", ends="length"), otlp_traces_endpoint=endpoint)
        headers = [("Content-Type", "application/json"), ("Host", "localhost"),
                   ("traceparent", f"00-{TRACE}-{PARENT}-01"), ("X-Request-Id", "one")]  # fmt: skip
        call(served, "/metrics", method="GET")  # polled, so it has no span
        answer = call(
            served, "/v1/chat/completions", headers=headers, body=[json.dumps(CHAT).encode()]
        )
        resource, span = spans.get(timeout=PATIENCE)
    assert answer.status == 200
    assert values(resource.attributes)["service.name"] == "strobe"
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        "POST /v1/chat/completions", TRACE, PARENT)  # fmt: skip
    assert span.start_time_unix_nano < span.end_time_unix_nano
    found, usage = values(span.attributes), json.loads(answer.body)["usage"]
    assert found["http.response.status_code"] == 200
    assert found["http.request.header.x-request-id"] == "one"
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] > 0
    assert found["gen_ai.response.finish_reasons"] == "length"
    assert found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert "secret" not in str(span)


@pytest.mark.parametrize(("error", "failed"), [(None, False), (RuntimeError("x"), True)])
def test_only_server_errors_fail_a_span(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, failed: bool
):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with collector() as (endpoint, spans):
        script = Script("one", ends=error or "length")
        body = json.dumps(CHAT if error else {**CHAT, "temperature": -1}).encode()
        call(app(script, otlp_traces_endpoint=endpoint), "/v1/chat/completions", body=[body])
        _, span = spans.get(timeout=PATIENCE)
    assert (span.status.code == 2) is failed  # ERROR


def test_endpoint_that_is_no_url_is_refused():
    with pytest.raises(ValueError, match="otlp_traces_endpoint is 'localhost:4318'"):
        ServerConfig(otlp_traces_endpoint="localhost:4318")


def test_missing_opentelemetry_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ValueError, match=r"install strobe\[otel\]"):
        ServerConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces")
