"""`strobe bench step`: the time of one engine step for given shapes, compared with the machine's
floor.

Weights are random and the acceptance length is forced: the figures show the engine's speed, not
the drafter's quality.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from strobe.config import EngineConfig
from strobe.engine.build import ResolvedConfig, resolve
from strobe.engine.engine import Engine
from strobe.hub.locate import locate_models
from strobe.ranks.leader import start_engine
from strobe.request import Request, Status
from strobe.sampling_params import SamplingParams
from strobe.speculation.registry import DRAFTER_METHOD
from strobe.terminal.wording import counted
from strobe.tools.bench.bench_report import begin, floor_figures, report, shapes_of, split_figures
from strobe.tools.bench.bench_settings import StepSettings, command_line
from strobe.tools.bench.cache_room import with_random_models
from strobe.tools.bench.even_routing import check_experts, route_evenly
from strobe.tools.bench.floor import Rates, Shapes
from strobe.tools.bench.measurement import all_decode, open_requests
from strobe.tools.bench.profiling import (
    Profile,
    floor_by_part,
    operations_section,
    profile_sections,
)
from strobe.tools.bench.published_shapes import directories
from strobe.tools.bench.rates import release, synchronize
from strobe.tools.bench.timeline import Timeline
from strobe.tools.report import Figures, Report, Section, fine, number, output, progress, write_json

_PREFILL_REPEATS = 3


@dataclass(frozen=True)
class Window:
    """Timed steps in which `requests` decoded: seconds, tokens generated, and the mean context of a
    request in positions."""

    requests: int
    steps: int
    seconds: float
    tokens: int
    context: float

    @property
    def ms(self) -> float:
        return 1e3 * self.seconds / self.steps


def run_step(settings: StepSettings, config: EngineConfig) -> int:
    """Measure, print the tables, write the file; return 0. Raises ValueError for settings that
    cannot run, before measuring."""
    command = command_line("bench step", settings, config)
    with located_shapes(settings.shapes, config) as config, progress() as say:
        ways = {name: resolve(way) for name, way in _ways(settings, config).items()}
        for setup in ways.values():
            _check_fits(settings, setup)
        figures, rates = begin("step", command, ways, say)
        forced = settings.acceptance_length if DRAFTER_METHOD in ways else None
        figures |= {"acceptance_length_forced": forced, "rows": [], "prefill": []}
        for name, setup in ways.items():
            rows, prefills = _measure(settings, name=name, setup=setup, rates=rates, say=say)
            figures["rows"] += rows
            figures["prefill"] += prefills
            gc.collect()  # free the engine's memory before the next one is built
            release(setup.device)
    write_json(settings.json, figures)
    _report(figures).show(output())
    return 0


@contextmanager
def located_shapes(
    shapes: str, config: EngineConfig, block_size: int | None = None
) -> Generator[EngineConfig]:
    """Yield the settings with the model directories, their own or temporary ones for `shapes`.
    block_size: of the shapes' drafter; None: as published."""
    if shapes and (config.target or config.draft):
        raise ValueError(
            f"shapes is {shapes!r}, but directories are given too; give --shapes, or --target and "
            "--draft."
        )
    if config.target:
        yield locate_models(config)
    elif config.draft is not None:
        raise ValueError("A drafter is named but no target; give --target as well, or --shapes.")
    else:
        with directories(shapes or "demo", block_size) as (target, draft):
            yield replace(config, target=target, draft=draft)


def _ways(settings: StepSettings, config: EngineConfig) -> dict[str, EngineConfig]:
    """Return the settings for plain decoding and the drafter, or only for the one in `method`."""
    if config.method not in (None, "none", DRAFTER_METHOD):
        raise ValueError(
            f"method is {config.method!r}, but random tokens repeat nothing; name "
            f"{DRAFTER_METHOD} or none, or neither for both."
        )
    max_requests = max([*settings.requests, *(count for count, _ in settings.prefills)])
    config = with_random_models(config, settings.load_format, max_requests)
    ways = {"plain": config.without_draft()}
    if config.method != "none" and config.draft is not None:
        ways[DRAFTER_METHOD] = replace(config, method=DRAFTER_METHOD)
    return {config.method: ways[config.method]} if config.method in ways else ways


def _check_fits(settings: StepSettings, setup: ResolvedConfig) -> None:
    """Raise ValueError if prompts and steps do not fit the context, or the drafts the block."""
    if settings.routing == "even":
        check_experts(setup.target.decoder)
    limits = setup.limits
    drafts = setup.limits.num_drafts
    accepted = settings.acceptance_length if setup.draft is not None else 1.0
    if accepted > drafts + 1:
        raise ValueError(
            f"acceptance_length is {accepted:g}, but a step verifies "
            f"{counted(drafts, 'draft')}; ask for 1 to {drafts + 1}."
        )
    for length in settings.prompt_lens:
        room = limits.max_model_len - length - 1 - 2 * limits.lookahead
        max_steps = math.floor(room / accepted) - settings.warmup
        if settings.steps > max_steps:
            hint = (
                f"ask for at most {counted(max_steps, 'step')}"
                if max_steps > 0
                else "ask for shorter prompts or a smaller warmup"
            )
            raise ValueError(
                f"{settings.warmup} + {settings.steps} steps of {accepted:g} tokens after a "
                f"prompt of {length} do not fit max_model_len {limits.max_model_len}; {hint}."
            )
    for count, length in settings.prefills:
        if length >= limits.max_model_len:
            raise ValueError(
                f"prefill asks for {counted(count, 'prompt')} of {counted(length, 'token')}, but "
                f"max_model_len is {limits.max_model_len}; ask for at most "
                f"{limits.max_model_len - 1}."
            )


def _check_pages(settings: StepSettings, engine: Engine) -> None:
    """Raise ValueError if there are too few pages for all requests at once."""
    limits = engine.limits
    pool = engine.components.pool
    accepted = settings.acceptance_length if engine.resolved.draft is not None else 1.0
    steps = settings.warmup + settings.steps
    longest = max(settings.prompt_lens) + math.ceil(steps * accepted) + 2 * limits.lookahead
    count = max(settings.requests)
    need = count * -(-longest // limits.page_size)
    if need > pool.capacity:
        raise ValueError(
            f"{counted(count, 'request')} of up to {longest} tokens need {need} pages, but "
            f"the KV cache has {pool.capacity}; lower concurrency or prompt_len, or raise "
            "kv_cache_memory."
        )
    for group, shape in zip(pool.groups, engine.resolved.page_groups, strict=True):
        if group.window is not None and count * shape.held > group.capacity:
            raise ValueError(
                f"{counted(count, 'request')} need {count * shape.held} pages of layers with a "
                f"window of {group.window}, but the KV cache has {group.capacity}; lower "
                "concurrency, or raise kv_cache_memory."
            )


def _measure(
    settings: StepSettings,
    name: str,
    setup: ResolvedConfig,
    rates: Rates,
    say: Callable[[str], None],
) -> tuple[list[Figures], list[Figures]]:
    """Time the steps and prefills of one way, with an engine that lives only for this call."""
    say(f"{name}: building the engine")
    forced = settings.acceptance_length if name != "plain" else None
    max_rows = setup.limits.max_num_batched_tokens
    evenly = settings.routing == "even"
    prepare = partial(route_evenly, max_rows=max_rows) if evenly else None
    engine = start_engine(setup, simulated_acceptance=forced, prepare=prepare)
    _check_pages(settings, engine)
    rows: list[Figures] = []
    for length in settings.prompt_lens:
        for count in settings.requests:
            say(f"{name}: {counted(count, 'request')}, prompts of {counted(length, 'token')}")
            rows.append(
                {
                    "method": name,
                    **_row(settings, engine=engine, rates=rates, count=count, length=length),
                }
            )
    prefills: list[Figures] = []
    for count, length in settings.prefills:
        say(f"{name}: prefill of {count} x {length} tokens")
        prefills.append({"method": name, **_prefill(settings, engine, count, length)})
    return rows, prefills


def _row(settings: StepSettings, engine: Engine, rates: Rates, count: int, length: int) -> Figures:
    """Return the figures of one concurrency and prompt length: one undisturbed run, then one with
    marks between the parts of a step. A GPU runs once more before, to compile kernels and capture
    graphs for shapes it has not seen."""
    prompts = random_prompts(engine, count, length)
    params = SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=None,
        ignore_eos=True,
    )
    run = partial(
        decode,
        engine,
        prompts=prompts,
        params=params,
        warmup=settings.warmup,
        steps=settings.steps,
    )
    device = engine.resolved.device
    if device.type == "cuda":
        run()
    window = run()
    timeline = Timeline(device)
    run(timeline=timeline)
    split = timeline.split()
    shapes = shapes_of(engine.resolved)
    floor = floor_figures(shapes, rates, count, window.context)
    profile: Figures = {}
    if settings.profile:
        profiled = Profile(device)
        run(timeline=profiled)
        profile = profiled.figures()
        floor["parts"] = floor_by_part(shapes, rates, count, window.context)
    return {
        "concurrency": count,
        "prompt_tokens": length,
        "context_tokens": round(window.context, 1),
        "steps": window.steps,
        "ms": round(window.ms, 4),
        **split_figures(split),
        "tokens_per_s": round(window.tokens / window.seconds, 1),
        "tokens_per_step": round(window.tokens / window.steps / count, 3),
        "floor": floor,
        "ratio_to_floor": round(window.ms / floor["ms"], 3),
        "profile": profile,
    }


def random_prompts(engine: Engine, count: int, length: int) -> list[list[int]]:
    """Return prompts of random tokens, the same on every call."""
    noise = random.Random(f"{engine.config.seed} {length}")
    size = engine.resolved.target.decoder.vocab_size
    return [[noise.randrange(size) for _ in range(length)] for _ in range(count)]


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    warmup: int,
    steps: int,
    timeline: Timeline | Profile | None = None,
) -> Window:
    """Prefill all prompts, decode for `warmup` steps, then time `steps` more, synchronizing with
    the device only before the first and after the last of these."""
    device = engine.resolved.device
    count = len(prompts)
    with open_requests(engine) as active:
        for prompt in prompts:
            request = engine.add(prompt, params)
            active[request.key] = request
        requests = list(active.values())
        while not all_decode(engine, count):
            engine.step()
        for _ in range(warmup):
            engine.step()
        if timeline is not None:
            engine.on_phase = timeline.mark
        synchronize(device)
        before = _tokens(requests)
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        if timeline is not None:
            timeline.stop()
        synchronize(device)
        seconds = time.perf_counter() - began
        after = _tokens(requests)
        _check_running(engine, requests)
    return Window(
        requests=count,
        steps=steps,
        seconds=seconds,
        tokens=after - before,
        context=(before + after) / 2 / count,
    )


def _tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.tokens) for request in requests)


def _check_running(engine: Engine, requests: Sequence[Request]) -> None:
    """Raise ValueError if a request ended before the last step."""
    if any(request.status is not Status.RUNNING for request in requests):
        raise ValueError(
            "A request did not run to the last step; ask for fewer steps, or raise "
            f"max_model_len, which is {engine.limits.max_model_len}, or kv_cache_memory."
        )


def _prefill(settings: StepSettings, engine: Engine, count: int, length: int) -> Figures:
    """Return the median time from adding the prompts until each has its first token."""
    prompts = random_prompts(engine, count, length)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    seconds = median(
        [_first_tokens(engine, prompts, params) for _ in range(1 + _PREFILL_REPEATS)][1:]
    )
    profile: Figures = {}
    if settings.profile:
        profiled = Profile(engine.resolved.device)
        profiled.mark("start")
        _first_tokens(engine, prompts, params)
        profiled.stop()
        profile = profiled.figures()
    shapes: Shapes = shapes_of(engine.resolved)
    return {
        "prompts": count,
        "prompt_tokens": length,
        "seconds": round(seconds, 6),
        "tokens_per_s": round(count * length / seconds, 1),
        "linear_operations_per_s": round(shapes.prefill_operations(count, length) / seconds),
        "profile": profile,
    }


def _first_tokens(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> float:
    synchronize(engine.resolved.device)
    began = time.perf_counter()
    requests = [engine.add(prompt, params) for prompt in prompts]
    while any(request.status is not Status.FINISHED for request in requests):
        engine.step()
    seconds = time.perf_counter() - began
    while engine.has_work:  # with overlap, one more step was launched before the last token arrived
        engine.step()
    return seconds


def _report(figures: Figures) -> Report:
    rows = figures["rows"]
    forced = figures["acceptance_length_forced"]
    label = "tokens/s"
    warning = ""
    if forced is not None:
        label = f"tokens/s\n(forced {forced:g})"
        warning = (
            f"Random weights; acceptance length forced to {forced:.1f}: speed only, not quality."
        )
    sections = [_times(rows, label), _work(rows), *profile_sections(rows)]
    if figures["prefill"]:
        sections.append(_prefills(figures["prefill"]))
    for row in figures["prefill"]:
        where = f"{row['method']}, {_prompts_text(row['prompts'], row['prompt_tokens'])}"
        sections += operations_section(f"Operations of a prefill: {where}", row["profile"])
    return report(figures, sections, warning=warning)


def _prompts_text(count: int, length: int) -> str:
    return f"{counted(count, 'prompt')} of {length:,} tokens"


_WAY = ("method", "c", "prompt")


def _way_cells(row: Figures) -> list[str]:
    return [row["method"], f"{row['concurrency']}", f"{row['prompt_tokens']:,}"]


def _times(rows: Sequence[Figures], label: str) -> Section:
    times = ("ms", "median_ms", "draft_ms", "verify_ms", "rest_ms")
    return Section(
        title="Milliseconds per step; median and parts of a second run, with marks",
        columns=(*_WAY, "mean", "median", "draft", "verify", "rest", label, "x floor"),
        rows=[
            [
                *_way_cells(row),
                *[fine(row[name]) for name in times],
                number(row["tokens_per_s"], 1),
                number(row["ratio_to_floor"]),
            ]
            for row in rows
        ],
    )


def _work(rows: Sequence[Figures]) -> Section:
    counts = ("GB", "GFLOP", "drafter ms", "target ms", "floor ms")
    return Section(
        title="Work of a step",
        columns=(*_WAY, "context", *counts),
        rows=[
            [*_way_cells(row), number(row["context_tokens"], 0), *_floor_cells(row["floor"])]
            for row in rows
        ],
    )


def _floor_cells(floor: Figures) -> list[str]:
    parts = floor["drafting"], floor["verify"]
    return [
        *[fine(sum(part[key] for part in parts) / 1e9) for key in ("bytes", "operations")],
        *[fine(part["ms"]) for part in parts],
        fine(floor["ms"]),
    ]


def _prefills(rows: Sequence[Figures]) -> Section:
    return Section(
        title="Prefill",
        columns=("method", "prompts", "tokens", "seconds", "tokens/s", "TFLOP/s, linear layers"),
        rows=[
            (
                row["method"],
                f"{row['prompts']}",
                f"{row['prompt_tokens']:,}",
                number(row["seconds"], 4),
                number(row["tokens_per_s"], 0),
                number(row["linear_operations_per_s"] / 1e12, 3),
            )
            for row in rows
        ],
    )
