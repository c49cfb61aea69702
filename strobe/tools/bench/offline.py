"""`strobe bench offline`: a real pair on real text, speculation on and off on the same prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console

from strobe.config import EngineConfig
from strobe.engine.build import ResolvedConfig, resolve
from strobe.engine.engine import Engine
from strobe.hub.locate import locate_models
from strobe.models.registry import load_draft_config, load_target_config
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.tools.bench.floor import Rates
from strobe.tools.bench.prompts import read_prompts
from strobe.tools.bench.rates import measure, synchronize
from strobe.tools.bench.report import (
    Figures,
    fine,
    floor_figures,
    header,
    number,
    output,
    progress,
    shapes_of,
    show_head,
    split_figures,
    table,
    write,
)
from strobe.tools.bench.settings import OfflineSettings, command_line
from strobe.tools.bench.timeline import Timeline


@dataclass
class Turn:
    """All prompts answered once: the requests in the prompts' order, the seconds it took, and the
    numbers of the steps in which as many requests as allowed decoded, with their mean context."""

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
        """Tokens per verify step: all but the first of each answer, which its prompt's own forward
        made. None where nothing drafted."""
        steps = sum(request.draft_counts.steps for request in self.requests)
        num_tokens = sum(request.num_output - 1 for request in self.requests)
        return num_tokens / steps if steps else None


def run_offline(settings: OfflineSettings, config: EngineConfig) -> int:
    """Measure, print tables, write the file. Returns 0, or 1 where answers in fp32 differ. Raises
    ValueError, before anything is measured, for what cannot run."""
    command = command_line("offline", settings, config)
    with progress() as say:
        say("reading prompts")
        config = locate_models(config)
        prompts = read_prompts(settings, Path(config.target))
        config = _fitted(settings, config, max(map(len, prompts)))
        ways = {name: resolve(way) for name, way in ways_of(config).items()}
        first = next(iter(ways.values()))
        say("measuring bandwidth and matrix rate")
        rates = measure(first.device, first.dtype, fp8=config.weight_dtype == "fp8")
        figures = header("offline", command, ways, rates) | {"rows": [], "pairs": []}
        say("loading")
        engines = {name: Engine(setup) for name, setup in ways.items()}
        for count in settings.requests:
            best: dict[str, Turn] = {}
            # The first turn warms up; a GPU must meet every shape of batch, a CPU any.
            warmup_prompts = prompts if first.device.type == "cuda" else prompts[:count]
            for repeat in range(settings.repeats + 1):
                for name, engine in engines.items():
                    say(f"{name}: {count} at once, turn {repeat} of {settings.repeats}")
                    turn = answer(engine, prompts if repeat else warmup_prompts, settings, count)
                    if repeat and (name not in best or turn.seconds < best[name].seconds):
                        best[name] = turn
            for name, turn in best.items():
                row = _row(ways[name], turn, rates, count)
                figures["rows"].append({"method": name, **row})
            figures["pairs"].append({"concurrency": count, **_compared(*best.values())})
    write(settings.json, figures)
    exact = first.dtype == torch.float32
    why = "in fp32 they must not" if exact else "lower precision rounds otherwise"
    _show(output(), figures, why)
    return 1 if exact and any(pair["different"] for pair in figures["pairs"]) else 0


def _fitted(settings: OfflineSettings, config: EngineConfig, longest: int) -> EngineConfig:
    """As many requests as are asked for, and a context just long enough, so that two engines fit
    side by side; what the user says of it stands."""
    config = replace(config, max_num_seqs=max(settings.requests), enable_prefix_caching=False)
    if config.max_model_len is None:
        max_position = load_target_config(Path(config.target)).decoder.max_position
        if config.draft is not None:
            draft = load_draft_config(Path(config.draft), Path(config.target))
            max_position = min(max_position, draft.decoder.max_position)
        config = replace(config, max_model_len=min(max_position, longest + settings.max_tokens))
    if longest >= (config.max_model_len or 0):
        raise ValueError(
            f"A prompt has {longest} tokens, but max_model_len is {config.max_model_len} with the "
            "answer; raise it, or leave the prompt out."
        )
    return config


def ways_of(config: EngineConfig) -> dict[str, EngineConfig]:
    """Plain decoding, and the method that drafts. Raises ValueError where nothing drafts."""
    if config.method == "none" or (config.method is None and config.draft is None):
        raise ValueError(
            "Nothing drafts; name a drafter with --draft, or --method ngram, to compare with plain "
            "decoding."
        )
    return {"plain": config.without_draft(), config.method or "dflash": config}


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: OfflineSettings, count: int
) -> Turn:
    """Answer all prompts, `count` of them at once, the next one as soon as one has ended."""
    device, usual = engine.resolved.device, engine.on_phase
    params = SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens,
        ignore_eos=settings.ignore_eos,
    )
    turn = Turn([], Timeline(device))
    waiting, active = deque(prompts), dict[Hashable, Request]()
    engine.on_phase = turn.timeline.mark
    synchronize(device)
    began = time.perf_counter()
    try:
        while waiting or active:
            while waiting and len(active) < count:
                seed = engine.config.seed + len(turn.requests)
                request = engine.add(waiting.popleft(), params, seed=seed)
                turn.requests.append(request)
                active[request.key] = request
            full = _all_decode(engine, count)
            before = len(turn.timeline)
            events = engine.step()
            if full and len(turn.timeline) > before:
                turn.full.append(before)
                turn.contexts.append(mean(len(request.tokens) for request in active.values()))
            for event in events:
                if event.finish_reason is not None:
                    del active[event.key]
        turn.seconds = time.perf_counter() - began
        turn.timeline.stop()
    finally:
        engine.on_phase = usual
        for request in active.values():
            engine.finish(request, "abort")
        while engine.has_work:
            engine.step()
    synchronize(device)
    return turn


def _all_decode(engine: Engine, count: int) -> bool:
    scheduler = engine.scheduler
    every = len(scheduler.running) == count and not scheduler.waiting
    return every and all(record.is_decoding for record in scheduler.running)


def _row(setup: ResolvedConfig, turn: Turn, rates: Rates, count: int) -> Figures:
    """One way's figures at one concurrency."""
    split = turn.timeline.split(turn.full)
    length = turn.acceptance_length
    figures: Figures = {
        "concurrency": count,
        "tokens": turn.tokens,
        "seconds": round(turn.seconds, 4),
        "tokens_per_s": round(turn.tokens / turn.seconds, 1),
        "acceptance_length": None if length is None else round(length, 3),
        "full_steps": len(turn.full),
        "ms": None if split is None else round(split.whole, 4),
        **split_figures(split),
        "floor": None,
        "ratio_to_floor": None,
    }
    if split is not None:
        context = mean(turn.contexts)
        floor = floor_figures(shapes_of(setup), rates, count, context)
        figures |= {"context_tokens": round(context, 1), "floor": floor}
        figures["ratio_to_floor"] = round(split.whole / floor["ms"], 3)
    return figures


def _compared(plain: Turn, drafted: Turn) -> Figures:
    """The two ways side by side; different: the prompts whose answers differ, from 0, and the first
    token that does."""
    different: list[Figures] = []
    for i, pair in enumerate(zip(plain.requests, drafted.requests, strict=True)):
        ids = [request.output_ids for request in pair]
        if ids[0] != ids[1]:
            matching = next(
                (n for n, (a, b) in enumerate(zip(*ids, strict=False)) if a != b),
                min(map(len, ids)),
            )
            different.append({"prompt": i, "token": matching})
    rate = plain.tokens / plain.seconds
    return {
        "speedup": round(drafted.tokens / drafted.seconds / rate, 3),
        "prompts": len(plain.requests),
        "identical": len(plain.requests) - len(different),
        "different": different,
    }


def _show(console: Console, figures: Figures, why: str) -> None:
    """why: what to say of answers that differ."""
    show_head(console, figures)
    speedups = {pair["concurrency"]: pair["speedup"] for pair in figures["pairs"]}
    rows = [
        (
            row["method"],
            f"{row['concurrency']}",
            number(row["tokens_per_s"], 1),
            number(1.0 if row["method"] == "plain" else speedups[row["concurrency"]]),
            number(row["acceptance_length"]),
            fine(row["ms"]),
            fine(row["draft_ms"]),
            fine(row["verify_ms"]),
            fine(row["rest_ms"]),
            number(row["ratio_to_floor"]),
        )
        for row in figures["rows"]
    ]
    columns = ("method", "c", "tokens/s", "x plain", "accepted", "ms/step", "draft", "verify",
               "rest", "x floor")  # fmt: skip
    console.print(table("Speculation off and on, the same prompts", columns, rows))
    for pair in figures["pairs"]:
        line = f"c = {pair['concurrency']}: {pair['identical']} of {pair['prompts']} answers "
        line += "identical"
        if pair["different"]:
            first = pair["different"][0]
            line += f"; prompt {first['prompt']} differs first, from token {first['token']} on"
            line += f" ({why})"
        console.print(line + ".", soft_wrap=not console.is_terminal)
