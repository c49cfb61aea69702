"""`strobe bench load`: many requests at a concurrency or a rate, with drafting replayed from
recorded traces; compares plain decoding, fixed and adaptive numbers of drafts in one engine.

Weights are random, and the traces say which drafts are accepted: the figures show what a draft
policy achieves with a pair like the recorded one on models of these shapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from strobe.config import EngineConfig
from strobe.engine.build import ResolvedConfig, resolve
from strobe.ranks.leader import start_engine
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.draft_policy import DraftPolicy
from strobe.speculation.registry import DRAFTER_METHOD
from strobe.terminal.wording import counted
from strobe.tools.bench.bench_report import report
from strobe.tools.bench.bench_settings import LoadSettings, command_line
from strobe.tools.bench.cache_room import with_random_models
from strobe.tools.bench.draft_traces import Traces, independent, load
from strobe.tools.bench.driver import Arrival, Driver, LoadRun
from strobe.tools.bench.engine_step import located_shapes
from strobe.tools.bench.plot_style import lines, missing, new_figure, save
from strobe.tools.bench.replay import ReplayEngine, widths_of
from strobe.tools.report import (
    Figures,
    Report,
    Section,
    circumstances,
    number,
    output,
    progress,
    write_json,
)
from strobe.warmup.cost_measurement import measure_costs

TRACES = Path(__file__).parent / "traces.npz"
"""The traces shipped with Strobe."""
MAX_TRIES = 5
"""Maximum runs of a load until one captures no CUDA graph."""


def run_load(settings: LoadSettings, config: EngineConfig) -> int:
    """Measure, print the table, write the file and the plot; return 0. Raises ValueError for
    settings that cannot run, before measuring."""
    command = command_line("bench load", settings, config)
    if settings.plot and missing():
        raise ValueError(missing())
    block = max(load(Path(settings.traces)).widths) + 1 if settings.traces else None
    with located_shapes(settings.shapes, config, block) as config, progress() as say:
        config = with_random_models(config, settings.load_format, max(settings.requests))
        setup = resolve(config)
        if setup.draft is None or setup.method != DRAFTER_METHOD:
            raise ValueError("Nothing drafts; name shapes with a drafter, or leave --method out.")
        traces = _traces(settings, setup)
        _check_fits(settings, setup, traces)
        say("building the engine")
        setup = replace(setup, config=setup.config.with_(adaptive=True))
        engine = start_engine(setup, make=partial(ReplayEngine, traces=traces))
        assert isinstance(engine, ReplayEngine)
        say("measuring what steps cost")
        measure_costs(engine)
        budget = engine.scheduler.draft_policy
        assert isinstance(budget, AdaptiveDraftPolicy)
        figures: Figures = {
            "benchmark": "load",
            **circumstances(command, setup),
            "traces": {**traces.note, "places": len(traces.right), "mix": settings.mix},
            "acceptance_length": {n: round(traces.acceptance_length(n), 3) for n in traces.widths},
            "costs": budget.costs.as_dict() if budget.costs is not None else None,
            "rows": [],
        }
        ways = _ways(settings, engine)
        for planned in _loads(settings, traces, config.seed):
            figures["rows"] += _measure(
                planned, settings=settings, engine=engine, ways=ways, say=say
            )
            write_json(settings.json, figures)
    _report(figures).show(output())
    if settings.plot:
        _draw(Path(settings.plot), figures["rows"])
    return 0


class PlannedLoad(NamedTuple):
    """A load to measure: its labels, its requests, and the number that may run at once."""

    labels: Figures
    arrivals: list[Arrival]
    max_open: int


def _measure(
    planned: PlannedLoad,
    *,
    settings: LoadSettings,
    engine: ReplayEngine,
    ways: Mapping[str, Callable[[], None]],
    say: Callable[[str], None],
) -> list[Figures]:
    """Return a row for each way under one load: the median of its runs, which take turns with those
    of the other ways."""
    labels, arrivals, max_open = planned
    runs: dict[str, list[LoadRun]] = {way: [] for way in ways}
    for repeat in range(settings.repeats):
        for way, switch in ways.items():
            say(f"{way}: {labels}")
            switch()
            driver = Driver(engine, settings, way, max_open)
            if not repeat and not settings.rate:  # warm up, and let the policy learn
                first = [arrival._replace(at=0.0) for arrival in arrivals[: 2 * max_open]]
                _run_without_capture(driver, first)
            runs[way].append(_run_without_capture(driver, arrivals))
    rows: list[Figures] = []
    for way, way_runs in runs.items():
        median_run = sorted(way_runs, key=lambda run: run.rate)[len(way_runs) // 2]
        rows.append({"way": way, **labels, **_figures(median_run)})
    return rows


def _run_without_capture(driver: Driver, arrivals: Sequence[Arrival]) -> LoadRun:
    """Return the first run that captures no CUDA graph (which takes seconds), or the last of
    MAX_TRIES."""
    graphs = driver.engine.graphs
    run = None
    for _ in range(MAX_TRIES):
        num_graphs = len(graphs)
        run = driver.run(arrivals)
        if len(graphs) == num_graphs:
            break
    assert run is not None
    return run


def _traces(settings: LoadSettings, setup: ResolvedConfig) -> Traces:
    """Load the traces of the file, or generate them from an acceptance rate."""
    assert setup.draft is not None
    if settings.acceptance_rate is not None:
        return independent(settings.acceptance_rate, widths_of(setup.draft))
    return load(Path(settings.traces) if settings.traces else TRACES).arranged(settings.mix)


def _check_fits(settings: LoadSettings, setup: ResolvedConfig, traces: Traces) -> None:
    """Raise ValueError if an answer does not fit the context, or a way has too many drafts."""
    limits = setup.limits
    max_requests = max(settings.requests)
    if not settings.rate and not settings.steady and 0 < settings.answers < max_requests:
        raise ValueError(
            f"answers is {settings.answers}, but concurrency is {max_requests}; ask for at least "
            "as many."
        )
    if not setup.config.adaptive and "adaptive" in settings.ways:
        raise ValueError("adaptive is off, but ways names it; leave it out of one of them.")
    longest = settings.max_tokens or int(traces.lengths.max())
    # With --steady all requests run until the clock stops: the fastest exceeds the average.
    longest = 4 * longest if settings.steady else longest
    need = settings.prompt_len + longest + 2 * limits.lookahead
    if need > limits.max_model_len:
        raise ValueError(
            f"A prompt of {counted(settings.prompt_len, 'token')} and its answer need up to {need} "
            f"positions, but max_model_len is {limits.max_model_len}; lower prompt_len or "
            "max_tokens, or raise it."
        )
    for way in settings.fixed:
        if way > limits.num_drafts:
            raise ValueError(
                f"ways names {counted(way, 'draft')}, but a step verifies at most "
                f"{limits.num_drafts}; leave it out."
            )


def _ways(settings: LoadSettings, engine: ReplayEngine) -> dict[str, Callable[[], None]]:
    """Return, for each way, a function that switches the engine to it."""
    adaptive = engine.scheduler.draft_policy
    fixed = DraftPolicy()
    return {
        way: partial(
            _switch,
            engine,
            policy=adaptive if way == "adaptive" else fixed,
            margins=way == "adaptive",
        )
        for way in settings.way_names
    }


def _switch(engine: ReplayEngine, *, policy: DraftPolicy, margins: bool) -> None:
    engine.scheduler.draft_policy = policy
    engine.drafter.margins = margins


def _loads(settings: LoadSettings, traces: Traces, seed: int) -> Iterator[PlannedLoad]:
    """Yield the loads to measure."""
    max_requests = max(settings.requests)
    rng = random.Random(seed)
    if settings.rate:
        for rate in settings.rates:
            answers = settings.answers or max(24, round(30 * rate))
            gaps = [rng.expovariate(rate) for _ in range(answers)]
            arrivals = _arrivals(settings, traces, list(accumulate(gaps)), seed)
            labels: Figures = {"rate": rate, "concurrency": max_requests}
            yield PlannedLoad(labels, arrivals, max_requests)
        return
    for count in settings.requests:
        answers = count if settings.steady else settings.answers or max(24, 4 * count)
        arrivals = _arrivals(settings, traces, [0.0] * answers, seed)
        yield PlannedLoad({"concurrency": count}, arrivals, count)


def _arrivals(
    settings: LoadSettings, traces: Traces, times: Sequence[float], seed: int
) -> list[Arrival]:
    """Plan a request for each time, with the traces' answers in random order; every answer is used
    once before any repeats."""
    rng = np.random.default_rng(seed)
    arrivals = list[Arrival]()
    while len(arrivals) < len(times):
        for i in rng.permutation(len(traces.lengths)):
            tokens = min(int(traces.lengths[i]), settings.max_tokens or 2**31)
            tokens = None if settings.steady else tokens
            arrivals.append(Arrival(0.0, int(traces.starts[i]), tokens))
    return [arrival._replace(at=at) for arrival, at in zip(arrivals, times, strict=False)]


def _figures(run: LoadRun) -> Figures:
    """Return tokens/s, the median and 99th percentile of ms per token and to the first token, and
    counts of drafts."""
    seconds = run.ended - run.began
    tpots = [
        1e3 * (times.last - times.first) / (times.tokens - 1)
        for times in run.requests
        if times.tokens > 1
    ]
    ttfts = [1e3 * (times.first - times.due) for times in run.requests if times.first]
    if not run.tokens:
        raise ValueError(
            "No token was generated while all requests ran; ask for more or longer answers."
        )
    figures: Figures = {}
    for name, values in (("tpot_ms", tpots), ("ttft_ms", ttfts)):
        for share in (50, 99):
            ms = round(float(np.percentile(values, share)), 3) if values else None
            figures[f"{name}_p{share}"] = ms
    counts = run.draft_counts
    length = run.draft_counts.acceptance_length
    return {
        "requests": len(run.requests),
        "tokens": run.tokens,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(run.rate, 1),
        **figures,
        "steps": run.steps,
        "drafts_made_per_token": round(counts.num_proposed / run.tokens, 3),
        "drafts_verified_per_token": round(counts.num_verified / run.tokens, 3),
        "acceptance_length": None if length is None else round(length, 3),
    }


def best_fixed(rows: Sequence[Figures], row: Figures) -> Figures | None:
    """Return the row of the fastest way that is not adaptive, at the same load as `row`."""
    fixed_rows = [
        candidate
        for candidate in rows
        if _load(candidate) == _load(row) and candidate["way"] != "adaptive"
    ]
    return max(fixed_rows, key=lambda candidate: candidate["tokens_per_s"], default=None)


def _load(row: Figures) -> tuple[float, int]:
    return row.get("rate", 0.0), row["concurrency"]


def _report(figures: Figures) -> Report:
    lengths = ", ".join(
        f"{length:.2f} ({counted(n, 'draft')})"
        for n, length in figures["acceptance_length"].items()
    )
    rows = figures["rows"]
    by_rate = "rate" in rows[0]
    comparisons = [
        _comparison(row, best)
        for row in rows
        if row["way"] == "adaptive" and (best := best_fixed(rows, row)) is not None
    ]
    section = Section(
        title="Load",
        columns=(
            *("way", "rate" if by_rate else "c", "tokens/s", "ms/token\n50 %", "\n99 %"),
            *("first, ms\n50 %", "\n99 %", "accepted", "made\n/token", "verified\n/token"),
        ),
        rows=[_cells(row) for row in rows],
        note="\n".join(comparisons),
    )
    return report(
        figures,
        [section],
        warning="Random weights; drafts are accepted as in the traces, whose blocks give "
        f"{lengths} tokens per step if verified whole.",
    )


def _cells(row: Figures) -> list[str]:
    times = [f"{name}_ms_p{share}" for name in ("tpot", "ttft") for share in (50, 99)]
    return [
        _way_text(row),
        f"{row['rate']:g}/s" if "rate" in row else f"{row['concurrency']}",
        number(row["tokens_per_s"], 1),
        *[number(row[name]) for name in times],
        number(row["acceptance_length"]),
        number(row["drafts_made_per_token"]),
        number(row["drafts_verified_per_token"]),
    ]


def _way_text(row: Figures) -> str:
    return row["way"] if row["way"].isalpha() else f"K = {row['way']}"


def _comparison(row: Figures, best: Figures) -> str:
    """Return a sentence that compares adaptive drafting with the best other way."""
    load_text = f"{row['rate']:g} requests/s" if "rate" in row else f"c = {row['concurrency']}"
    ratio = row["tokens_per_s"] / best["tokens_per_s"]
    return f"{load_text}: adaptive reaches {ratio:.3f} of the best other way, {_way_text(best)}."


def _draw(path: Path, rows: Sequence[Figures]) -> None:
    """Plot tokens/s and milliseconds per token over the load, a line for each way."""
    load_key = "rate" if "rate" in rows[0] else "concurrency"
    figure, axes = new_figure(7, 7, 2, sharey=False)
    panels = ("tokens_per_s", "tokens/s"), ("tpot_ms_p50", "ms per token, median")
    for axis, (key, label) in zip(axes, panels, strict=True):
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            curves.setdefault(_way_text(row), []).append((row[load_key], row[key]))
        lines(axis, curves, strong="adaptive")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_ylabel(label)
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter("{x:g}")
    axes[0].legend(frameon=False)
    axes[-1].set_xlabel("requests per second" if load_key == "rate" else "requests in flight")
    save(figure, path)
