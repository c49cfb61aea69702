"""The device's part of shadow mode: drafters read the rows of scored answers, and draft."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch

from strobe.host.transfer import upload
from strobe.models.heads.head import Drafts
from strobe.runner.verify_step import ContextRows
from strobe.speculation.proposer import ProposerSet
from strobe.step import Plan, ShadowWork, Span


class Stopwatch:
    """Seconds of the device's work in its blocks; on a GPU they are known once the work is done."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Generator[None]:
        """Count the block's work."""
        if not self.on_gpu:
            started = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - started
            return
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        try:
            yield
        finally:
            last.record()
            self._events.append((first, last))

    def add(self, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds += seconds

    def take(self) -> float:
        """Return the seconds known since the last call."""
        while self._events and self._events[0][1].query():
            first, last = self._events.pop(0)
            self._seconds += first.elapsed_time(last) / 1e3
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class ShadowDrafting:
    """Runs the drafters of shadow mode for a plan's `ShadowWork`."""

    def __init__(self, proposers: ProposerSet, device: torch.device):
        self.proposers = proposers
        self.device = device
        self.stopwatch = Stopwatch(device)
        self.timed: tuple[str, ...] | None = None
        """Drafters that read all rows of every step, while the steps' costs are measured."""

    def propose(
        self, spans: Sequence[Span], work: ShadowWork, num_drafts: Mapping[str, int]
    ) -> dict[str, Drafts]:
        """Return each drafter's drafts after its spans. num_drafts: of each drafter's blocks."""
        drafts: dict[str, Drafts] = {}
        for name, members in work.proposals:
            blocks = [spans[i]._replace(num_drafts=num_drafts[name], method=name) for i in members]
            drafts[name] = self.proposers.on_device[name].propose(blocks)
        return drafts

    def observe(self, plan: Plan, context: ContextRows | None) -> None:
        """Let the drafters read the rows of the plan's scored answers."""
        if self.timed is not None:
            self._observe(self.timed, context)
        elif plan.shadow is not None and plan.shadow.observed and context is not None:
            with self.stopwatch.running():
                rows = _rows_of(plan, plan.shadow)
                if rows is not None:
                    index = upload(rows, self.device)
                    context = ContextRows(
                        features=context.features[index],
                        positions=context.positions[index],
                        kv_slots=[slots[index] for slots in context.kv_slots],
                    )
                self._observe(tuple(self.proposers.on_device), context)

    def _observe(self, names: Sequence[str], context: ContextRows | None) -> None:
        if context is None:
            return
        for name in names:
            proposer = self.proposers.on_device[name]
            proposer.observe(context, self.proposers.features_of(proposer, context.features))


def _rows_of(plan: Plan, work: ShadowWork) -> list[int] | None:
    """Return the rows of the observed spans; None for all rows."""
    if len(work.observed) == len(plan.spans):
        return None
    chosen = set(work.observed)
    rows: list[int] = []
    first = 0
    for i, span in enumerate(plan.spans):
        if i in chosen:
            rows += range(first, first + span.num_rows)
        first += span.num_rows
    return rows
