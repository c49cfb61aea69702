"""`strobe bench load --break-even`: the accepted length from which drafting pays, by context and
concurrency.

Plain steps, and steps that draft and verify whole blocks, are timed with contexts whose K/V count
as computed. A step with drafts has to bring as many tokens per request as it takes longer than a
plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.ranks.leader import start_engine
from strobe.speculation.adaptive import AdaptiveDraftPolicy, Option
from strobe.speculation.registry import DRAFTER_METHOD
from strobe.terminal.wording import counted
from strobe.tools.bench.bench_report import report
from strobe.tools.bench.bench_settings import LoadSettings, command_line
from strobe.tools.bench.cache_room import with_random_models
from strobe.tools.bench.engine_step import located_shapes
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
from strobe.warmup.cost_measurement import StepKind, time_kinds


def run_break_even(settings: LoadSettings, config: EngineConfig) -> int:
    """Measure, print the table, write the file; return 0. Raises ValueError for settings that
    cannot run, before measuring."""
    command = command_line("bench load", settings, config)
    with located_shapes(settings.shapes, config) as config, progress() as say:
        config = with_random_models(config, settings.load_format, max(settings.requests))
        setup = resolve(config)
        if setup.draft is None or setup.method != DRAFTER_METHOD:
            raise ValueError("Nothing drafts; name shapes with a drafter, or leave --method out.")
        say("building the engine")
        setup = replace(setup, config=setup.config.with_(adaptive=True))
        engine = start_engine(setup)
        figures: Figures = {
            "benchmark": "load",
            **circumstances(command, setup),
            "max_model_len": setup.limits.max_model_len,
            "rows": list(_measure(settings, engine, say)),
        }
    write_json(settings.json, figures)
    _report(figures).show(output())
    return 0


def _measure(
    settings: LoadSettings, engine: Engine, say: Callable[[str], None]
) -> Iterator[Figures]:
    """Yield a row for each context, number of requests and number of drafts; its milliseconds are
    None if the requests do not fit the context or the K/V cache."""
    policy = engine.scheduler.draft_policy
    method = engine.proposers.device_method
    assert isinstance(policy, AdaptiveDraftPolicy)
    assert method is not None
    for context in settings.context_lengths:
        for count in settings.requests:
            options = [Option()]
            for width, drafts in enumerate(policy.widths):
                options.append(Option(width, count, count * drafts))
            times: list[float | None] = [None] * len(options)
            if _fits(engine, context, count):
                say(f"{counted(context, 'token')} of context, {counted(count, 'request')}")
                kinds = [StepKind(count, context, option) for option in options]
                times = [ms for _, ms in time_kinds(engine, policy, method, kinds)]
            plain, *drafted = times
            for drafts, ms in zip(policy.widths, drafted, strict=True):
                yield {
                    "context": context,
                    "concurrency": count,
                    "drafts": drafts,
                    "plain_ms": plain and round(plain, 4),
                    "drafting_ms": ms and round(ms, 4),
                    "accepted_length_needed": plain and ms and round(ms / plain, 3),
                }


def _fits(engine: Engine, context: int, count: int) -> bool:
    """Whether so many requests with such contexts have room for the steps that are timed."""
    limits = engine.limits
    room = 5 * limits.lookahead
    pages = -(-(context + room) // limits.page_size)
    return (
        context + room <= limits.max_model_len and count * pages < engine.components.pool.capacity
    )


def _report(figures: Figures) -> Report:
    """Return a table with a line for each context and number of drafts."""
    rows = figures["rows"]
    counts = list(dict.fromkeys(row["concurrency"] for row in rows))
    lines: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        line = lines.setdefault((row["context"], row["drafts"]), [])
        line.append(number(row["accepted_length_needed"]))
    note = (
        "Tokens per step, the target's own included, from which a step that drafts and verifies so "
        "many tokens is faster than plain decoding."
    )
    if any(row["plain_ms"] is None for row in rows):
        note += (
            f" A dash: the context exceeds max_model_len, {figures['max_model_len']}, or the K/V "
            "cache has no room for so many; raise --max-model-len or --kv-cache-memory."
        )
    section = Section(
        title="Accepted length needed",
        columns=("context", "drafts", *[f"c = {count}" for count in counts]),
        rows=[[f"{key[0]:,}", f"{key[1]}", *line] for key, line in lines.items()],
        note=note,
    )
    return report(figures, [section])
