"""Runs and times steps of every kind before the first request, and fits the adaptive policy's costs
to them. A step's time is from one result to the next, so it includes the host's work."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy, Option
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.step import Plan, StepResult

logger = logging.getLogger(__name__)

REPEATS = 4  # min steps of each kind that count
SUSTAINED = 0.2  # seconds of each kind on a GPU, which then runs at the clock that it can sustain
SECONDS = {"cuda": 60.0, "cpu": 5.0}  # after which no further kind is timed
LONG_PROMPT = 2048
MAX_LONG_PROMPTS = 16
MAX_REQUESTS = {"cuda": 2**30, "cpu": 8}  # beyond, a CPU's costs go on as a line
_MAX_STEPS = 400  # after which a kind that has not run is skipped

_ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class FixedDraftPolicy(DraftPolicy):
    """Plans one kind of step. timed: work and milliseconds of its decoding steps."""

    def __init__(self, adaptive: AdaptiveDraftPolicy):
        self.option = Option()
        self.adaptive = adaptive
        self.timed: list[tuple[StepWork, float]] = []

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        width, _, num_verified = self.option
        drafts = self.adaptive.widths[width] if width >= 0 else 0
        max_drafts = [min(candidate.max_drafts, drafts) for candidate in candidates]
        return DraftPlan(
            max_drafts=max_drafts,
            num_verified=num_verified if num_verified < sum(max_drafts) else None,
        )

    def observe(self, plan: Plan, result: StepResult) -> None:
        work = StepWork.of(plan, result, self.adaptive.block_rows[self.option.width])
        if work is not None and result.seconds is not None:
            self.timed.append((work, 1e3 * result.seconds))


def measure_costs(engine: Engine) -> None:
    """Set the costs of an adaptive policy. Leaves no other trace in the engine or the policy."""
    adaptive = engine.scheduler.draft_policy
    limits = engine.limits
    has_room = limits.max_model_len > 5 * limits.lookahead
    if not (has_room and isinstance(adaptive, AdaptiveDraftPolicy)):
        return
    start = time.perf_counter()
    device = engine.resolved.device.type
    timing = _Timing(engine, adaptive)
    steps = list[tuple[StepWork, float]]()
    for kind in _kinds(engine, adaptive):
        timed = timing.run(kind, SUSTAINED if device == "cuda" else 0.0)
        if timed:
            steps.append((timed[-1][0], median([ms for _, ms in timed])))
        if time.perf_counter() > start + SECONDS[device]:
            break
    timing.end()
    engine.reset()
    engine.scheduler.draft_policy = adaptive
    adaptive.costs = StepCosts.fit(steps, lines=not engine.resolved.backends.graphs)
    logger.info("costs of steps measured in %.1f s", time.perf_counter() - start)


class StepKind(NamedTuple):
    """Steps of `requests` requests with prompts of `prompt` tokens. option: their drafts."""

    requests: int
    prompt: int
    option: Option


def _kinds(engine: Engine, adaptive: AdaptiveDraftPolicy) -> Iterator[StepKind]:
    """Yield the kinds of steps to time: on a GPU plain steps with long contexts; then plain steps,
    and for each width the fewest drafts and all, to tell the cost of drafting from the cost of
    rows."""
    limits = engine.limits
    device = engine.resolved.device.type
    positions = (engine.components.pool.capacity - 1) * limits.page_size
    max_requests = min(limits.max_num_seqs, MAX_REQUESTS[device])
    size = min(LONG_PROMPT, limits.max_model_len - 5 * limits.lookahead)
    long_prompts = min(MAX_LONG_PROMPTS, max_requests, positions // (2 * size))
    if device == "cuda" and long_prompts and 4 * size >= LONG_PROMPT:
        yield StepKind(long_prompts, size, Option())
    max_requests = min(max_requests, max(positions // (2 + 4 * limits.lookahead), 1))
    between = [4**i for i in range(8, 0, -1) if 4**i < max_requests]
    for count in dict.fromkeys((max_requests, 1, *between)):  # a range to interpolate in, first
        yield StepKind(count, 1, Option())
        for i, width in enumerate(adaptive.widths):
            choices = [drafts for drafts, _ in adaptive.rows(count, count, width)]
            for drafts in sorted({choices[0], choices[-1]}):
                yield StepKind(count, 1, Option(i, count, drafts))


class _Timing:
    """Runs requests in an engine, one kind of step at a time."""

    def __init__(self, engine: Engine, adaptive: AdaptiveDraftPolicy):
        self.requests = list[Request]()
        self.engine = engine
        method = engine.proposers.device_method
        self.params = _ENDLESS.clone(speculation={"method": method})
        self.policy = engine.scheduler.draft_policy = FixedDraftPolicy(adaptive)

    def run(self, kind: StepKind, seconds: float) -> list[tuple[StepWork, float]]:
        """Run steps of this kind for so many seconds, after the first ones, which compile and
        capture. Return work and milliseconds of the later half, or nothing if such steps do not
        come about."""
        policy = self.policy
        until = 0.0
        if any(request.num_prompt != kind.prompt for request in self.requests):
            self.end()
        policy.option = kind.option
        policy.timed = []
        for _ in range(_MAX_STEPS):
            self._fill(kind.requests, kind.prompt)
            self.engine.step()
            timed = [step for step in policy.timed if step[0].requests == kind.requests]
            if not until and len(timed) > self.engine.max_in_flight:
                until = time.perf_counter() + seconds
                policy.timed = []
            elif len(timed) >= REPEATS and time.perf_counter() > until:
                return timed[-max(REPEATS, len(timed) // 2) :]
        return []

    def end(self) -> None:
        """Abort all requests."""
        for request in self.requests:
            self.engine.finish(request, "abort")
        self.requests = []
        while self.engine.has_work:
            self.engine.step()

    def _fill(self, count: int, size: int) -> None:
        """End requests that are too many or near the context's end, and add new ones, so that
        `count` of them run."""
        room = self.engine.limits.max_model_len - 4 * self.engine.limits.lookahead
        for i, request in enumerate(self.requests):
            if i >= count or len(request.tokens) > room:
                self.engine.finish(request, "abort")
        self.requests = [r for r in self.requests if r.finish_reason is None]
        while len(self.requests) < count:  # different tokens, so that none shares cached pages
            self.requests.append(self.engine.add([len(self.requests)] * size, self.params))
