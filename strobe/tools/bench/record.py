"""`strobe bench record`: traces of a real pair on real prompts, for `strobe bench load`."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.config import EngineConfig
from strobe.engine.build import ResolvedConfig, resolve
from strobe.engine.engine import Engine
from strobe.hub.locate import locate_models
from strobe.ranks.leader import start_engine
from strobe.request import Request
from strobe.runner.layout import Layout
from strobe.speculation.proposer import Drafts, PlacedRows, Proposer
from strobe.speculation.registry import DRAFTER_METHOD
from strobe.step import Plan, Span
from strobe.terminal.wording import counted
from strobe.tools.bench.bench_prompts import read_prompts
from strobe.tools.bench.bench_settings import RecordSettings, command_line
from strobe.tools.bench.cache_room import with_cache_room
from strobe.tools.bench.draft_traces import Traces
from strobe.tools.bench.replay import widths_of
from strobe.tools.report import circumstances, output, progress

Place = list[tuple[NDArray[np.int64], NDArray[np.float16]]]
"""Drafts from one token, and their margins, for each width of a block."""


class _RecordingProposer:
    """Drafts a block of every width at every place. seen: the places of each slot."""

    def __init__(self, drafter: Proposer, widths: Sequence[int]):
        self.drafter = drafter
        self.widths = widths
        self.capture = drafter.capture
        self.margins = drafter.margins = True
        self.widths_for = drafter.widths_for
        self.seen: dict[int, list[Place]] = {}

    def propose(self, spans: Sequence[Span]) -> Drafts:
        places: list[Place] = [[] for _ in spans]
        for width in self.widths:
            drafts = self.drafter.propose([span._replace(num_drafts=width) for span in spans])
            assert drafts.tokens is not None
            assert drafts.margins is not None
            pairs = zip(drafts.tokens.cpu().numpy(), drafts.margins.cpu().numpy(), strict=True)
            for place, (tokens, margins) in zip(places, pairs, strict=False):
                place.append((tokens.copy(), margins.astype(np.float16)))
        for span, place in zip(spans, places, strict=True):
            self.seen.setdefault(span.slot, []).append(place)
        return drafts.first(1)  # pyright: ignore[reportPossiblyUnboundVariable]

    def observe(self, batch: PlacedRows, hidden: Tensor | None) -> None:
        self.drafter.observe(batch, hidden)


class RecordingEngine(Engine):
    """Drafts at every token and accepts none. recorder: what it has drafted."""

    def __init__(self, setup: ResolvedConfig, **options: Any):
        """options: of `Engine`."""
        assert setup.draft is not None
        super().__init__(setup, simulated_acceptance=_accept_none, **options)
        (method, drafter), *_ = self.proposers.on_device.items()
        self.recorder = _RecordingProposer(drafter, widths_of(setup.draft))
        self.proposers.on_device[method] = self.recorder

    def follow(self, plan: Plan, in_flight: int) -> None:
        super().follow(plan, in_flight)
        self.recorder.seen.clear()  # only the first rank keeps its recordings


def _accept_none(layout: Layout, batch: Batch) -> Tensor:
    return torch.zeros_like(batch.starts)


def run_record(settings: RecordSettings, config: EngineConfig) -> int:
    """Record the traces, write the file and print a summary; return 0. Raises ValueError for
    settings that cannot run."""
    command = command_line("bench record", settings, config)
    with progress() as say:
        say("reading prompts")
        config = locate_models(config)
        prompts = read_prompts(settings, Path(config.target))
        config = replace(config, enable_prefix_caching=False, adaptive=False, overlap=1)
        config = with_cache_room(replace(config, max_num_seqs=settings.at_once))
        setup = resolve(config)
        if setup.draft is None or setup.method != DRAFTER_METHOD:
            raise ValueError("Nothing drafts; name a drafter, or leave --method out.")
        say("loading")
        engine = start_engine(setup, make=RecordingEngine)
        assert isinstance(engine, RecordingEngine)
        traces = record(engine, prompts, settings)
        note = {k: v for k, v in circumstances(command, setup).items() if k != "threads"}
        traces = replace(traces, note=note)
    traces.save(Path(settings.out))
    lengths = ", ".join(f"{traces.acceptance_length(n):.2f} with {n}" for n in traces.widths)
    console = output()
    console.print(
        f"{settings.out}: {counted(len(traces.lengths), 'answer')}, "
        f"{counted(len(traces.right), 'place')}; tokens per step by number of drafts: {lengths}.",
        soft_wrap=True,
    )
    return 0


def record(
    engine: RecordingEngine, prompts: Sequence[Sequence[int]], settings: RecordSettings
) -> Traces:
    """Answer all prompts, one token per step, and record the drafts at every token."""
    recorder = engine.recorder
    widths = engine.recorder.widths
    params = settings.sampling().clone(speculation={"num_drafts": 1})
    waiting = deque(enumerate(prompts))
    slots = dict[int, Request]()
    requests: list[Request] = []
    active = set[Hashable]()
    answers = dict[Hashable, list[list[tuple[Any, Any]]]]()
    while waiting or active:
        while waiting and len(active) < settings.at_once:
            i, prompt = waiting.popleft()
            requests.append(engine.add(prompt, params, seed=engine.config.seed + i))
            active.add(requests[-1].key)
        recorder.seen.clear()
        slots |= {record.slot: record.request for record in engine.scheduler.running}
        events = engine.step()
        for slot, places in recorder.seen.items():
            answers.setdefault(slots[slot].key, []).extend(places)
        active -= {event.key for event in events if event.finish_reason is not None}
    if any(request.num_preemptions for request in requests):
        raise ValueError(
            f"{settings.at_once} answers at once do not fit the KV cache; lower at_once, or raise "
            "kv_cache_memory."
        )
    recorded = [(request, answers[request.key]) for request in requests if request.num_output > 1]
    if not recorded:
        raise ValueError("No answer has two tokens; ask for longer ones or give other prompts.")
    right = [_count_right(request.output_ids, places, widths) for request, places in recorded]
    margins = [
        np.array([place[n][1] for _, places in recorded for place in places])
        for n in range(len(widths))
    ]
    lengths = np.array([len(places) for _, places in recorded])
    return Traces(
        widths=tuple(widths),
        lengths=lengths,
        right=np.concatenate(right),
        margins=tuple(margins),
        note={},
    )


def _count_right(
    answer: Sequence[int], places: Sequence[Place], widths: Sequence[int]
) -> NDArray[np.uint8]:
    """Count the leading drafts that match the answer, [places, widths]; drafts after the answer's
    end count as right."""
    assert len(places) == len(answer) - 1, "one place for each token but the last"
    right = np.zeros((len(places), len(widths)), dtype=np.uint8)
    for t, place in enumerate(places):
        for n, width in enumerate(widths):
            truth = np.array(answer[t + 1 : t + 1 + width])
            wrong = np.flatnonzero(place[n][0][: len(truth)] != truth)
            right[t, n] = wrong[0] if len(wrong) else width
    return right
