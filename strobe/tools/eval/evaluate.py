"""`strobe eval`: measure a pair on data sets, and compare it with published figures."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.engine.build import ResolvedConfig, resolve
from strobe.hub.locate import locate_models
from strobe.llm import LLM
from strobe.sampling_params import SamplingParams
from strobe.tools.bench.bench_settings import command_line
from strobe.tools.bench.offline import ways_of
from strobe.tools.bench.plot_style import missing
from strobe.tools.bench.rates import release
from strobe.tools.eval import eval_plots, expected, measures
from strobe.tools.eval.answering import Answering, Run
from strobe.tools.eval.datasets import DataSet, load
from strobe.tools.eval.eval_report import report
from strobe.tools.eval.eval_settings import EvalSettings
from strobe.tools.report import Figures, circumstances, output, progress, write_json

Say = Callable[[str], None]


def evaluate(kind: str, settings: EvalSettings, config: EngineConfig) -> int:
    """Measure, print the tables, write the report. kind: acceptance, accuracy or speed.

    Returns 0, or 1 if a figure is below the expected one or answers in fp32 differ with
    speculation. Raises ValueError for settings that cannot run, before measuring.
    """
    named = expected.chosen(settings)
    command = command_line(f"eval {kind}", settings, config)
    with progress() as say:
        say("reading data sets")
        config = _located(settings, config)
        data_sets = [load(name, settings) for name in settings.names]
        counts = {d.name: settings.requests(kind, len(d.samples)) for d in data_sets}
        max_requests = max(max(count) for count in counts.values())
        # Verify whole blocks, so that acceptance does not depend on load or machine.
        fixed = {"enable_prefix_caching": False, "adaptive": False}
        config = replace(config, max_num_seqs=max_requests, **fixed)
        plain_only = kind == "accuracy" and config.method == "none"
        ways = {"plain": config} if plain_only else ways_of(config)
        if kind == "acceptance":
            del ways["plain"]
        resolved = resolve(list(ways.values())[-1])
        enough = {d.name: expected.enough(len(d.samples), d.total) for d in data_sets}
        expectations = expected.expectations(settings, resolved, named, enough)
        figures = _header(
            kind, command=command, settings=settings, resolved=resolved, data_sets=data_sets
        )
        runs = _measure(
            kind, settings=settings, ways=ways, data_sets=data_sets, counts=counts, say=say
        )
        say("grading")
        _fill(figures, settings=settings, data_sets=data_sets, runs=runs, expectations=expectations)
    if settings.output:
        _write(Path(settings.output), settings, figures, runs)
    report(figures).show(output())
    return 0 if figures["passed"] else 1


def _located(settings: EvalSettings, config: EngineConfig) -> EngineConfig:
    if config.target not in ("", str(DEMO_MODELS / "target")) and not (
        settings.dataset or settings.data
    ):
        raise ValueError(
            "A target is named but no data set, and the demo tasks suit only the demo models; name "
            "a data set with --dataset or --data."
        )
    return locate_models(config)


Key = tuple[str, int, str]
"""Data set, concurrency and way."""


class Engines:
    """An engine for each way, created at its first use. one_at_a_time: frees the previous engine
    first, since a GPU may not hold two."""

    def __init__(self, ways: dict[str, EngineConfig], one_at_a_time: bool):
        self._ways = ways
        self._one_at_a_time = one_at_a_time
        self._llms: dict[str, LLM] = {}

    def get(self, way: str, say: Say) -> LLM:
        if way not in self._llms:
            if self._one_at_a_time and self._llms:
                device = self._llms.popitem()[1].engine.resolved.device
                gc.collect()  # requests and engines refer to each other
                release(device)
            say(f"loading for {way}")
            self._llms[way] = LLM(**vars(self._ways[way]))
        return self._llms[way]


def _measure(
    kind: str,
    settings: EvalSettings,
    ways: dict[str, EngineConfig],
    data_sets: list[DataSet],
    counts: dict[str, tuple[int, ...]],
    say: Say,
) -> dict[Key, Run]:
    """Run every data set at every concurrency in each way. On a CPU, whose speed drifts, the ways
    alternate; on a GPU all runs of one way come before the next."""
    combinations = [(d, count, way) for d in data_sets for count in counts[d.name] for way in ways]
    gpu = resolve(next(iter(ways.values()))).device.type == "cuda"
    if gpu:
        combinations.sort(key=lambda combination: list(ways).index(combination[2]))
    engines = Engines(ways, one_at_a_time=gpu)
    runs: dict[Key, Run] = {}
    for data, count, way in combinations:
        name = f"{data.name}, {way}, {count} at once"
        llm = engines.get(way, say)
        runs[data.name, count, way] = _fastest(
            kind, settings=settings, llm=llm, data=data, count=count, name=name, say=say
        )
        del llm  # the next engine may need its memory
    return runs


def _fastest(
    kind: str, settings: EvalSettings, llm: LLM, data: DataSet, count: int, name: str, say: Say
) -> Run:
    """Return the fastest of `repeats` runs; for speed, after a warm-up."""
    params = SamplingParams(
        temperature=settings.temperature, top_p=settings.top_p, max_tokens=settings.max_tokens
    )
    answering = Answering(llm.engine, llm.tokenizer, params, settings.thinking)
    if kind == "speed":  # on a GPU every batch shape, on a CPU any
        say(f"{name}: warming up")
        gpu = llm.engine.resolved.device.type == "cuda"
        answering.run(data.samples if gpu else data.samples[:count], count)
    runs: list[Run] = []
    for i in range(settings.repeats):
        text = f"{name}, run {i + 1} of {settings.repeats}"
        report: Callable[[int], None] = partial(_report, say, text, len(data.samples))
        runs.append(answering.run(data.samples, count, report))
    best = min(runs, key=lambda run: run.seconds)
    if not best.tokens:
        raise ValueError(f"No prompt of {data.name} could run. {best.conversations[0].error}")
    return best


def _report(say: Say, text: str, total: int, done: int) -> None:
    say(f"{text}: {done} of {total}")


def _header(
    kind: str,
    command: str,
    settings: EvalSettings,
    resolved: ResolvedConfig,
    data_sets: list[DataSet],
) -> Figures:
    """Return the figures' first entries: date, machine, pair, settings and data sets."""
    target = resolved.target
    draft = resolved.draft
    return {
        "evaluation": kind,
        **circumstances(command, resolved),
        "pair": {
            "target": _name(resolved.config.target),
            "draft": _name(resolved.config.draft or ""),
            "architecture": target.architecture,
            "layers": target.decoder.num_layers,
            "hidden_size": target.decoder.hidden_size,
            "draft_layers": None if draft is None else draft.decoder.num_layers,
            "block_size": None if draft is None else draft.block_size,
            "drafts_per_step": resolved.limits.num_drafts,
        },
        "settings": asdict(settings),
        "definitions": measures.DEFINITIONS,
        "data_sets": [
            {"name": d.name, "source": d.source, "prompts": len(d.samples), "of": d.total}
            for d in data_sets
        ],
    }


def _name(path: str) -> str:
    """Return a checkpoint's name without this machine's directories, for the report."""
    if path.startswith(str(DEMO_MODELS)):
        return f"the demo {Path(path).name}"
    return path if not Path(path).is_absolute() else "/".join(Path(path).parts[-2:])


def _fill(
    figures: Figures,
    settings: EvalSettings,
    data_sets: list[DataSet],
    runs: dict[Key, Run],
    expectations: expected.Expectations,
) -> None:
    """Add the measured part to the figures."""
    rows: list[Figures] = []
    pairs: list[Figures] = []
    checks: list[Figures] = []
    for data in data_sets:  # in the user's order
        keys = [key for key in runs if key[0] == data.name]
        for name, count, way in sorted(keys, key=lambda key: key[1]):
            run = runs[name, count, way]
            labels = {"data_set": name, "concurrency": count}
            measured = measures.row(data, run, run_code=settings.allow_code_execution)
            rows.append(labels | {"method": way} | measured)
            if way == "plain":
                continue
            if (figure := expectations.by_data_set.get(name)) is not None:
                checks += [labels | check for check in expected.compare(figure, measured)]
            if (plain := runs.get((name, count, "plain"))) is not None:
                pairs.append(labels | measures.compare(plain, run))
    exact = figures["dtype"] == "float32"
    different = any(pair["identical"] < pair["prompts"] for pair in pairs)
    passed = all(check["met"] for check in checks) and not (exact and different)
    figures |= {"rows": rows, "pairs": pairs, "expected": checks}
    notes = [*expectations.notes, *([missing()] if settings.output and missing() else [])]
    figures |= {"notes": notes, "passed": passed}


def _write(folder: Path, settings: EvalSettings, figures: Figures, runs: dict[Key, Run]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = [] if missing() else eval_plots.draw(folder, figures)
        write_json(folder / "report.json", figures)
        page = report(figures).markdown(pictures)
        (folder / "report.md").write_text(page, encoding="utf-8")
        if settings.save_answers:
            lines = [json.dumps(line) + "\n" for line in _answers(runs)]
            (folder / "answers.jsonl").write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"output is {str(folder)!r}, which cannot be written ({error}).") from None


def _answers(runs: dict[Key, Run]) -> list[dict[str, Any]]:
    return [
        {
            "data_set": name, "concurrency": count, "method": way, "prompt": talk.number,
            "turns": list(talk.sample.turns), "answers": [a.text for a in talk.answers],
            "error": talk.error,
        }
        for (name, count, way), run in runs.items()
        for talk in run.conversations
    ]  # fmt: skip
