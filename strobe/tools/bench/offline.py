"""`strobe bench offline`: a real pair on real prompts, with and without speculation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

import torch

from strobe.config import EngineConfig
from strobe.engine.build import ResolvedConfig, resolve
from strobe.engine.engine import Engine
from strobe.hub.locate import locate_models
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.ranks.leader import start_engine
from strobe.request import Request
from strobe.speculation.registry import DRAFTER_METHOD
from strobe.terminal.wording import counted
from strobe.tools.bench.bench_prompts import read_prompts
from strobe.tools.bench.bench_report import begin, floor_figures, report, shapes_of, split_figures
from strobe.tools.bench.bench_settings import OfflineSettings, command_line
from strobe.tools.bench.floor import Rates
from strobe.tools.bench.measurement import all_decode, open_requests
from strobe.tools.bench.rates import synchronize
from strobe.tools.bench.timeline import Timeline
from strobe.tools.report import Figures, Report, Section, fine, number, output, progress, write_json
from strobe.warmup.cost_measurement import measure_costs


@dataclass
class OfflineRun:
    """All prompts answered once: the requests in prompt order and their total seconds.

    full: indices of the steps in which all allowed requests decoded; contexts: their mean context.
    """

    requests: list[Request]
    timeline: Timeline
    seconds: float = 0.0
    full: list[int] = field(default_factory=list[int])
    contexts: list[float] = field(default_factory=list[float])

    @property
    def tokens(self) -> int:
        return sum(request.num_output for request in self.requests)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step, without each answer's first token, which the prefill generates.
        None if nothing drafted."""
        steps = sum(request.draft_counts.steps for request in self.requests)
        num_tokens = sum(request.num_output - 1 for request in self.requests)
        return num_tokens / steps if steps else None


def run_offline(settings: OfflineSettings, config: EngineConfig) -> int:
    """Measure, print the tables, write the file; return 0, or 1 if answers in fp32 differ. Raises
    ValueError for settings that cannot run, before measuring."""
    command = command_line("bench offline", settings, config)
    with progress() as say:
        say("reading prompts")
        config = locate_models(config)
        prompts = read_prompts(settings, Path(config.target))
        config = _fit(settings, config, max(map(len, prompts)))
        ways = {name: resolve(way) for name, way in ways_of(config).items()}
        first = next(iter(ways.values()))
        figures, rates = begin("offline", command, ways, say)
        figures |= {"rows": [], "pairs": []}
        say("loading")
        engines = {name: start_engine(setup) for name, setup in ways.items()}
        say("measuring what steps cost")
        for engine in engines.values():
            measure_costs(engine)
        for count in settings.requests:
            best: dict[str, OfflineRun] = {}
            # The first run warms up: on a GPU every batch shape, on a CPU any.
            warmup_prompts = prompts if first.device.type == "cuda" else prompts[:count]
            for repeat in range(settings.repeats + 1):
                for name, engine in engines.items():
                    say(f"{name}: {count} at once, run {repeat} of {settings.repeats}")
                    run = answer(engine, prompts if repeat else warmup_prompts, settings, count)
                    if repeat and (name not in best or run.seconds < best[name].seconds):
                        best[name] = run
            for name, run in best.items():
                row = _row(ways[name], run, rates, count)
                figures["rows"].append({"method": name, **row})
            figures["pairs"].append({"concurrency": count, **_compare(*best.values())})
    write_json(settings.json, figures)
    exact = first.dtype == torch.float32 and config.weight_dtype not in ("bfloat16", "int8", "int4")
    verdict = "in fp32 they must not" if exact else "lower precision rounds differently"
    _report(figures, verdict).show(output())
    return 1 if exact and any(pair["different"] for pair in figures["pairs"]) else 0


def _fit(settings: OfflineSettings, config: EngineConfig, longest: int) -> EngineConfig:
    """Limit requests to the largest concurrency and, unless the user sets it, the context to what
    the prompts and answers need, so that two engines fit in memory."""
    config = replace(config, max_num_seqs=max(settings.requests), enable_prefix_caching=False)
    if config.max_model_len is None:
        max_position = load_target_config(Path(config.target)).decoder.max_position
        if config.draft is not None:
            draft = load_draft_config(Path(config.draft), Path(config.target))
            max_position = min(max_position, draft.decoder.max_position)
        config = replace(config, max_model_len=min(max_position, longest + settings.max_tokens))
    if longest >= (config.max_model_len or 0):
        raise ValueError(
            f"A prompt has {longest} tokens, but max_model_len is {config.max_model_len}, the "
            "answer included; raise it, or leave the prompt out."
        )
    return config


def ways_of(config: EngineConfig) -> dict[str, EngineConfig]:
    """Return the settings for plain decoding and for the drafting method. Raises ValueError if
    nothing drafts."""
    if config.method == "none" or (config.method is None and config.draft is None):
        raise ValueError(
            "Nothing drafts; name a drafter with --draft, or --method ngram, to compare with plain "
            "decoding."
        )
    return {"plain": config.without_draft(), config.method or DRAFTER_METHOD: config}


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: OfflineSettings, count: int
) -> OfflineRun:
    """Answer all prompts, `count` at a time; each next one starts as soon as one has ended."""
    device = engine.resolved.device
    params = settings.sampling()
    run = OfflineRun(requests=[], timeline=Timeline(device))
    waiting = deque(prompts)
    synchronize(device)
    began = time.perf_counter()
    with open_requests(engine, run.timeline.mark) as active:
        while waiting or active:
            while waiting and len(active) < count:
                seed = engine.config.seed + len(run.requests)
                request = engine.add(waiting.popleft(), params, seed=seed)
                run.requests.append(request)
                active[request.key] = request
            full = all_decode(engine, count)
            before = len(run.timeline)
            events = engine.step()
            if full and len(run.timeline) > before:
                run.full.append(before)
                run.contexts.append(mean(len(request.tokens) for request in active.values()))
            for event in events:
                if event.finish_reason is not None:
                    del active[event.key]
        run.seconds = time.perf_counter() - began
        run.timeline.stop()
    synchronize(device)
    return run


def _row(setup: ResolvedConfig, run: OfflineRun, rates: Rates, count: int) -> Figures:
    """Return the figures of one way at one concurrency."""
    split = run.timeline.split(run.full)
    length = run.acceptance_length
    figures: Figures = {
        "concurrency": count,
        "tokens": run.tokens,
        "seconds": round(run.seconds, 4),
        "tokens_per_s": round(run.tokens / run.seconds, 1),
        "acceptance_length": None if length is None else round(length, 3),
        "full_steps": len(run.full),
        "ms": None if split is None else round(split.whole, 4),
        **split_figures(split),
        "floor": None,
        "ratio_to_floor": None,
    }
    if split is not None:
        context = mean(run.contexts)
        floor = floor_figures(shapes_of(setup), rates, count, context)
        figures |= {"context_tokens": round(context, 1), "floor": floor}
        figures["ratio_to_floor"] = round(split.whole / floor["ms"], 3)
    return figures


def _compare(plain: OfflineRun, drafted: OfflineRun) -> Figures:
    """Compare the two ways. different: index of each prompt whose answers differ, and index of the
    first token that does."""
    different: list[Figures] = []
    for i, pair in enumerate(zip(plain.requests, drafted.requests, strict=True)):
        first, second = [request.output_ids for request in pair]
        if first != second:
            matching = next(
                (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
                min(len(first), len(second)),
            )
            different.append({"prompt": i, "token": matching})
    rate = plain.tokens / plain.seconds
    return {
        "speedup": round(drafted.tokens / drafted.seconds / rate, 3),
        "prompts": len(plain.requests),
        "identical": len(plain.requests) - len(different),
        "different": different,
    }


def _report(figures: Figures, verdict: str) -> Report:
    """Return the report. verdict: the comment on answers that differ."""
    speedups = {pair["concurrency"]: pair["speedup"] for pair in figures["pairs"]}
    times = ("ms", "draft_ms", "verify_ms", "rest_ms")
    section = Section(
        title="The same prompts without and with speculation",
        columns=(
            *("method", "c", "tokens/s", "x plain", "accepted"),
            *("ms/step", "draft", "verify", "rest", "x floor"),
        ),
        rows=[
            [
                row["method"],
                f"{row['concurrency']}",
                number(row["tokens_per_s"], 1),
                number(1.0 if row["method"] == "plain" else speedups[row["concurrency"]]),
                number(row["acceptance_length"]),
                *[fine(row[name]) for name in times],
                number(row["ratio_to_floor"]),
            ]
            for row in figures["rows"]
        ],
        note="\n".join([_identity(pair, verdict) for pair in figures["pairs"]]),
    )
    return report(figures, [section])


def _identity(pair: Figures, verdict: str) -> str:
    """Return a sentence on the answers that are identical in both ways."""
    answers = counted(pair["prompts"], "answer")
    line = f"c = {pair['concurrency']}: {pair['identical']} of {answers} identical"
    if pair["different"]:
        first = pair["different"][0]
        line += f"; prompt {first['prompt']} differs first, from token {first['token']} on"
        line += f" ({verdict})"
    return f"{line}."
