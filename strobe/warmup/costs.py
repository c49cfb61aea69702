"""Runs and times steps of every kind before the first request, and fits a policy's costs to them. A
step's time is from one result to the next, so that the host's own work is in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from statistics import median

from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy, Option
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.step import Plan, StepResult

logger = logging.getLogger(__name__)

REPEATS = 4  # steps of each kind that count, at least
SUSTAINED = 0.2  # seconds of each kind on a GPU, in which it comes to the clock that it can hold
SECONDS = {"cuda": 60.0, "cpu": 5.0}  # after which no further kind is timed
LONG, READERS = 2048, 16  # positions of a long context, and requests that read one each
MAX_REQUESTS = {"cuda": 2**30, "cpu": 8}  # at once: beyond, a CPU's costs go on as a line
_MAX_STEPS = 400  # in which each kind is timed, or given up

_ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class FixedDraftPolicy(DraftPolicy):
    """One kind of step, whatever it brings. timed: work and milliseconds of decoding steps."""

    def __init__(self, adaptive: AdaptiveDraftPolicy):
        self.adaptive, self.option = adaptive, Option()
        self.timed: list[tuple[StepWork, float]] = []

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        width, _, num_verified = self.option
        drafts = self.adaptive.widths[width] if width >= 0 else 0
        max_drafts = [min(candidate.max_drafts, drafts) for candidate in candidates]
        return DraftPlan(max_drafts, num_verified if num_verified < sum(max_drafts) else None)

    def observe(self, plan: Plan, result: StepResult) -> None:
        work = StepWork.of(plan, result, self.adaptive.slots[self.option.width])
        if work is not None and result.seconds is not None:
            self.timed.append((work, 1e3 * result.seconds))


def measure_costs(engine: Engine) -> None:
    """Tell an adaptive policy its costs. Engine and policy are left as if nothing had run."""
    adaptive, limits = engine.scheduler.draft_policy, engine.limits
    has_room = limits.max_model_len > 5 * limits.lookahead
    if not (has_room and isinstance(adaptive, AdaptiveDraftPolicy)):
        return
    start, device = time.perf_counter(), engine.resolved.device.type
    timing, steps = _Timing(engine, adaptive), list[tuple[StepWork, float]]()
    for kind in _kinds(engine, adaptive):
        timed = timing.run(*kind, SUSTAINED if device == "cuda" else 0.0)
        if timed:
            steps.append((timed[-1][0], median([ms for _, ms in timed])))
        if time.perf_counter() > start + SECONDS[device]:
            break
    timing.end()
    engine.reset()
    engine.scheduler.draft_policy = adaptive
    adaptive.costs = StepCosts.fit(steps, lines=not engine.resolved.backends.graphs)
    logger.info("costs of steps measured in %.1f s", time.perf_counter() - start)


def _kinds(engine: Engine, adaptive: AdaptiveDraftPolicy) -> Iterator[tuple[int, int, Option]]:
    """Yield requests, prompt tokens of each, and drafts: on a GPU plain steps with long contexts;
    then plain steps, and of each width the fewest drafts and all; of the widest, where steps are
    captured, more than half."""
    limits, device = engine.limits, engine.resolved.device.type
    positions = (engine.components.pool.capacity - 1) * limits.page_size
    most = min(limits.max_num_seqs, MAX_REQUESTS[device])
    size = min(LONG, limits.max_model_len - 5 * limits.lookahead)
    readers = min(READERS, most, positions // (2 * size))
    if device == "cuda" and readers and 4 * size >= LONG:
        yield readers, size, Option()
    most = min(most, max(positions // (2 + 4 * limits.lookahead), 1))
    graphs, widest = engine.resolved.backends.graphs, adaptive.widths[-1]
    for count in [*[2**i for i in range(0, 16, 2 - graphs) if 2**i < most], most]:
        yield count, 1, Option()
        for i, width in enumerate(adaptive.widths):
            choices = [drafts for drafts, _ in adaptive.rows(count, count, width)]
            # The fewest and all: what drafting costs and what rows cost must be told apart.
            for k, drafts in enumerate(choices):
                between = graphs and width == widest and 2 * drafts > count * width
                if between or k in (0, len(choices) - 1):
                    yield count, 1, Option(i, count, drafts)


class _Timing:
    """Requests that bring about one kind of step at a time."""

    def __init__(self, engine: Engine, adaptive: AdaptiveDraftPolicy):
        self.engine, self.requests = engine, list[Request]()
        method = engine.proposers.device_method
        self.params = _ENDLESS.clone(speculation={"method": method})
        self.policy = engine.scheduler.draft_policy = FixedDraftPolicy(adaptive)

    def run(
        self, count: int, size: int, option: Option, seconds: float
    ) -> list[tuple[StepWork, float]]:
        """Return work and milliseconds of steps of so many requests: of the later half of those
        run for so many seconds, after what is made on first use is made."""
        policy, until = self.policy, 0.0
        if any(request.num_prompt != size for request in self.requests):
            self.end()
        policy.option, policy.timed = option, []
        for _ in range(_MAX_STEPS):
            self._fill(count, size)
            self.engine.step()
            timed = [step for step in policy.timed if step[0].requests == count]
            if not until and len(timed) > self.engine.max_in_flight:
                until, policy.timed = time.perf_counter() + seconds, []
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
        """Have so many requests that have room for more steps."""
        room = self.engine.limits.max_model_len - 4 * self.engine.limits.lookahead
        for request in self.requests:
            if len(request.tokens) > room:
                self.engine.finish(request, "abort")
        self.requests = [r for r in self.requests if r.finish_reason is None]
        while len(self.requests) < count:  # other tokens each, so that none finds another's pages
            self.requests.append(self.engine.add([len(self.requests)] * size, self.params))
