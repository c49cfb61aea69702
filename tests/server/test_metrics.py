"""/metrics: names, labels, totals and buckets, and that docs and dashboard match."""

from __future__ import annotations

import asyncio
import json
import re
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from strobe.counters import DraftCounts, EngineStats
from strobe.outputs import METRICS
from strobe.server.engine_process.snapshot import EngineSnapshot
from strobe.server.telemetry.server_metrics import CONTEXTS, PHASES, TOKEN_BOUNDS, ServerMetrics

ROOT = Path(__file__).parents[2]
MODEL = 'a "quoted" model\\'
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

EXPOSED = {
    ("vllm:num_requests_running", "gauge"),
    ("vllm:num_requests_waiting", "gauge"),
    ("vllm:kv_cache_usage_perc", "gauge"),
    ("strobe:open_answers", "gauge"),
    ("strobe:server_tasks", "gauge"),
    ("vllm:num_preemptions_total", "counter"),
    ("vllm:prompt_tokens_total", "counter"),
    ("vllm:generation_tokens_total", "counter"),
    ("vllm:prefix_cache_queries_total", "counter"),
    ("vllm:prefix_cache_hits_total", "counter"),
    ("vllm:external_prefix_cache_queries_total", "counter"),
    ("vllm:external_prefix_cache_hits_total", "counter"),
    ("strobe:kv_offload_saves_total", "counter"),
    ("strobe:kv_offload_loads_total", "counter"),
    ("strobe:states_kept_total", "counter"),
    ("strobe:state_hits_total", "counter"),
    ("vllm:spec_decode_num_drafts_total", "counter"),
    ("vllm:spec_decode_num_draft_tokens_total", "counter"),
    ("vllm:spec_decode_num_accepted_tokens_total", "counter"),
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter"),
    ("vllm:time_to_first_token_seconds", "histogram"),
    ("vllm:inter_token_latency_seconds", "histogram"),
    ("vllm:e2e_request_latency_seconds", "histogram"),
    ("vllm:request_queue_time_seconds", "histogram"),
    ("vllm:request_prompt_tokens", "histogram"),
    ("vllm:request_generation_tokens", "histogram"),
    ("vllm:request_success_total", "counter"),
    ("strobe:engine_restarts_total", "counter"),
    ("strobe:engine_steps_total", "counter"),
    ("strobe:shadow_answers_total", "counter"),
    ("strobe:shadow_blocks_total", "counter"),
    ("strobe:shadow_seconds_total", "counter"),
    ("strobe:step_seconds_total", "counter"),
    ("strobe:spec_decode_steps_total", "counter"),
    ("strobe:spec_decode_drafts_made_total", "counter"),
    ("strobe:spec_decode_rested_steps_total", "counter"),
    ("strobe:spec_decode_confidence_slope", "gauge"),
    ("strobe:spec_decode_confidence_intercept", "gauge"),
    ("strobe:spec_decode_draft_tokens_total", "counter"),
    ("strobe:spec_decode_accepted_tokens_total", "counter"),
    ("strobe:time_per_output_token_seconds", "histogram"),
    ("strobe:http_requests_refused_total", "counter"),
}
FOR_OTHERS = {
    ("vllm:cache_config_info", "gauge"),
    ("vllm:time_per_output_token_seconds", "histogram"),
    ("vllm:request_time_per_output_token_seconds", "histogram"),
    ("vllm:request_prefill_time_seconds", "histogram"),
    ("vllm:request_decode_time_seconds", "histogram"),
    ("vllm:request_inference_time_seconds", "histogram"),
    ("vllm:request_params_n", "histogram"),
    ("vllm:request_params_max_tokens", "histogram"),
    ("vllm:request_max_num_generation_tokens", "histogram"),
    ("http_requests_total", "counter"),
    ("process_virtual_memory_bytes", "gauge"),
    ("process_resident_memory_bytes", "gauge"),
    ("process_start_time_seconds", "gauge"),
    ("process_cpu_seconds_total", "counter"),
    ("process_open_fds", "gauge"),
    ("process_max_fds", "gauge"),
}
"""Metrics for vLLM's dashboards that Strobe's own dashboard does not show."""
ON_RAY_SERVE = {("strobe:replica_up", "gauge")}
"""Metrics that the proxy adds to those of its replicas."""
OWN = {"model_name", "engine"}
PLAIN = "http_", "process_"
"""Name prefixes of metrics without these labels."""


def snapshot(
    running: int = 0,
    waiting: int = 0,
    kv_used: float = 0.0,
    confidence: tuple[tuple[int, int, float, float], ...] = (),
    draft_counts: DraftCounts | None = None,
    **totals: int,
) -> EngineSnapshot:
    stats = EngineStats(draft_counts=draft_counts or DraftCounts(), **totals)
    return EngineSnapshot(running, waiting, kv_used, stats, confidence)


def accepted(*per_position: int) -> DraftCounts:
    return DraftCounts(accepted_per_position=list(per_position))


def families(metrics: ServerMetrics) -> list[Any]:
    return list(parse_text(metrics.render(None)[0].decode()))


def samples(metrics: ServerMetrics) -> Samples:
    values: Samples = {}
    for family in families(metrics):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in values, f"{key} is exposed twice"
            values[key] = sample.value
    return values


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    return samples(metrics)[
        name, frozenset((labels | {"model_name": MODEL, "engine": "0"}).items())
    ]


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics(MODEL)


@pytest.fixture
def busy(metrics: ServerMetrics) -> ServerMetrics:
    """Metrics with at least one observation each."""
    metrics.engine(snapshot(draft_counts=accepted(3, 2, 1), confidence=((3, 0, 0.5, 1.0),)))
    metrics.engine_started(16, 4096)
    metrics.record_verified(num_verified=3, num_accepted=1, context_tokens=5, phase="answer")
    metrics.record_rejected(429, "queue_full")
    metrics.record_http("/v1/completions", "POST", 200)
    return metrics


def labels_of(metrics: ServerMetrics) -> dict[str, set[str]]:
    """The label names of each metric with samples."""
    names: dict[str, set[str]] = {}
    for name, labels in samples(metrics):
        own = {label for label, _ in labels}
        assert names.setdefault(name, own) == own, f"{name} has samples of different labels"
    return names


# The exposition


def test_vllm_metrics_keep_vllm_names_and_types(busy: ServerMetrics):
    suffix = {"counter": "_total"}
    named = {(f.name + suffix.get(f.type, ""), f.type) for f in families(busy)}
    assert named == EXPOSED | FOR_OTHERS
    assert all(family.documentation.endswith(".") for family in families(busy))


def test_every_sample_names_model_and_engine(busy: ServerMetrics):
    ours = [dict(labels) for name, labels in samples(busy) if not name.startswith(PLAIN)]
    assert {(labels["model_name"], labels["engine"]) for labels in ours} == {(MODEL, "0")}


def test_both_formats_are_equal_and_keep_the_colon(busy: ServerMetrics):
    body, content_type = busy.render("application/openmetrics-text; version=1.0.0")
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert body.endswith(b"# EOF\n")
    types = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_openmetrics(body.decode())
        for sample in family.samples
    }
    moving = "process_"
    fixed = [
        {k: v for k, v in s.items() if not k[0].startswith(moving)} for s in (types, samples(busy))
    ]
    assert fixed[0] == fixed[1]
    assert types.keys() == samples(busy).keys()
    assert all(name.startswith(("vllm:", "strobe:", *PLAIN)) for name, _ in types)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, "text/plain"),
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "text/plain"),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3", "application/"),
        ("application/openmetrics-text", "application/"),
        ("application/openmetrics-text;version=1.0.0;escaping=dots", "application/"),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4", "text/plain"),
        ("application/openmetrics-text;version=abc", "text/plain"),
        ("text/plain;version=1.x;escaping=values", "text/plain"),
        ("text/plain;version=1.0.0;escaping=values", "text/plain"),
        (";;=,,", "text/plain"),
    ],
)
def test_any_accept_header_gets_metrics_with_unescaped_names(
    busy: ServerMetrics, accept: str | None, kind: str
):
    body, content_type = busy.render(accept)
    assert content_type.startswith(kind)
    assert b"\nvllm:num_requests_running{" in body
    assert (b"# EOF" in body) == (kind == "application/")


def test_two_servers_count_separately(metrics: ServerMetrics):
    ServerMetrics(MODEL).record_rejected(400, "x")
    assert "strobe:http_requests_refused_total" not in {name for name, _ in samples(metrics)}


# The engine's own totals


def test_each_engine_counter_has_its_metric(metrics: ServerMetrics):
    fit = (3, 0, 0.5, -1.0), (3, 1, 0.25, 2.0), (7, 0, 1.0, 0.0)
    counts = DraftCounts(11, 12, 13, [9, 4], 14, rows=15, skipped_steps=16)
    stats = EngineStats(21, 22, 23, 24, 25, 26, counts, 27, 28, 29.5, 30.5, 33, 34)
    metrics.engine(EngineSnapshot(31, 32, 0.25, stats, fit))
    expected = {
        "vllm:num_requests_running": 31,
        "vllm:num_requests_waiting": 32,
        "strobe:engine_steps_total": stats.steps,
        "strobe:shadow_answers_total": stats.shadow_requests,
        "strobe:shadow_blocks_total": stats.shadow_blocks,
        "strobe:shadow_seconds_total": stats.shadow_seconds,
        "strobe:step_seconds_total": stats.step_seconds,
        "vllm:prompt_tokens_total": stats.prompt_tokens,
        "vllm:generation_tokens_total": stats.generation_tokens,
        "vllm:num_preemptions_total": stats.preemptions,
        "vllm:spec_decode_num_drafts_total": counts.steps,
        "vllm:spec_decode_num_draft_tokens_total": counts.num_verified,
        "vllm:spec_decode_num_accepted_tokens_total": counts.num_accepted,
        "vllm:prefix_cache_queries_total": stats.prefix_queries,
        "vllm:prefix_cache_hits_total": stats.prefix_hits,
        "vllm:external_prefix_cache_queries_total": stats.host_queries,
        "vllm:external_prefix_cache_hits_total": stats.host_hits,
        "strobe:kv_offload_saves_total": stats.host_saves,
        "strobe:kv_offload_loads_total": stats.host_loads,
        "strobe:states_kept_total": stats.states_kept,
        "strobe:state_hits_total": stats.state_hits,
        "strobe:spec_decode_drafts_made_total": counts.num_proposed,
        "strobe:spec_decode_rested_steps_total": counts.skipped_steps,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    for drafts, place, slope, intercept in fit:
        where = {"block_drafts": str(drafts), "position": str(place)}
        assert value(metrics, "strobe:spec_decode_confidence_slope", **where) == slope
        assert value(metrics, "strobe:spec_decode_confidence_intercept", **where) == intercept
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, per_position, position=str(i)) for i in range(2)] == [9, 4]
    attributes = {attribute for attribute, _, _ in METRICS}
    counters = {*vars(stats), *(f"draft_counts.{part.name}" for part in fields(counts))}
    assert counters - attributes == {"draft_counts", "draft_counts.rows"}


def test_totals_are_zero_before_the_first_snapshot(metrics: ServerMetrics):
    assert value(metrics, "vllm:generation_tokens_total") == 0
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 0


def test_totals_do_not_fall_when_the_engine_restarts(metrics: ServerMetrics):
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    fit = ((3, 0, 0.5, -1.0),)
    metrics.engine(
        snapshot(running=3, steps=7, draft_counts=accepted(5, 2), confidence=fit, kv_used=0.5)
    )
    metrics.engine_ended()
    metrics.engine_restarted()
    assert value(metrics, "strobe:engine_restarts_total") == 1
    assert value(metrics, "strobe:engine_steps_total") == 7
    assert value(metrics, "vllm:num_requests_running") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0
    metrics.engine(snapshot(steps=2, draft_counts=accepted(1, 1, 1)))
    assert value(metrics, "strobe:engine_steps_total") == 9
    assert [value(metrics, per_position, position=str(i)) for i in range(3)] == [6, 3, 1]
    metrics.engine_ended()
    metrics.engine_restarted()
    assert value(metrics, "strobe:engine_restarts_total") == 2
    assert value(metrics, "strobe:engine_steps_total") == 9


Growth = st.lists(
    st.tuples(
        st.tuples(*[st.integers(0, 50)] * 11),
        st.lists(st.integers(0, 9), max_size=5),
        st.tuples(st.integers(0, 3), st.sampled_from(PHASES), st.integers(0, 1 << 19)),
        st.tuples(st.floats(0, 1e4), st.integers(0, 9), st.sampled_from(["stop", "tool_calls"])),
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=15)
@given(Growth)
def test_totals_never_fall_and_series_never_vanish(growth: Any):
    metrics, before, stats = ServerMetrics(MODEL), dict[Any, float](), EngineStats()
    for more, per_position, (drafts, phase, context), (seconds, tokens, reason) in growth:
        stats.merge(EngineStats(*more[:6], DraftCounts(*more[6:9], per_position, *more[9:])))
        metrics.engine(EngineSnapshot(1, 2, 0.5, deepcopy(stats)))
        metrics.record_verified(
            num_verified=drafts, num_accepted=drafts // 2, context_tokens=context, phase=phase
        )
        metrics.record_first_token(seconds)
        metrics.record_inter_token(seconds, tokens)
        metrics.record_finished(
            reason=reason,
            seconds=seconds,
            queue_seconds=None if tokens else seconds,
            first_seconds=seconds if tokens > 1 else None,
            prompt_tokens=context,
            generation_tokens=tokens,
        )
        metrics.record_rejected(400 + tokens, reason)
        after = samples(metrics)
        assert not {
            key: (was, after.get(key))
            for key, was in before.items()
            if (key[0], "gauge") not in EXPOSED | FOR_OTHERS and after.get(key, -1) < was
        }
        before = after


# The server's own metrics


@pytest.mark.parametrize(
    ("context", "bucket"),
    [
        (0, "0-1k"),
        (1023, "0-1k"),
        (1024, "1k-4k"),
        (4095, "1k-4k"),
        (4096, "4k-16k"),
        (16383, "4k-16k"),
        (16384, "16k-64k"),
        (65535, "16k-64k"),
        (65536, "64k-256k"),
        (262143, "64k-256k"),
        (262144, "256k+"),
        (1 << 40, "256k+"),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_verify_step_counts_only_in_its_bucket_and_phase(
    metrics: ServerMetrics, context: int, bucket: str, phase: str
):
    for accepted in (7, 4):
        metrics.record_verified(
            num_verified=15, num_accepted=accepted, context_tokens=context, phase=phase
        )
    items = samples(metrics).items()
    changed = {key: n for key, n in items if n and not key[0].startswith("process_")}
    labels = {"context": bucket, "phase": phase, "model_name": MODEL, "engine": "0"}
    assert changed == {
        (f"strobe:spec_decode_{name}_total", frozenset(labels.items())): number
        for name, number in (("steps", 2), ("draft_tokens", 30), ("accepted_tokens", 11))
    }


def test_all_buckets_and_phases_are_exported_from_the_start(metrics: ServerMetrics):
    cells = [dict(labels) for name, labels in samples(metrics) if name.endswith("steps_total")]
    pairs = {(cell["context"], cell["phase"]) for cell in cells if "phase" in cell}
    assert pairs == {(context, phase) for context in CONTEXTS for phase in PHASES}


def test_step_without_drafts_is_not_counted(metrics: ServerMetrics):
    metrics.record_verified(num_verified=0, num_accepted=0, context_tokens=5, phase="answer")
    labels = {"context": "0-1k", "phase": "answer"}
    assert value(metrics, "strobe:spec_decode_steps_total", **labels) == 0


def test_unknown_phase_is_an_error(metrics: ServerMetrics):
    with pytest.raises(KeyError):
        metrics.record_verified(num_verified=1, num_accepted=1, context_tokens=5, phase="reasoning")


def buckets(metrics: ServerMetrics, name: str) -> dict[str, float]:
    """le -> observations in that bucket only; without empty buckets."""
    counts, below = dict[str, float](), 0.0
    for family in families(metrics):
        for sample in family.samples:
            if sample.name == f"{name}_bucket":
                if sample.value > below:
                    counts[sample.labels["le"]] = sample.value - below
                below = sample.value
    return counts


def test_token_delivery_is_observed_per_step_and_per_token(metrics: ServerMetrics):
    metrics.record_inter_token(0.016, 8)
    metrics.record_inter_token(0.05, 1)
    metrics.record_inter_token(0.9, 0)
    undivided, divided = "vllm:inter_token_latency_seconds", "strobe:time_per_output_token_seconds"
    assert buckets(metrics, undivided) == {"0.025": 1, "0.05": 1}
    assert buckets(metrics, divided) == {"0.0025": 8, "0.05": 1}
    for name, count in ((undivided, 2), (divided, 9)):
        assert value(metrics, f"{name}_count") == count
        assert value(metrics, f"{name}_sum") == pytest.approx(0.066)


def test_finished_answer_counts_in_each_histogram(metrics: ServerMetrics):
    end = {"reason": "stop", "seconds": 1.2, "prompt_tokens": 1024, "generation_tokens": 0}
    metrics.record_finished(**end, queue_seconds=0.3, first_seconds=None)
    metrics.record_finished(**end | {"reason": "error"}, queue_seconds=None, first_seconds=None)
    assert buckets(metrics, "vllm:e2e_request_latency_seconds") == {"1.5": 2}
    assert buckets(metrics, "vllm:request_queue_time_seconds") == {"0.3": 1}
    assert buckets(metrics, "vllm:request_prompt_tokens") == {"2000.0": 2}
    assert buckets(metrics, "vllm:request_generation_tokens") == {"1.0": 2}
    reasons = {
        reason: value(metrics, "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "repetition", "abort", "error")
    }
    assert reasons == {"stop": 1, "length": 0, "repetition": 0, "abort": 0, "error": 1}


def test_request_time_splits_into_queue_prefill_and_decode(metrics: ServerMetrics):
    end = {"reason": "stop", "seconds": 2.2, "prompt_tokens": 9, "generation_tokens": 5}
    metrics.record_finished(**end, queue_seconds=0.25, first_seconds=0.95)
    metrics.record_request(3, None)
    metrics.record_request(1, 90)
    metrics.record_longest(7)
    sums = {
        name: buckets(metrics, f"vllm:request_{name}")
        for name in ("prefill_time_seconds", "decode_time_seconds", "inference_time_seconds",
                     "time_per_output_token_seconds", "params_n", "params_max_tokens",
                     "max_num_generation_tokens")
    }  # fmt: skip
    assert sums == {
        "prefill_time_seconds": {"0.8": 1},
        "decode_time_seconds": {"1.5": 1},
        "inference_time_seconds": {"2.0": 1},
        "time_per_output_token_seconds": {"0.4": 1},
        "params_n": {"1.0": 1, "5.0": 1},
        "params_max_tokens": {"100.0": 1},
        "max_num_generation_tokens": {"10.0": 1},
    }


def test_http_requests_are_counted_by_known_paths(metrics: ServerMetrics):
    metrics.paths = frozenset(["/v1/completions"])
    metrics.record_http("/v1/completions", "POST", 200)
    metrics.record_http("/v1/completions", "POST", 503)
    metrics.record_http("/a/secret", "POST", 401)
    metrics.record_http("/a/secret", "BREW", 404)
    counts = {
        tuple(sorted(labels)): count
        for (name, labels), count in samples(metrics).items()
        if name == "http_requests_total"
    }

    def key(handler: str, method: str, status: str) -> Any:
        return tuple(sorted({"handler": handler, "method": method, "status": status}.items()))

    assert counts == {
        key("/v1/completions", "POST", "2xx"): 1,
        key("/v1/completions", "POST", "5xx"): 1,
        key("none", "POST", "4xx"): 1,
        key("none", "other", "4xx"): 1,
    }


VLLM_QUERIES = (Path(__file__).parent / "vllm_queries.txt").read_text().splitlines()
"""Queries of vLLM's published dashboards (November 2026), with 5m and m for their variables and
without the labels that Prometheus adds."""


@pytest.mark.parametrize("query", VLLM_QUERIES)
def test_vllm_dashboards_find_their_metrics(busy: ServerMetrics, query: str):
    exposed = labels_of(busy)
    metrics, labels = named_in(query)
    assert metrics
    assert metrics <= set(exposed)
    assert labels <= set.union(*(exposed[name] for name in metrics))


def test_server_gauges_are_read_at_each_render(metrics: ServerMetrics):
    assert value(metrics, "strobe:open_answers") == value(metrics, "strobe:server_tasks") == 0
    metrics.open_answers = lambda: 3
    assert value(metrics, "strobe:open_answers") == 3

    async def main() -> list[float]:
        alone = value(metrics, "strobe:server_tasks")
        task = asyncio.ensure_future(asyncio.sleep(0))
        both = value(metrics, "strobe:server_tasks")
        await task
        return [alone, both, value(metrics, "strobe:server_tasks")]

    assert asyncio.run(main()) == [1, 2, 1]


def test_refusals_count_by_status_and_reason(metrics: ServerMetrics):
    for status, reason in ((429, "queue_full"), (429, "queue_full"), (429, "rate")):
        metrics.record_rejected(status, reason)
    name = "strobe:http_requests_refused_total"
    assert value(metrics, name, status="429", reason="queue_full") == 2
    assert value(metrics, name, status="429", reason="rate") == 1


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), max_size=20))
def test_buckets_are_cumulative(
    observed: list[tuple[float, int]],
):
    metrics, name = ServerMetrics(MODEL), "strobe:time_per_output_token_seconds"
    for number, times in observed:
        metrics.record_inter_token(number * times, times)
    every = [number * times / times for number, times in observed for _ in range(times)]
    counts = {
        key + dict(labels).get("le", ""): value
        for (key, labels), value in samples(metrics).items()
        if key.startswith(name)
    }
    for bound in TOKEN_BOUNDS:
        assert counts[f"{name}_bucket{bound!r}"] == sum(number <= bound for number in every)
    assert counts[f"{name}_bucket+Inf"] == counts[f"{name}_count"] == len(every)
    assert counts[f"{name}_sum"] == pytest.approx(sum(every))


# Docs and dashboard

PROMQL = {"sum", "rate", "increase", "histogram_quantile", "bool", "or", "vector"}
"""Words that are neither metrics nor labels."""
ADDED = {"instance", "job"}  # added by Prometheus when scraping


def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "grafana" / "strobe.json").read_text(encoding="utf-8"))


def named_in(expression: str) -> tuple[set[str], set[str]]:
    """Return the metrics and labels in a PromQL expression."""
    rest = re.sub(r'"[^"]*"', '""', expression)
    labels = set(re.findall(r"(\w+)\s*=~?", rest))
    rest = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", rest)
    for group in re.findall(r"\b(?:by|without|on|ignoring|group_left)\s*\(([^)]*)\)", rest):
        labels |= set(re.findall(r"\w+", group))
    rest = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", rest)
    called = re.match(r"label_values\(([\w:]+), (\w+)\)", expression)
    if called:
        return {called[1]}, {called[2]}
    return set(re.findall(r"[a-zA-Z_:][\w:]*", rest)) - PROMQL, labels


def expressions() -> list[tuple[str, str, str]]:
    """Title, expression and legend of each of the dashboard's queries, variables included."""
    board = dashboard()
    queries = [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            queries.append((variable["name"], variable["query"]["query"], ""))
    return queries


@pytest.mark.parametrize(
    ("expression", "metrics", "labels"),
    [
        ('sum by (a, b) (rate(x:y_total{c=~"z"}[5m])) / on () up', {"x:y_total", "up"}, "abc"),
        ('1 + foo{d="e{f}"} > bool bar', {"foo", "bar"}, "d"),
        ("label_values(x:y, a)", {"x:y"}, "a"),
    ],
)
def test_named_in_parses_expressions(expression: str, metrics: set[str], labels: str):
    assert named_in(expression) == (metrics, set(labels))


def test_dashboard_queries_only_exposed_metrics(busy: ServerMetrics):
    exposed = labels_of(busy)
    assert len(expressions()) > 20
    for title, expression, legend in expressions():
        metrics, labels = named_in(expression)
        assert metrics, f"{title}: {expression} names no metric"
        assert metrics <= set(exposed), f"{title}: {sorted(metrics - set(exposed))}"
        common = set.intersection(*(exposed[name] for name in metrics))
        if " on () " in expression:  # the sides are joined without labels
            common = set.union(*(exposed[name] for name in metrics))
        labels |= set(re.findall(r"{{\s*(\w+)\s*}}", legend)) - ADDED
        assert labels <= common, f"{title}: {sorted(labels - common)}"


def test_each_metric_is_on_the_dashboard():
    names = set.union(*(named_in(expression)[0] for _, expression, _ in expressions()))
    metrics_shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    assert metrics_shown == {name for name, _ in EXPOSED}


def test_dashboard_can_be_imported():
    board = dashboard()
    assert board["id"] is None, "an id of another Grafana's database"
    assert board["schemaVersion"] >= 42
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["model_name"]["multi"]
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, f"{panel['title']} lies on another panel"
        cells |= own
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            assert '{model_name=~"$model_name"}' in target["expr"]
        ids = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(ids)) == len(ids)


def test_docs_list_each_metric_with_type_and_labels(busy: ServerMetrics):
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `([\w:]+)` \| (\w+) \| (.*?) ?\| (.+) \|$", text, re.MULTILINE)
    assert len({name for name, *_ in lines}) == len(lines)
    assert {(name, kind) for name, kind, *_ in lines} == EXPOSED | FOR_OTHERS | ON_RAY_SERVE
    exposed = labels_of(busy) | {"strobe:replica_up": {"replica"}}
    for name, kind, labels, _ in lines:
        sample = f"{name}_count" if kind == "histogram" else name
        assert set(re.findall(r"`(\w+)`", labels)) == exposed[sample] - OWN, name
    for word in (*CONTEXTS, *PHASES):
        assert f"`{word}`" in text
