"""Requests of a given length on a CPU whose steps cost what was recorded; no model runs.

RECORDED has steps of SmolLM2-135M with its drafter by weight dtype, as (drafter rows, rows of
the target, requests, positions of context) and milliseconds of processor time: one thread of an AMD
EPYC (AVX-512 BF16), torch 2.13.0+cpu, 2026-11-28, minima of four steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from strobe.kernels.reference_narrow import choose_drafts
from strobe.request import Request
from strobe.runner.buckets import verified_rows
from strobe.sampling_params import SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.step import TAIL, Plan, Span, StepResult, num_rows
from strobe.tools.bench.draft_traces import Traces

WIDTHS = (3, 7)
BLOCK_ROWS = (4, 8)
PROMPT = 40
"""Tokens of each prompt."""
WORKS = (
    (0, 1, 1, 0), (4, 2, 1, 0), (4, 4, 1, 0), (8, 2, 1, 0), (8, 8, 1, 0), (0, 8, 8, 0),
    (0, 1, 1, 261), (32, 11, 8, 0), (32, 32, 8, 0), (64, 15, 8, 0), (64, 64, 8, 0), (0, 4, 4, 0),
    (16, 6, 4, 0), (16, 16, 4, 0), (32, 8, 4, 0), (32, 32, 4, 0),
)  # fmt: skip
RECORDED = {
    "float16": (
        28.1, 39.3, 37.0, 42.3, 62.7, 48.8, 33.0, 101.8, 197.8, 161.3, 335.1, 37.1,
        69.5, 105.6, 86.9, 192.7,
    ),
    "float32": (
        56.6, 74.8, 64.3, 83.0, 78.6, 62.4, 61.5, 99.5, 153.5, 144.6, 279.3, 50.5,
        79.9, 104.9, 102.0, 165.2,
    ),
    "bfloat16": (
        36.9, 52.8, 45.6, 55.3, 58.9, 45.8, 44.1, 70.3, 101.7, 109.5, 184.6, 37.4,
        55.2, 72.9, 69.2, 108.5,
    ),
    "int4": (
        16.1, 25.7, 29.9, 29.8, 46.9, 40.6, 19.1, 83.0, 151.8, 130.1, 311.2, 24.7,
        52.5, 84.7, 74.1, 168.9,
    ),
}  # fmt: skip


def recorded_steps(name: str, noise: float = 0.0, seed: int = 0) -> list[tuple[StepWork, float]]:
    """Return the steps of a weight dtype. noise: they take longer by up to this share, at random,
    as on a busy machine."""
    rng = np.random.default_rng(seed)
    longer = 1 + noise * rng.random(len(WORKS))
    times = np.array(RECORDED[name]) * longer
    return [(StepWork(*work), float(ms)) for work, ms in zip(WORKS, times, strict=True)]


def true_costs(name: str) -> StepCosts:
    costs = StepCosts.fit(recorded_steps(name), lines=False)
    assert costs is not None
    return costs


class Fixed(DraftPolicy):
    """Every request verifies all drafts of this width; 0: none."""

    def __init__(self, width: int):
        self.width = width

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        return DraftPlan([min(c.max_drafts, self.width) for c in candidates])


def adaptive(count: int, costs: StepCosts | None) -> AdaptiveDraftPolicy:
    rows = functools.partial(verified_rows, None)
    policy = AdaptiveDraftPolicy(WIDTHS, BLOCK_ROWS, rows, 512, count)
    policy.costs = costs
    return policy


class Answers:
    """Answers of `length` tokens in `count` slots; a slot that ends takes the next prompt, whose
    rows are a step of their own. traces: what drafts are right; is_right: whether any is."""

    def __init__(self, name: str, count: int, length: int, traces: Traces, *, is_right: bool):
        self.costs = true_costs(name)
        self.count = count
        self.length = length
        self.traces = traces
        self.is_right = is_right

    def rate(self, policy: DraftPolicy, answers: int, seed: int = 0) -> float:
        """Return the tokens per millisecond of so many answers under a policy."""
        rng = np.random.default_rng(seed)
        places = rng.choice(len(self.traces.right) - self.length - 8, answers)
        began = 0
        slots: dict[int, tuple[Request, int, int]] = {}
        tokens = ms = 0.0
        while slots or began < answers:
            for slot in range(self.count):
                if slot not in slots and began < answers:
                    request = Request(str(began), [1], SamplingParams(), seed=0)
                    slots[slot] = request, int(places[began]), self.length - 1
                    began += 1
                    ms += float(self.costs.ms(StepWork(0, PROMPT)))
                    tokens += 1
            ms += self._step(policy, slots)
            tokens += self._made
            slots = {slot: state for slot, state in slots.items() if state[2] > 0}
        return tokens / ms

    def _step(self, policy: DraftPolicy, slots: dict[int, tuple[Request, int, int]]) -> float:
        """Run one step of all slots; return its milliseconds."""
        states = [(slot, *slots[slot]) for slot in sorted(slots)]
        contexts = [PROMPT + self.length - left for *_, left in states]
        candidates = [
            Candidate(request, min(WIDTHS[-1], left), slot=slot)
            for slot, request, _, left in states
        ]
        found = policy.plan(candidates, BatchLoad(0, sum(contexts)))
        longest = max(found.max_drafts)
        width = next((i for i, n in enumerate(WIDTHS) if n >= longest), 0)
        places = np.array([place for _, _, place, _ in states])
        margins = self.traces.margins[width][places].astype(np.float64)
        limits = np.array(found.max_drafts)
        verified = limits
        if found.num_verified is not None:
            verified = choose_drafts(
                torch.from_numpy(margins).float(),
                torch.tensor(found.confidence)[: margins.shape[1]],
                torch.tensor(found.max_drafts),
                found.num_verified,
            ).numpy()
        right = self.traces.right[places, width] if self.is_right else np.zeros(len(states), int)
        accepted = np.minimum(right, verified)
        spans = tuple(
            Span(slot, context, context, (TAIL,), n, "dflash" if n else None, 1 + n)
            for (slot, *_), context, n in zip(states, contexts, found.max_drafts, strict=True)
        )
        rows = num_rows(spans, found.num_verified)
        drafting = int((limits > 0).sum())
        work = StepWork(drafting * BLOCK_ROWS[width], rows, len(states), sum(contexts))
        ms = float(self.costs.ms(work))
        self._made = 0
        for (slot, request, place, left), n in zip(states, accepted.tolist(), strict=True):
            made = min(1 + n, left)
            self._made += made
            slots[slot] = request, place + made, left - made
        plan = Plan(spans, (), (), found.num_verified, found.confidence)
        told = margins.tolist() if longest else None
        result = StepResult([], accepted.tolist(), rows, ms / 1e3, verified.tolist(), told)
        policy.observe(plan, result)
        return ms
