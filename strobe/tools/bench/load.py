"""`strobe bench load`: many requests at a concurrency or a rate, drafting replayed from recorded
traces, several ways side by side in one engine.

Weights are random, and drafts are kept as the traces say: the figures say what a policy makes of a
pair like the recorded one on models of these shapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
from rich.console import Console

from strobe.config import EngineConfig
from strobe.engine.build import ResolvedConfig, resolve
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.draft_policy import DraftPolicy
from strobe.tools.bench.driver import Driver, Job, Turn
from strobe.tools.bench.engine_step import located_shapes
from strobe.tools.bench.plots import lines, missing, new_figure, save
from strobe.tools.bench.replay import ReplayEngine, widths_of
from strobe.tools.bench.report import (
    Figures,
    circumstances,
    number,
    output,
    progress,
    show_circumstances,
    table,
    write,
)
from strobe.tools.bench.settings import LoadSettings, command_line
from strobe.tools.bench.traces import Traces, independent, load
from strobe.warmup.costs import adapt

TRACES = Path(__file__).parent / "traces.npz"
"""Those that come with Strobe."""
TRIES = 5
"""Runs of a load at most, until one captures no step."""


def run_load(settings: LoadSettings, config: EngineConfig) -> int:
    """Measure, print the table, write file and plot; returns 0. Raises ValueError, before anything
    is measured, for what cannot run."""
    command = command_line("load", settings, config)
    if settings.plot and missing():
        raise ValueError(missing())
    with located_shapes(settings.shapes, config) as config, progress() as say:
        max_requests = max(settings.requests)
        config = replace(
            config, load_format="dummy", max_num_seqs=max_requests, enable_prefix_caching=False
        )
        setup = resolve(config)
        if setup.draft is None or setup.method != "dflash":
            raise ValueError(
                "DFlash drafts nothing; name shapes with a drafter, or leave --method out."
            )
        traces = _traces(settings, setup)
        _check_room(settings, setup, traces)
        say("building the engine")
        setup = replace(setup, config=setup.config.with_(adaptive=True))
        engine = ReplayEngine(setup, traces)
        say("measuring what steps cost")
        adapt(engine)
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
        for load_of, jobs, count in _loads(settings, traces, config.seed):
            turns: dict[str, list[Turn]] = {way: [] for way in ways}
            for repeat in range(settings.repeats):
                for way, start in ways.items():
                    say(f"{way}: {load_of}")
                    start()
                    driver = Driver(engine, settings, way, count)
                    if not repeat and not settings.rate:  # and the policy learns
                        _settled(driver, [job._replace(at=0.0) for job in jobs[: 2 * count]])
                    turns[way].append(_settled(driver, jobs))
            for way, turn_list in turns.items():
                middle = sorted(turn_list, key=lambda turn: turn.rate)[len(turn_list) // 2]
                figures["rows"].append({"way": way, **load_of, **_figures(middle)})
            write(settings.json, figures)
    _show(output(), figures)
    if settings.plot:
        _draw(Path(settings.plot), figures["rows"])
    return 0


def _settled(driver: Driver, jobs: Sequence[Job]) -> Turn:
    """The first run that captures no step, which takes seconds, or the last of TRIES."""
    graphs, turn = driver.engine.graphs, None
    for _ in range(TRIES):
        num_graphs, turn = len(graphs), driver.run(jobs)
        if len(graphs) == num_graphs:
            break
    assert turn is not None
    return turn


def _traces(settings: LoadSettings, setup: ResolvedConfig) -> Traces:
    """Those of the file, or made by an acceptance rate."""
    assert setup.draft is not None
    if settings.acceptance_rate is not None:
        return independent(settings.acceptance_rate, widths_of(setup.draft))
    return load(Path(settings.traces) if settings.traces else TRACES).arranged(settings.mix)


def _check_room(settings: LoadSettings, setup: ResolvedConfig, traces: Traces) -> None:
    """Raises ValueError where an answer does not fit the context, or a number of drafts is none."""
    limits, max_requests = setup.limits, max(settings.requests)
    if not settings.rate and not settings.steady and 0 < settings.answers < max_requests:
        raise ValueError(
            f"answers is {settings.answers}, but concurrency is {max_requests}; ask for at least "
            "as many."
        )
    if not setup.config.adaptive and "adaptive" in settings.ways:
        raise ValueError("adaptive is off, but ways names it; leave it out of one of them.")
    longest = settings.max_tokens or int(traces.lengths.max())
    # Where all go on until the clock stops, the fastest gets further than the average.
    longest = 4 * longest if settings.steady else longest
    need = settings.prompt_len + longest + 2 * limits.lookahead
    if need > limits.max_model_len:
        raise ValueError(
            f"A prompt of {settings.prompt_len} tokens and what follows need up to {need} "
            f"positions, but max_model_len is {limits.max_model_len}; lower prompt_len or "
            "max_tokens, or raise it."
        )
    for way in settings.fixed:
        if way > limits.num_drafts:
            raise ValueError(
                f"ways names {way} drafts, but a step verifies at most {limits.num_drafts}; leave "
                "it out."
            )


def _ways(settings: LoadSettings, engine: ReplayEngine) -> dict[str, Callable[[], None]]:
    """What switches the engine to each way."""
    adaptive, fixed = engine.scheduler.draft_policy, DraftPolicy()

    def switch(budget: DraftPolicy) -> None:
        engine.scheduler.draft_policy, engine.drafter.margins = budget, budget is adaptive

    return {
        way: lambda budget=adaptive if way == "adaptive" else fixed: switch(budget)
        for way in settings.way_names
    }


def _loads(
    settings: LoadSettings, traces: Traces, seed: int
) -> Iterator[tuple[Figures, list[Job], int]]:
    """What to say of each load, its requests, and how many run at once."""
    max_requests, rng = max(settings.requests), random.Random(seed)
    if settings.rate:
        for rate in settings.rates:
            answers = settings.answers or max(24, round(30 * rate))
            gaps = [rng.expovariate(rate) for _ in range(answers)]
            jobs = _jobs(settings, traces, list(accumulate(gaps)), seed)
            yield {"rate": rate, "concurrency": max_requests}, jobs, max_requests
        return
    for count in settings.requests:
        answers = count if settings.steady else settings.answers or max(24, 4 * count)
        yield {"concurrency": count}, _jobs(settings, traces, [0.0] * answers, seed), count


def _jobs(settings: LoadSettings, traces: Traces, times: Sequence[float], seed: int) -> list[Job]:
    """Answers of the traces in a random order, all of them before one comes again."""
    rng, jobs = np.random.default_rng(seed), list[Job]()
    while len(jobs) < len(times):
        for i in rng.permutation(len(traces.lengths)):
            tokens = min(int(traces.lengths[i]), settings.max_tokens or 2**31)
            jobs.append(Job(0.0, int(traces.starts[i]), None if settings.steady else tokens))
    return [job._replace(at=arrival) for job, arrival in zip(jobs, times, strict=False)]


def _figures(turn: Turn) -> Figures:
    """Tokens a second, milliseconds for each token and up to the first one, at 50 and 99 % of the
    requests, and what drafting brought and took."""
    seconds = turn.ended - turn.began
    paces = [
        1e3 * (life.newest - life.first) / (life.tokens - 1)
        for life in turn.lives
        if life.tokens > 1
    ]
    firsts = [1e3 * (life.first - life.due) for life in turn.lives if life.first]
    if not turn.tokens:
        raise ValueError(
            "No token was made while all requests ran; ask for more answers or longer ones."
        )
    figures: Figures = {}
    for name, values in (("tpot_ms", paces), ("ttft_ms", firsts)):
        for share in (50, 99):
            ms = round(float(np.percentile(values, share)), 3) if values else None
            figures[f"{name}_p{share}"] = ms
    steps = turn.drafting
    return {
        "requests": len(turn.lives),
        "tokens": turn.tokens,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(turn.rate, 1),
        **figures,
        "steps": turn.steps,
        "drafts_made_per_token": round(turn.made / turn.tokens, 3),
        "drafts_verified_per_token": round(turn.verified / turn.tokens, 3),
        "acceptance_length": round(1 + turn.accepted / steps, 3) if steps else None,
    }


def best_of_others(rows: Sequence[Figures], row: Figures) -> Figures | None:
    """At the load of an adaptive row, that of the fastest other way."""
    other_rows = [
        candidate
        for candidate in rows
        if _load(candidate) == _load(row) and candidate["way"] != "adaptive"
    ]
    return max(other_rows, key=lambda candidate: candidate["tokens_per_s"], default=None)


def _load(row: Figures) -> tuple[float, int]:
    return row.get("rate", 0.0), row["concurrency"]


def _show(console: Console, figures: Figures) -> None:
    show_circumstances(console, figures)
    brings = ", ".join(
        f"{length:.2f} ({n} drafts)" for n, length in figures["acceptance_length"].items()
    )
    console.print(
        f"Random weights; drafts are kept as traces say, whose blocks bring {brings} tokens a "
        "step if verified whole.",
        style="bold",
        soft_wrap=not console.is_terminal,
    )
    rows = figures["rows"]
    by_rate = "rate" in rows[0]
    cells = [
        (row["way"] if row["way"].isalpha() else f"K = {row['way']}",
         f"{row['rate']:g}/s" if by_rate else f"{row['concurrency']}",
         number(row["tokens_per_s"], 1),
         *[number(row[f"{name}_ms_p{p}"]) for name in ("tpot", "ttft") for p in (50, 99)],
         number(row["acceptance_length"]), number(row["drafts_made_per_token"]),
         number(row["drafts_verified_per_token"]))
        for row in rows
    ]  # fmt: skip
    columns = (
        *("way", "rate" if by_rate else "c", "tokens/s", "ms/token\n50 %", "\n99 %"),
        *("first, ms\n50 %", "\n99 %", "accepted", "made\n/token", "verified\n/token"),
    )
    console.print(table("Load", columns, cells))
    for row in rows:
        best = best_of_others(rows, row) if row["way"] == "adaptive" else None
        if best is not None:
            load_text = f"{row['rate']:g} requests/s" if by_rate else f"c = {row['concurrency']}"
            name = best["way"] if best["way"] == "plain" else f"K = {best['way']}"
            ratio = row["tokens_per_s"] / best["tokens_per_s"]
            console.print(
                f"{load_text}: adaptive brings {ratio:.3f} of the best other way, {name}."
            )


def _draw(path: Path, rows: Sequence[Figures]) -> None:
    """Tokens/s and milliseconds a token over the load, a line for each way."""
    load_key = "rate" if "rate" in rows[0] else "concurrency"
    figure, axes = new_figure(7, 7, 2, sharey=False)
    panels = ("tokens_per_s", "tokens/s"), ("tpot_ms_p50", "ms per token, median")
    for axis, (key, label) in zip(axes, panels, strict=True):
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            name = row["way"] if row["way"].isalpha() else f"K = {row['way']}"
            curves.setdefault(name, []).append((row[load_key], row[key]))
        lines(axis, curves, strong="adaptive")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_ylabel(label)
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter("{x:g}")
    axes[0].legend(frameon=False)
    axes[-1].set_xlabel("requests a second" if load_key == "rate" else "requests in flight")
    save(figure, path)
