"""Runs and times steps of every kind before the first request, and fits the adaptive policy's costs
to them. A step's time is from one result to the next, so it includes the host's work."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

from strobe.engine.engine import Engine
from strobe.engine.shadow_mode import ShadowMode
from strobe.hub.locate import LOOKUP
from strobe.request import Request
from strobe.runner.buckets import verified_rows
from strobe.sampling_params import SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy, Option
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.draft_policy import (
    BatchLoad,
    Candidate,
    DraftChain,
    DraftPlan,
    DraftPolicy,
)
from strobe.speculation.proposer import Drafter, Proposer
from strobe.speculation.shadow.ledger import ScoredDrafter
from strobe.speculation.shadow.speed_up import PLAIN, DrafterCosts, ShadowCosts
from strobe.step import Plan, StepResult

logger = logging.getLogger(__name__)

REPEATS = 4  # min steps of each kind that count
SUSTAINED = 0.2  # seconds of each kind on a GPU, which then runs at the clock that it can sustain
SECONDS = {"cuda": 60.0, "cpu": 5.0}  # after which no further kind is timed
LONG_PROMPT = 2048
MAX_LONG_PROMPTS = 16
MAX_REQUESTS = {"cuda": 2**30, "cpu": 8}  # beyond, a CPU's costs go on as a line
CPU_PATIENCE = 4.0  # times a CPU's seconds, for the kinds without which nothing is known
_MAX_STEPS = 400  # after which a kind that has not run is skipped

_ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class BlockOptions(Protocol):
    """The blocks of a drafter, as an adaptive policy has them. widths: drafts, ascending;
    block_rows: rows of each; rows(requests, drafting requests, max drafts of each): the steps that
    exist for them, as (drafts of all together, rows)."""

    @property
    def widths(self) -> tuple[int, ...]: ...

    @property
    def block_rows(self) -> tuple[int, ...]: ...

    @property
    def rows(self) -> Callable[[int, int, int], Sequence[tuple[int, int]]]: ...


class FixedDraftPolicy(DraftPolicy):
    """Plans one kind of step. timed: work and milliseconds of its decoding steps."""

    def __init__(self, blocks: BlockOptions):
        self.option = Option()
        self.blocks = blocks
        self.timed: list[tuple[StepWork, float]] = []

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        width, _, num_verified = self.option
        drafts = self.blocks.widths[width] if width >= 0 else 0
        max_drafts = [min(candidate.max_drafts, drafts) for candidate in candidates]
        return DraftPlan(
            max_drafts=max_drafts,
            num_verified=num_verified if num_verified < sum(max_drafts) else None,
        )

    def observe(self, plan: Plan, result: StepResult) -> None:
        block_rows = self.blocks.block_rows[self.option.width] if self.blocks.block_rows else 0
        work = StepWork.of(plan, result, block_rows)
        if work is not None and result.seconds is not None:
            self.timed.append((work, 1e3 * result.seconds))


def measure_costs(engine: Engine) -> None:
    """Set the costs of an adaptive policy, or of shadow mode. Leaves no other trace in the engine
    or the policy."""
    limits = engine.limits
    adaptive = engine.scheduler.draft_policy
    start = time.perf_counter()
    if limits.max_model_len <= 5 * limits.lookahead:
        return
    if engine.shadow is not None:
        engine.shadow.costs = measure_shadow_costs(engine, engine.shadow)
    elif isinstance(adaptive, AdaptiveDraftPolicy):
        method = engine.proposers.device_method
        assert method is not None
        steps = time_steps(engine, adaptive, method)
        adaptive.costs = StepCosts.fit(steps, lines=not engine.resolved.backends.graphs)
    else:
        return
    logger.info("costs of steps measured in %.1f s", time.perf_counter() - start)


@dataclass(frozen=True)
class DrafterBlocks:
    """The blocks of a drafter in shadow mode; prompt lookup's blocks have no rows. See
    `BlockOptions`."""

    widths: tuple[int, ...]
    block_rows: tuple[int, ...]
    rows: Callable[[int, int, int], Sequence[tuple[int, int]]]


class FullChains:
    """Prompt lookup that always finds a whole chain."""

    def propose(self, request: Request, count: int) -> DraftChain:
        return DraftChain(tokens=(0,) * count, match_length=1)


def measure_shadow_costs(engine: Engine, shadow: ShadowMode) -> ShadowCosts:
    """Return the costs of steps with each drafter as if there were no other; without those for
    which there was too little time. Leaves no trace in the engine."""
    drafters = engine.scheduler.drafters
    engine.scheduler.drafters = {**drafters, LOOKUP: Drafter(host=FullChains())}
    has_graphs = bool(engine.resolved.backends.graphs)
    costs: dict[str, DrafterCosts] = {}
    for drafter in shadow.drafters:
        blocks = _blocks_of(engine, drafter)
        timed = time_steps(engine, blocks, drafter.name)
        block_rows = sum(blocks.block_rows)
        steps = StepCosts.fit(timed, lines=not has_graphs, has_drafter=block_rows > 0)
        if steps is not None:
            costs[drafter.name] = DrafterCosts(steps=steps, block_rows=block_rows)
    engine.scheduler.drafters = drafters
    return ShadowCosts(drafters=costs, max_num_seqs=engine.limits.max_num_seqs)


def _blocks_of(engine: Engine, drafter: ScoredDrafter) -> DrafterBlocks:
    """Return the blocks of steps to time: a drafter on the device drafts its whole block."""
    proposer = engine.proposers[drafter.name]
    num_drafts = drafter.num_drafts
    if not isinstance(proposer, Proposer):
        widths = tuple(sorted({max(num_drafts // 4, 1), num_drafts}))
        return DrafterBlocks(widths=widths, block_rows=(), rows=_all_verified)
    widths, block_rows = proposer.widths_for(num_drafts)
    rows = functools.partial(verified_rows, engine.runner.buckets)
    return DrafterBlocks(widths=(widths[-1],), block_rows=(block_rows[-1],), rows=rows)


def _all_verified(count: int, drafting: int, max_drafts: int) -> list[tuple[int, int]]:
    """Return the one step in which all drafts are verified, as prompt lookup's always are."""
    drafts = drafting * max_drafts
    return [(drafts, count + drafts)]


def time_steps(engine: Engine, blocks: BlockOptions, method: str) -> list[tuple[StepWork, float]]:
    """Return work and milliseconds of steps of each kind, with drafts by this method: on a GPU the
    median, on a CPU the minimum, as other processes lengthen some steps. Leaves no trace in the
    engine."""
    start = time.perf_counter()
    device = engine.resolved.device.type
    if device == "cpu":
        return _time_cpu_steps(engine, blocks, method)
    sustained = SUSTAINED if device == "cuda" or engine.shadow is not None else 0.0
    policy = engine.scheduler.draft_policy
    timing = _Timing(engine, blocks, method)
    steps = list[tuple[StepWork, float]]()
    for kind in _kinds(engine, blocks):
        timed = timing.run(kind, sustained)
        if timed:
            steps.append((timed[-1][0], median([ms for _, ms in timed])))
        if time.perf_counter() > start + SECONDS[device]:
            break
    timing.end()
    engine.reset()
    engine.scheduler.draft_policy = policy
    return steps


def _time_cpu_steps(
    engine: Engine, blocks: BlockOptions, method: str
) -> list[tuple[StepWork, float]]:
    """See `time_steps`. The contexts of short prompts count as none: their milliseconds are less
    than noise, which a fit to them would be."""
    start = time.perf_counter()
    sustained = SUSTAINED if engine.shadow is not None else 0.0
    policy = engine.scheduler.draft_policy
    timing = _Timing(engine, blocks, method, assumes_prompts=True)
    steps = list[tuple[StepWork, float]]()
    for i, (kind, is_needed) in enumerate(_cpu_kinds(engine, blocks)):
        seconds = SECONDS["cpu"] * (CPU_PATIENCE if is_needed else 1.0)
        if i and time.perf_counter() > start + seconds:
            break
        timed = timing.run(kind, sustained)
        if timed:
            work = timed[-1][0]
            work = work if kind.prompt > 1 else work._replace(context=0)
            steps.append((work, min([ms for _, ms in timed])))
    timing.end()
    engine.reset()
    engine.scheduler.draft_policy = policy
    return steps


def time_kinds(
    engine: Engine, blocks: BlockOptions, method: str, kinds: Iterable[StepKind]
) -> Iterator[tuple[StepKind, float | None]]:
    """Yield the milliseconds of a step of each kind, as `time_steps` has them, None if such steps
    do not come about. Prompts count as computed."""
    policy = engine.scheduler.draft_policy
    is_cpu = engine.resolved.device.type == "cpu"
    timing = _Timing(engine, blocks, method, assumes_prompts=True)
    for kind in kinds:
        timed = [ms for _, ms in timing.run(kind, SUSTAINED)]
        typical = min if is_cpu else median
        yield kind, typical(timed) if timed else None
    timing.end()
    engine.reset()
    engine.scheduler.draft_policy = policy


class StepKind(NamedTuple):
    """Steps of `requests` requests with prompts of `prompt` tokens. option: their drafts."""

    requests: int
    prompt: int
    option: Option


def _kinds(engine: Engine, blocks: BlockOptions) -> Iterator[StepKind]:
    """Yield the kinds of steps of `_kinds_of` to time on a GPU, first those with long contexts."""
    limits = engine.limits
    positions = (engine.components.pool.capacity - 1) * limits.page_size
    max_requests = min(limits.max_num_seqs, MAX_REQUESTS["cuda"])
    size = min(LONG_PROMPT, limits.max_model_len - 5 * limits.lookahead)
    long_prompts = min(MAX_LONG_PROMPTS, max_requests, positions // (2 * size))
    if long_prompts and 4 * size >= LONG_PROMPT:
        yield from _kinds_of(long_prompts, blocks, size)
    max_requests = min(max_requests, max(positions // (2 + 4 * limits.lookahead), 1))
    between = [4**i for i in range(8, 0, -1) if 4**i < max_requests]
    for count in dict.fromkeys((max_requests, 1, *between)):  # a range to interpolate in, first
        yield from _kinds_of(count, blocks)


def _cpu_kinds(engine: Engine, blocks: BlockOptions) -> Iterator[tuple[StepKind, bool]]:
    """Yield the kinds of steps to time on a CPU, the cheapest first, and whether they are needed to
    tell the costs of the drafter's rows, of the target's and of requests from one another: steps of
    one request, and plain steps of several."""
    limits = engine.limits
    positions = (engine.components.pool.capacity - 1) * limits.page_size
    max_requests = min(limits.max_num_seqs, MAX_REQUESTS["cpu"])
    max_requests = min(max_requests, max(positions // (2 + 4 * limits.lookahead), 1))
    yield from ((kind, True) for kind in _kinds_of(1, blocks))
    size = min(LONG_PROMPT, limits.max_model_len - 5 * limits.lookahead, positions // 2)
    counts = dict.fromkeys(n for n in (max_requests, 4) if 1 < n <= max_requests)
    for i, count in enumerate(counts):
        for kind in _kinds_of(count, blocks):
            yield kind, kind.option == Option() and not i
            if kind.option == Option() and not i and 4 * size >= LONG_PROMPT:
                yield StepKind(1, size, Option()), False
    if 4 * size >= LONG_PROMPT:
        yield from ((kind, False) for kind in _kinds_of(1, blocks, size) if kind.option.width >= 0)


def _kinds_of(count: int, blocks: BlockOptions, prompt: int = 1) -> Iterator[StepKind]:
    """Yield the kinds of steps of so many requests with such prompts: plain, and for each width the
    fewest drafts and all, to tell the cost of drafting from the cost of rows."""
    yield StepKind(count, prompt, Option())
    for i, width in enumerate(blocks.widths):
        choices = [drafts for drafts, _ in blocks.rows(count, count, width)]
        for drafts in sorted({choices[0], choices[-1]}):
            yield StepKind(count, prompt, Option(i, count, drafts))


class _Timing:
    """Runs requests in an engine, one kind of step at a time."""

    def __init__(
        self, engine: Engine, blocks: BlockOptions, method: str, *, assumes_prompts: bool = False
    ):
        """assumes_prompts: prompts count as computed, but for their last page."""
        self.assumes_prompts = assumes_prompts
        self.requests = list[Request]()
        self.engine = engine
        self.method = method
        self.shadow = engine.shadow
        self.use_drafter = True
        """Whether requests have the drafter; in shadow mode, plain steps run without it."""
        self.policy = engine.scheduler.draft_policy = FixedDraftPolicy(blocks)

    def run(self, kind: StepKind, seconds: float) -> list[tuple[StepWork, float]]:
        """Run steps of this kind for so many seconds, after the first ones, which compile and
        capture. Return work and milliseconds of the later half, or nothing if such steps do not
        come about."""
        policy = self.policy
        until = 0.0
        self.use_drafter = kind.option.width >= 0 or self.shadow is None
        usable = kind.prompt, self.method if self.use_drafter else PLAIN
        if any((request.num_prompt, request.method) != usable for request in self.requests):
            self.end()
        if self.shadow is not None:
            is_on_device = self.method in self.engine.proposers.on_device
            self.shadow.drafting.timed = (self.method,) if self.use_drafter and is_on_device else ()
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
        if self.shadow is not None:
            self.shadow.drafting.timed = None

    def _fill(self, count: int, size: int) -> None:
        """End requests that are too many or near the context's end, and add new ones, so that
        `count` of them run."""
        room = self.engine.limits.max_model_len - 4 * self.engine.limits.lookahead
        for i, request in enumerate(self.requests):
            if i >= count or len(request.tokens) > room:
                self.engine.finish(request, "abort")
        self.requests = [r for r in self.requests if r.finish_reason is None]
        while len(self.requests) < count:  # different tokens, so that none shares cached pages
            request = self.engine.add([len(self.requests)] * size, _ENDLESS)
            request.num_assumed = size - 1 if self.assumes_prompts else 0
            if self.use_drafter:  # requests in shadow mode cannot choose it
                request.method = self.method
                request.num_drafts = self.policy.blocks.widths[-1]
            self.requests.append(request)
