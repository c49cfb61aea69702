"""The server's metrics in Prometheus' format; docs/metrics.md has a line for each.

The server's own counters, gauges and histograms are prometheus_client's. Recording a delivery of
four tokens takes 3.6 us, of 54 us in the server altogether (one core, CPython 3.11).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as TEXT
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS

from strobe.server.engine_process.snapshot import EngineSnapshot
from strobe.server.telemetry.engine_totals import IDLE, OWN_LABELS, EngineTotals, TotalsCollector

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)
Phase = Literal["thinking", "answer", "tool"]

PHASES: tuple[Phase, ...] = ("thinking", "answer", "tool")
CONTEXTS = ("0-1k", "1k-4k", "4k-16k", "16k-64k", "64k-256k", "256k+")
CONTEXT_BOUNDS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)
"""The first context length, in tokens, of each bucket but the first."""

REASONS = ("stop", "length", "repetition", "abort", "error")
"""Finish reasons exported from the start, so that a first one shows as a rise from 0."""

# All of vLLM's bounds, so that buckets compare with vLLM's, and finer ones below them.
FIRST_TOKEN_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
COUNT_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
LENGTH_BOUNDS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)


class ServerMetrics:
    """All metrics: the server's own and the engine's totals.

    Metrics have the labels OWN_LABELS. Names are vLLM's where vLLM has the metric. engines: the
    series of each engine; the first ones also count what belongs to none.
    """

    def __init__(self, model_name: str, first: ServerMetrics | None = None):
        """first: the first engine's metrics, whose families these join."""
        disable_created_metrics()  # the library's *_created series, which vLLM lacks
        self._registry = CollectorRegistry() if first is None else first._registry
        self._families: dict[str, Any] = {} if first is None else first._families
        self._collector = TotalsCollector() if first is None else first._collector
        self.engines: list[ServerMetrics] = [] if first is None else first.engines
        self.own = (model_name, str(len(self.engines)))
        self.engines.append(self)
        self._pages: tuple[str, ...] = ()
        self.open_answers: Callable[[], int] = int
        self.paths: frozenset[str] = frozenset()

        self._add_gauges()
        self._add_totals()
        if first is None:
            self._add_process_metrics()
        self._add_draft_counters()
        self._add_token_histograms()
        self._add_request_histograms()
        self._add_length_histograms()
        self._add_outcome_counters()

    def _add_gauges(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Running requests.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Waiting requests.")
        self._kv_used = self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the K/V pages in use, 0 to 1."
        )
        self._cache_config = self._family(
            Gauge,
            "vllm:cache_config_info",
            "The engine's K/V pages, in labels: tokens of each, and their number.",
            ("block_size", "num_gpu_blocks"),
        )
        self._gauge("strobe:open_answers", "Answers that clients wait for.").set_function(
            lambda: self.open_answers()
        )

    def _add_totals(self) -> None:
        """Add the engine's own totals, and its restarts."""
        self._restarts = self._counter(
            "strobe:engine_restarts", "Restarts of the engine process after it ended."
        ).labels(*self.own)
        self._totals = EngineTotals(self.own)
        self._collector.engines.append(self._totals)

    def _add_process_metrics(self) -> None:
        """Add what the server's process has once, whatever the number of engines."""
        self._gauge("strobe:server_tasks", "Tasks on the server's event loop.").set_function(_tasks)
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        self._http = Counter(
            "http_requests",
            "HTTP requests answered.",
            ["handler", "method", "status"],
            registry=self._registry,
        )

    def _add_draft_counters(self) -> None:
        verified = [
            self._counter(name, help, ("context", "phase"))
            for name, help in (
                (
                    "strobe:spec_decode_steps",
                    "Verify steps that carried drafts, by context length and phase.",
                ),
                ("strobe:spec_decode_draft_tokens", "Tokens drafted, by context length and phase."),
                (
                    "strobe:spec_decode_accepted_tokens",
                    "Drafts accepted, by context length and phase.",
                ),
            )
        ]
        self._verified = {
            phase: [
                tuple(counter.labels(*self.own, context, phase) for counter in verified)
                for context in CONTEXTS
            ]
            for phase in PHASES
        }
        """Per phase and context bucket: verify steps, tokens drafted, tokens accepted."""

    def _add_token_histograms(self) -> None:
        """Add the times of tokens."""
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            FIRST_TOKEN_BOUNDS,
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between one delivery of tokens and the next, of one or several tokens.",
            TOKEN_BOUNDS,
        )
        self._per_delivery = self._histogram(
            "vllm:time_per_output_token_seconds",
            "The same as vllm:inter_token_latency_seconds, by its older name.",
            TOKEN_BOUNDS,
        )
        self._per_token = self._histogram(
            "strobe:time_per_output_token_seconds",
            "Time between deliveries divided by the tokens delivered, once for each token.",
            TOKEN_BOUNDS,
        )
        self._request_per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "A finished answer's time after its first token, divided by its other tokens.",
            TOKEN_BOUNDS,
        )

    def _add_request_histograms(self) -> None:
        """Add the times of requests and of their phases."""
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "From a request's arrival to its end.",
            REQUEST_BOUNDS,
        )
        self._queued = self._histogram(
            "vllm:request_queue_time_seconds",
            "From a request's arrival to its first step.",
            REQUEST_BOUNDS,
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds",
            "From a request's first step to its first token.",
            REQUEST_BOUNDS,
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds",
            "From a request's first token to its end.",
            REQUEST_BOUNDS,
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds",
            "From a request's first step to its end.",
            REQUEST_BOUNDS,
        )

    def _add_length_histograms(self) -> None:
        """Add the sizes of requests: answers and tokens."""
        self._num_answers = self._histogram(
            "vllm:request_params_n", "Answers that a request asked for.", COUNT_BOUNDS
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "A request's max_tokens, if set.", LENGTH_BOUNDS
        )
        self._max_generation_tokens = self._histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens of a request's longest answer.",
            LENGTH_BOUNDS,
        )
        self._prompt = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished request.", LENGTH_BOUNDS
        )
        self._generation = self._histogram(
            "vllm:request_generation_tokens",
            "Tokens generated for a finished request.",
            LENGTH_BOUNDS,
        )

    def _add_outcome_counters(self) -> None:
        self._finished = self._counter(
            "vllm:request_success", "Finished answers.", ("finished_reason",)
        )
        for reason in REASONS:
            self._finished.labels(*self.own, reason)
        self._refused = self._counter(
            "strobe:http_requests_refused", "Requests answered with an error.", ("status", "reason")
        )

    def _family(
        self,
        kind: Callable[..., _Metric],
        name: str,
        help: str,
        labels: Sequence[str] = (),
        **options: object,
    ) -> _Metric:
        """Return the metric of that name, which all engines share."""
        if name not in self._families:
            self._families[name] = kind(
                name, help, [*OWN_LABELS, *labels], registry=self._registry, **options
            )
        return self._families[name]

    def _gauge(self, name: str, help: str) -> Gauge:
        return self._family(Gauge, name, help).labels(*self.own)

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return self._family(Counter, name, help, labels)

    def _histogram(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        return self._family(Histogram, name, help, buckets=bounds).labels(*self.own)

    def add_engines(self, count: int) -> None:
        """Add series of further engines."""
        for _ in range(count):
            ServerMetrics(self.own[0], self)

    def engine(self, snapshot: EngineSnapshot) -> None:
        """Record the engine's latest snapshot."""
        self._totals.snapshot = snapshot
        self._running.set(snapshot.running)
        self._waiting.set(snapshot.waiting)
        self._kv_used.set(snapshot.kv_used)

    def engine_started(self, page_size: int, pages: int) -> None:
        """Record the engine's pages, for routers."""
        self._pages = (str(page_size), str(pages))
        self._cache_config.labels(*self.own, *self._pages).set(1)

    def engine_ended(self) -> None:
        """Record the end of the engine process: its totals stay, its gauges and pages go."""
        self._totals.restart()
        self.engine(IDLE)
        if self._pages:
            self._cache_config.remove(*self.own, *self._pages)
        self._pages = ()

    def engine_restarted(self) -> None:
        """Record a restart of the engine process."""
        self._restarts.inc()

    def record_verified(
        self, *, num_verified: int, num_accepted: int, context_tokens: int, phase: str
    ) -> None:
        """Record one verify step of one request.

        num_verified: drafts verified; with 0 nothing is counted, as in vLLM's counters.
        context_tokens: the request's length before the step, in tokens. phase: "thinking", "answer"
        or "tool"."""
        if not num_verified:
            return
        steps, draft_tokens, accepted_tokens = self._verified[phase][
            bisect_right(CONTEXT_BOUNDS, context_tokens)
        ]
        steps.inc()
        draft_tokens.inc(num_verified)
        accepted_tokens.inc(num_accepted)

    def record_first_token(self, seconds: float) -> None:
        """Record a request's first token, sent `seconds` after its arrival."""
        self._first_token.observe(seconds)

    def record_inter_token(self, seconds: float, tokens: int) -> None:
        """Record a delivery of `tokens` tokens, `seconds` after the last one.

        vLLM's histogram has one observation of `seconds` per delivery, which speculation makes
        longer; the metrics with its names do the same. Strobe's own has `tokens` observations of
        seconds / tokens. Without tokens nothing is recorded.
        """
        if tokens > 0:
            self._inter_token.observe(seconds)
            self._per_delivery.observe(seconds)
            for _ in range(tokens):
                self._per_token.observe(seconds / tokens)

    def record_request(self, answers: int, max_tokens: int | None) -> None:
        """Record a request's arrival, its number of answers and max_tokens."""
        self._num_answers.observe(answers)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def record_longest(self, tokens: int) -> None:
        """Record the length in tokens of a finished request's longest answer."""
        self._max_generation_tokens.observe(tokens)

    def record_finished(
        self,
        *,
        reason: str,
        seconds: float,
        queue_seconds: float | None,
        first_seconds: float | None,
        prompt_tokens: int,
        generation_tokens: int,
    ) -> None:
        """Record an answer's end, `seconds` after the request's arrival. queue_seconds: until its
        first step, None if it never ran; first_seconds: until its first token, None if it has
        none."""
        self._finished.labels(*self.own, reason).inc()
        self._latency.observe(seconds)
        if queue_seconds is not None:
            self._queued.observe(queue_seconds)
            self._inference.observe(max(seconds - queue_seconds, 0.0))
        if queue_seconds is not None and first_seconds is not None:
            self._prefill.observe(max(first_seconds - queue_seconds, 0.0))
            self._decode.observe(seconds - first_seconds)
            if generation_tokens > 1:
                self._request_per_token.observe((seconds - first_seconds) / (generation_tokens - 1))
        self._prompt.observe(prompt_tokens)
        self._generation.observe(generation_tokens)

    def record_http(self, path: str, method: str, status: int) -> None:
        """Record an HTTP response. Each of `paths` has series of its own."""
        handler = path if path in self.paths else "none"
        method = method if method in ("GET", "POST") else "other"
        self._http.labels(handler, method, f"{status // 100}xx").inc()

    def record_rejected(self, status: int, reason: str) -> None:
        """Record an error response. reason: a fixed word, never a client's text, since each one
        makes a series of its own."""
        self._refused.labels(*self.own, str(status), reason).inc()

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """Return the body and its content type: OpenMetrics or Prometheus' text format, by the
        Accept header."""
        try:
            _, content_type = choose_encoder(accept or "")
        except TypeError:  # the header has a version that is not a number
            content_type = TEXT
        # Other escapings turn the colon of OpenMetrics sample names into "_", so that they differ
        # from vLLM's names and from their own # TYPE lines.
        if content_type.startswith("application/openmetrics-text"):
            return openmetrics.generate_latest(self._registry, ALLOWUTF8), OPENMETRICS
        return generate_latest(self._registry, ALLOWUTF8), TEXT


def _tasks() -> int:
    """The number of tasks on the running event loop, 0 without one."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
