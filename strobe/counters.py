"""Counters of drafting and of an engine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Self


@dataclass(slots=True)
class Counters:
    """Counters that only grow and can be summed."""

    def merge(self, counters: Self) -> None:
        """Add other counters to these."""
        for name in [part.name for part in fields(self)]:
            total = getattr(self, name)
            count = getattr(counters, name)
            if isinstance(total, Counters):
                total.merge(count)
            elif isinstance(total, list):
                setattr(self, name, list(map(sum, zip_longest(total, count, fillvalue=0))))
            else:
                setattr(self, name, total + count)


@dataclass(slots=True)
class DraftCounts(Counters):
    """Counts of drafting, of one answer or of many. steps: verify steps with drafts. num_proposed:
    drafts proposed; num_verified, num_accepted: of these verified and accepted;
    accepted_per_position: steps that accepted the draft at each position. rows: target rows in all
    steps that could draft; skipped_steps: steps among these without drafts."""

    steps: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list[int])
    num_proposed: int = 0
    rows: int = 0
    skipped_steps: int = 0

    def add(
        self,
        num_verified: int,
        num_accepted: int,
        num_proposed: int | None = None,
        *,
        times: int = 1,
    ) -> None:
        """Count one decode step, or `times` equal ones. num_proposed defaults to num_verified."""
        num_proposed = num_verified if num_proposed is None else num_proposed
        self.num_proposed += num_proposed * times
        self.rows += (1 + num_verified) * times
        self.num_verified += num_verified * times
        self.num_accepted += num_accepted * times
        if num_verified:
            self.steps += times
        if not num_proposed:
            self.skipped_steps += times
        if not num_verified:
            return
        accepted_per_position = self.accepted_per_position
        missing = num_verified - len(accepted_per_position)
        if missing > 0:
            accepted_per_position += [0] * missing
        for position in range(num_accepted):
            accepted_per_position[position] += times

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / steps, vLLM's formula: tokens per verify step, the target's own included,
        or a little more where an answer ended on a draft. None before the first step."""
        return 1 + self.num_accepted / self.steps if self.steps else None


@dataclass
class EngineStats(Counters):
    """Counters over all requests. prefix_queries, prefix_hits: prompt tokens of admitted requests,
    and those served from the prefix cache. shadow_requests, shadow_blocks: answers and blocks in
    which drafters are scored; shadow_seconds: that this takes, of all steps' step_seconds.
    states_kept: states of recurrent layers that were kept; state_hits: requests that began from
    one. host_queries: tokens of these prompts that the device's prefix cache did not have, looked
    up in host memory; host_hits: the hits among them; host_saves, host_loads: pages and states
    copied to host memory and back. `strobe.outputs.METRICS` has their metrics."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    shadow_requests: int = 0
    shadow_blocks: int = 0
    shadow_seconds: float = 0.0
    step_seconds: float = 0.0
    states_kept: int = 0
    state_hits: int = 0
    host_queries: int = 0
    host_hits: int = 0
    host_saves: int = 0
    host_loads: int = 0
