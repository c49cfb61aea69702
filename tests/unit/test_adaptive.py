"""The adaptive policy's choices in simulations whose chances and costs are known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from strobe.kernels.reference_narrow import choose_drafts
from strobe.request import Request
from strobe.runner.buckets import Buckets, verified_rows
from strobe.sampling_params import SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.draft_policy import (
    BatchLoad,
    Candidate,
    DraftChain,
    DraftPlan,
    with_required_drafts,
)
from strobe.speculation.exploration import Exploration
from strobe.speculation.policy_config import PolicyConfig
from strobe.step import TAIL, Plan, Span, StepResult, num_rows
from tests.support.full_marks import full_where

WIDTHS, SLOTS = (3, 7, 15), (4, 8, 16)

# As on a GPU, rows that cost almost nothing up to 64; as on a CPU, rows that all cost the same.
GPU = {1: 5.0, 64: 5.2, 256: 9.0, 512: 15.0, 4096: 100.0}
CPU = {1: 5.0, 512: 105.0}

SPREAD = 1.5  # logits from the mean to easy and to hard drafts


class Simulation:
    """Requests that never end. Each draft is right with a chance that its margin reveals
    (`informative`), or with a chance that margins say nothing about."""

    def __init__(
        self,
        count: int,
        verify: dict[int, float],
        *,
        informative: bool = True,
        slowdown: float = 1.0,
        buckets: Buckets | None = None,
    ):
        rows = functools.partial(verified_rows, buckets)
        self.policy = AdaptiveDraftPolicy(WIDTHS, SLOTS, rows, 512, count)
        drafting = {4: 0.8, 16: 0.9, 512: 3.0, 4096: 20.0}
        self.policy.costs, self.true_costs = [StepCosts(drafting, verify) for _ in range(2)]
        self.slowdown, self.informative = slowdown, informative
        self.context = 9
        self.rng = np.random.default_rng(count)
        request = Request("r", [1], SamplingParams(), seed=0)
        self.candidates = [Candidate(request, 15, slot=i) for i in range(count)]
        self.total_ms = self.total_tokens = 0.0
        self.plans: list[DraftPlan] = []

    def ms(self, draft_rows: int, rows: int, drafting: int = 0) -> float:
        """Return the true milliseconds of a step of all requests."""
        count = len(self.candidates)
        work = StepWork(draft_rows, rows, count, count * self.context, drafting, rows - count)
        return self.slowdown * float(self.true_costs.ms(work))

    def step(self, chance: Callable[[int], float]) -> None:
        """chance(position): mean chance of a draft to be right."""
        count = len(self.candidates)
        draft_plan = self.policy.plan(self.candidates, BatchLoad(0, count * self.context))
        self.plans.append(draft_plan)
        longest = max(draft_plan.max_drafts)
        spans = [
            Span(i, self.context, self.context, (TAIL,), n, "dflash" if n else None, 1 + n)
            for i, n in enumerate(draft_plan.max_drafts)
        ]
        width = next((w for w in WIDTHS if w >= longest), 0) if longest else 0
        chances = np.array([chance(k) for k in range(width)])
        logits = np.tile(np.log(chances / (1 - chances)), (count, 1))
        margins = self.rng.uniform(0, 5, logits.shape)
        if self.informative:
            logits = logits + self.rng.choice([-SPREAD, SPREAD], (count, 1))
            margins = np.clip(logits + 3.0, 0, 40)
        right = self.rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
        leading = np.where(right.all(1), width, right.argmin(1)) if width else np.zeros(count, int)
        verified = self.verified(draft_plan, margins)
        accepted = np.minimum(leading, verified)
        plan = Plan(tuple(spans), (), (), draft_plan.num_verified, draft_plan.confidence)
        rows = num_rows(spans, draft_plan.num_verified)
        drafting = sum(n > 0 for n in draft_plan.max_drafts)
        ms = self.ms(drafting * SLOTS[WIDTHS.index(width)] if width else 0, rows, drafting)
        self.total_ms += ms
        expected = np.append(0.0, chances.cumprod().cumsum())  # by drafts verified
        self.total_tokens += count + (accepted if self.informative else expected[verified]).sum()
        margin_lists = margins.tolist() if width else None
        result = StepResult([], accepted.tolist(), rows, ms / 1e3, verified.tolist(), margin_lists)
        self.policy.observe(plan, result)

    def verified(self, plan: DraftPlan, margins: Any) -> Any:
        """Return the drafts verified of each request."""
        max_drafts = torch.tensor(plan.max_drafts)
        if plan.num_verified is None:
            return max_drafts.numpy()
        rates = torch.tensor(plan.confidence)[: margins.shape[1]]
        inputs = torch.from_numpy(margins), rates, max_drafts
        return choose_drafts(*inputs, plan.num_verified).numpy()

    def rate(self, steps: int, chance: Callable[[int], float]) -> float:
        """Return the tokens per millisecond of these steps; without informative margins, the
        expected tokens of the policy's plans, in which luck has no part."""
        self.total_ms = self.total_tokens = 0.0
        for _ in range(steps):
            self.step(chance)
        return self.total_tokens / self.total_ms

    def fixed_rate(self, drafts: int, chance: float) -> float:
        """Return the expected tokens per millisecond of a fixed number of drafts, whose mean chance
        to be right is the same at every position."""
        count = len(self.candidates)
        slots = SLOTS[WIDTHS.index(drafts)] if drafts else 0
        mean = np.log(chance / (1 - chance))
        logits = [mean - SPREAD, mean + SPREAD] if self.informative else [mean]
        chances = [1 / (1 + np.exp(-logit)) for logit in logits]
        tokens = np.mean([sum(p**k for k in range(drafts + 1)) for p in chances])
        return float(count * tokens / self.ms(count * slots, count * (1 + drafts)))

    def best_fixed_rate(self, chance: float) -> float:
        return max(self.fixed_rate(drafts, chance) for drafts in (0, *WIDTHS))

    def plain_rate(self) -> float:
        return self.fixed_rate(0, 0.5)


@full_where(
    lambda count, chance, verify: (
        ((count == 1) + (chance in (0.5, 0.97)) + (verify is GPU)) % 2 == 0
    )
)
@pytest.mark.parametrize("verify", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("chance", [0.02, 0.5, 0.85, 0.97])
@pytest.mark.parametrize("count", [1, pytest.param(8, marks=pytest.mark.full), 64])
def test_adaptive_step_matches_best_fixed_number(
    count: int, chance: float, verify: dict[int, float]
):
    simulation = Simulation(count, verify, informative=False)
    simulation.rate(300, lambda position: chance)
    rate = simulation.rate(300, lambda position: chance)
    assert rate >= 0.98 * simulation.best_fixed_rate(chance)


@pytest.mark.parametrize("count", [32, pytest.param(64, marks=pytest.mark.full), 128])
def test_informative_margins_beat_every_fixed_number(count: int):
    simulation = Simulation(count, GPU, buckets=Buckets(256, 15, 16))
    simulation.rate(300, lambda position: 0.8)
    rate = simulation.rate(300, lambda position: 0.8)
    assert rate > 1.05 * simulation.best_fixed_rate(0.8)
    assert any(plan.num_verified is not None for plan in simulation.plans[300:])


def test_drafter_that_is_never_right_rests():
    simulation = Simulation(64, GPU, informative=False)
    simulation.rate(300, lambda position: 0.01)
    assert simulation.rate(1000, lambda position: 0.01) > 0.99 * simulation.plain_rate()
    drafting = [plan for plan in simulation.plans[300:] if any(plan.max_drafts)]
    assert 0 < len(drafting) < 40


class LongContexts(Simulation):
    """A drafter that is never right, and requests with long contexts, as on a GPU or a CPU. Steps
    are timed before, with 2 % of noise, at contexts of 9 and of 2,048 positions."""

    def __init__(self, count: int, context: int, device: str):
        super().__init__(count, {"gpu": GPU, "cpu": CPU}[device], informative=False)
        self.device = device
        self.policy.costs = StepCosts.fit(list(self.timed()), lines=device == "cpu")
        self.context = context

    def ms(self, draft_rows: int, rows: int, drafting: int = 0) -> float:
        """A GPU reads the K/V of a request again for its drafts, once for all of them, and the
        drafter's; a CPU computes the attention of each row."""
        block, draft_row, draft = {"gpu": (6e-5, 4e-7, 2e-6), "cpu": (0, 1.5e-4, 9e-4)}[self.device]
        plain = {"gpu": 5e-5, "cpu": 1e-3}[self.device] * len(self.candidates)
        drafts = rows - len(self.candidates)
        drafted = block * drafting + draft_row * draft_rows + draft * drafts
        return super().ms(draft_rows, rows, drafting) + self.context * (plain + drafted)

    def timed(self) -> Iterator[tuple[StepWork, float]]:
        all_requests = self.candidates
        for self.context, counts in ((9, {1, 4, len(all_requests)}), (2048, {len(all_requests)})):
            for n in counts:
                self.candidates = all_requests[:n]
                works = [StepWork(0, n, n, n * self.context)]
                for block, width in zip(SLOTS, WIDTHS, strict=True):
                    for drafts in (max(n * width // 8, 1), n * width):
                        work = StepWork(n * block, n + drafts, n, n * self.context, n, drafts)
                        works.append(work)
                for work in works:
                    noise = self.rng.uniform(0.98, 1.02)
                    yield work, noise * self.ms(int(work.draft_rows), int(work.rows), work.drafting)
        self.candidates = all_requests


@full_where(
    lambda count, context, device: (
        (count, context, device)
        not in {(1, 8_000, "cpu"), (1, 128_000, "gpu"), (8, 32_000, "gpu"), (8, 128_000, "cpu")}
    )
)
@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("context", [8_000, 32_000, 128_000])
@pytest.mark.parametrize("count", [1, 8, 32])
def test_drafter_that_is_never_right_costs_nothing_at_long_contexts(
    count: int, context: int, device: str
):
    """Charging context once a step, whether it drafts or not, reached 0.53 to 0.99 of plain.
    Drafting without evidence cost 1 to 3 % of the first 1,000 steps."""
    simulation = LongContexts(count, context, device)
    assert simulation.rate(1000, lambda position: 0.001) > 0.99 * simulation.plain_rate()
    settled = len(simulation.plans)
    assert simulation.rate(1000, lambda position: 0.001) > 0.995 * simulation.plain_rate()
    assert any(max(plan.max_drafts) for plan in simulation.plans[settled:]), "drafting is tried"


@pytest.mark.parametrize("count", [1, 8, 64])
def test_first_drafts_stake_little_on_an_unknown_drafter(count: int):
    """At most as many requests draft as blocks were seen before, or an eighth."""
    simulation = Simulation(count, GPU, informative=False)
    blocks = 0
    for _ in range(20):
        simulation.step(lambda position: 0.95)
        drafting = sum([n > 0 for n in simulation.plans[-1].max_drafts])
        assert drafting <= max(blocks, count // 8, 1)
        blocks += drafting
    assert drafting == count, "a drafter that is right is used by all within few steps"


def test_drafts_that_are_right_again_are_soon_tried_again():
    """What a try brings beyond expectation is credited to its width."""
    exploration = Exploration(2, PolicyConfig())
    exploration.earn(1000.0)
    exploration.spend(1)
    exploration.begin_try(1, [4, 2], expected=0.25)
    exploration.end_try(0, [2, 4], num_right=9)
    exploration.end_try(1, [2], num_right=9)
    assert exploration.credit.tolist() == [2.0, 0.0, 0.0], "those steps were no tries"
    exploration.end_try(1, [2, 4], num_right=3)
    assert exploration.credit[1] == 2.75
    exploration.end_try(1, [2, 4], num_right=3)
    assert exploration.credit[1] == 2.75, "a try counts once"


def test_gain_of_a_failed_try_goes_to_no_later_step():
    exploration = Exploration(2, PolicyConfig())
    exploration.begin_try(1, [0], expected=0.25)
    for _ in range(5):
        exploration.earn(0.0)
    exploration.end_try(1, [0], num_right=7)
    assert exploration.credit[1] == 0.0


@pytest.mark.parametrize("drafted_ms", [1.6, 1.3])
def test_plain_steps_are_tried_where_they_may_be_best(drafted_ms: float):
    """Two drafts of three are right, so that drafting pays below 1.67 plain steps."""
    exploration = Exploration(1, PolicyConfig())
    options = np.array([-1, 0]), np.array([3.0, 5.0]), np.array([1.0, drafted_ms])
    exploration.set_shares(*options)
    exploration.earn(100.0)
    may_be_best = drafted_ms > 1.5
    assert bool(exploration.credit[-1] > 0.1) is may_be_best
    for _ in range(4):
        exploration.confirm(-1, pace=1.0)
    exploration.set_shares(*options)
    exploration.spend(-1)
    exploration.earn(100.0)
    assert exploration.credit[-1] == pytest.approx(0.05 * may_be_best)


@pytest.mark.parametrize("is_right", [True, False])
def test_costs_are_timed_again_only_where_cheap_drafts_would_pay(is_right: bool):
    """Options: none, and two widths, whose steps take twice and three times as long."""
    exploration = Exploration(2, PolicyConfig())
    tokens = np.array([1.0, 2.0, 4.0]) if is_right else np.array([1.0, 1.01, 1.02])
    exploration.set_shares(np.array([-1, 0, 1]), tokens, np.array([1.0, 4.0, 8.0]))
    exploration.earn(100.0)
    expected = [100 * 0.02 * (2 / 1.3 - 1), 100 * 0.02] if is_right else [0.2, 0.05]
    assert exploration.credit[:2] == pytest.approx(expected)


def test_request_that_always_drafts_does_not_rest():
    simulation = Simulation(8, GPU, informative=False)
    stubborn = Request("r", [1], SamplingParams(), seed=0, always_drafts=True)
    simulation.candidates[2] = simulation.candidates[2]._replace(request=stubborn)
    simulation.rate(300, lambda position: 0.01)
    assert {plan.max_drafts[2] for plan in simulation.plans} == {15}
    assert {plan.num_verified for plan in simulation.plans} == {None}
    others = [plan for plan in simulation.plans[200:] if sum(plan.max_drafts) > 15]
    assert len(others) < 20


def test_request_that_always_drafts_keeps_its_chain_or_block():
    stubborn = Request("r", [1], SamplingParams(), seed=0, always_drafts=True)
    block = Candidate(stubborn, 15)
    chain = block._replace(max_drafts=9, on_device=False, chain=DraftChain((5,) * 9, 4))
    both = block._replace(chain=DraftChain((5,) * 3, 4))
    none = block._replace(max_drafts=0, on_device=False)
    candidates = [block, chain, both, both, none]
    plan = DraftPlan([0, 2, 0, 1, 0], 0, (), [False, True, False, True, False])
    required = DraftPlan([15, 9, 15, 3, 0], None, (), [False, True, False, True, False])
    assert with_required_drafts(plan, candidates) == required


@pytest.mark.parametrize("count", [8, 64])
def test_drafting_pauses_for_bad_drafts_and_resumes(count: int):
    simulation = Simulation(count, CPU, informative=False)
    for chance in (0.97, 0.02, 0.97):
        simulation.rate(200, lambda position, chance=chance: chance)
        rate = simulation.rate(200, lambda position, chance=chance: chance)
        assert rate > 0.95 * simulation.best_fixed_rate(chance)


@pytest.mark.parametrize("count", [1, 3])
def test_requests_draft_only_while_they_are_easy(count: int):
    simulation = Simulation(count, CPU)
    easy, hard = 0.995, 0.02

    def run(num_requests: int) -> float:
        """Return the tokens per millisecond of requests that begin easy and end hard."""
        ms = tokens = 0.0
        for number in range(num_requests):
            request = Request(f"{number}", [1], SamplingParams(), seed=number)
            simulation.candidates = [c._replace(request=request) for c in simulation.candidates]
            for steps, chance in ((8, easy), (50, hard)):
                simulation.rate(steps, lambda position, chance=chance: chance)
                ms, tokens = ms + simulation.total_ms, tokens + simulation.total_tokens
        return tokens / ms

    run(20)
    start = len(simulation.plans)
    rate = run(20)
    whole = (8 * simulation.fixed_rate(15, easy) + 50 * simulation.fixed_rate(15, hard)) / 58
    assert rate > 1.1 * max(simulation.plain_rate(), whole)
    drafting = [max(plan.max_drafts) > 0 for plan in simulation.plans[start:]]
    first = [drafting[58 * i + j] for i in range(20) for j in range(8)]
    last = [drafting[58 * i + j] for i in range(20) for j in range(20, 58)]
    assert sum(first) > 0.9 * len(first)
    assert sum(last) < 0.3 * len(last)


def test_few_drafting_requests_do_not_slow_many_plain_ones():
    simulation = Simulation(64, GPU)
    for i in range(4, 64):
        plain = simulation.candidates[i]._replace(max_drafts=0, on_device=False)
        simulation.candidates[i] = plain
    simulation.rate(200, lambda position: 0.4)
    assert simulation.rate(200, lambda position: 0.4) > 0.98 * simulation.plain_rate()


def test_slower_machine_changes_no_choice():
    simulation = Simulation(32, CPU, informative=False, slowdown=3.0)
    simulation.rate(300, lambda position: 0.7)
    rate = simulation.rate(300, lambda position: 0.7)
    assert rate > 0.95 * simulation.best_fixed_rate(0.7)


@pytest.mark.parametrize("factor", [1.7, 3.0, 10.0])
def test_drafts_timed_at_a_noisy_start_are_timed_again(factor: float):
    """Every step with drafts seems to cost more than it does, so that drafting never pays."""
    simulation = Simulation(1, CPU, informative=False)
    noisy = {rows: factor * ms for rows, ms in {4: 0.8, 16: 0.9, 512: 3.0, 4096: 20.0}.items()}
    verify = {n: (factor if n > 1 else 1.0) * (5.0 + (n - 1) / 5.11) for n in (1, 4, 8, 16, 512)}
    simulation.policy.costs = StepCosts(noisy, verify)
    simulation.rate(300, lambda position: 0.95)
    rate = simulation.rate(200, lambda position: 0.95)
    assert rate > 0.95 * simulation.best_fixed_rate(0.95)


def test_drafting_is_timed_again_once_the_machine_has_changed():
    """Another program slows all steps, and those with drafts most; then it ends."""
    simulation = Simulation(1, CPU, informative=False)
    usual = simulation.true_costs
    busy = {4: 60.0, 8: 90.0, 16: 120.0, 4096: 9000.0}, {1: 15.0, 4: 90.0, 16: 200.0, 512: 3000.0}
    simulation.true_costs, simulation.policy.costs = [StepCosts(*busy) for _ in range(2)]
    simulation.rate(600, lambda position: 0.95)
    assert sum(max(plan.max_drafts) > 0 for plan in simulation.plans[-300:]) < 10
    simulation.true_costs = usual
    simulation.rate(300, lambda position: 0.95)
    rate = simulation.rate(200, lambda position: 0.95)
    assert rate > 0.95 * simulation.best_fixed_rate(0.95)


def test_whole_block_graph_runs_when_best():
    simulation = Simulation(1, GPU, informative=False)
    simulation.rate(300, lambda position: 0.97)
    whole_blocks = sum(plan == DraftPlan([15]) for plan in simulation.plans[64:])
    assert whole_blocks > 0.95 * (300 - 64)


@pytest.mark.parametrize(("count", "choices"), [(1, 12), (3, 4), (64, 2)])
def test_few_drafting_requests_are_decided_on_more_often(
    count: int, choices: int, monkeypatch: pytest.MonkeyPatch
):
    simulation, calls = Simulation(count, GPU, informative=False), list[int]()
    policy = simulation.policy
    simulation.rate(120, lambda position: 0.97)
    choose = policy._choose
    policy.config = replace(policy.config, explore_share=0.0)
    monkeypatch.setattr(policy, "_choose", lambda *args: calls.append(count) or choose(*args))
    simulation.rate(12, lambda position: 0.97)
    assert len(calls) == choices


def test_without_costs_every_request_drafts_its_maximum():
    simulation = Simulation(3, GPU)
    simulation.policy.costs = None
    candidates = [
        candidate._replace(max_drafts=n)
        for candidate, n in zip(simulation.candidates, (15, 2, 0), strict=True)
    ]
    plan = simulation.policy.plan(candidates, BatchLoad())
    assert plan == DraftPlan([15, 2, 0])
    simulation.rate(100, lambda position: 0.01)
    assert set(map(str, simulation.plans)) == {str(DraftPlan([15] * 3))}


def test_request_limits_hold_and_chains_share_rows():
    simulation = Simulation(4, CPU, informative=False)
    simulation.rate(100, lambda position: 0.9)
    first = simulation.candidates[0]
    mixed = [
        first,
        first._replace(max_drafts=2),
        first._replace(max_drafts=9, on_device=False, chain=DraftChain((5,) * 9, 4)),
        first._replace(max_drafts=0, on_device=False),
    ]
    for _ in range(50):
        plan = simulation.policy.plan(mixed, BatchLoad(300))
        assert plan.max_drafts[0] <= 15
        assert plan.max_drafts[1] <= 2
        assert 0 < plan.max_drafts[2] <= 9
        assert plan.max_drafts[3] == 0
        assert plan.num_verified is None or plan.num_verified < sum(plan.max_drafts[:2])
        assert plan.use_chain == [False, False, True, False]


@pytest.mark.parametrize("count", [8, 64, 300])
def test_drafts_get_the_rows_left_by_prompts(count: int):
    """Prompts in turn get at least half of the 512 rows."""
    simulation = Simulation(count, GPU, informative=False)
    simulation.rate(100, lambda position: 0.99)
    for load_rows, prompt_rows in ((0, 0), (100, 100), (9000, max(512 - count, 256))):
        plan = simulation.policy.plan(simulation.candidates, BatchLoad(load_rows))
        num_drafts = sum(plan.max_drafts)
        num_verified = num_drafts if plan.num_verified is None else plan.num_verified
        if prompt_rows:
            assert num_verified <= max(512 - count - prompt_rows, 0)
        elif count < 300:  # with 300 requests, whole blocks hardly pay
            assert num_verified > 0
    if count == 8:
        plan = simulation.policy.plan(simulation.candidates, BatchLoad(100))
        assert sum(plan.max_drafts) == 8 * 15, "there is room for all"


@full_where(lambda count, verify: (count == 256) is (verify is GPU))
@pytest.mark.parametrize("verify", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("count", [1, pytest.param(8, marks=pytest.mark.full), 256])
def test_exploration_costs_less_than_one_percent(count: int, verify: dict[int, float]):
    simulation = Simulation(count, verify, informative=False)
    simulation.rate(500, lambda position: 0.001)
    assert simulation.rate(1000, lambda position: 0.001) > 0.99 * simulation.plain_rate()
    assert any(max(plan.max_drafts) for plan in simulation.plans[500:]), "drafting is tried"


@pytest.mark.parametrize("buckets", [None, Buckets(64, 15, 16)])
@pytest.mark.parametrize(
    ("count", "drafting", "max_drafts"),
    [(1, 1, 3), (2, 2, 15), (7, 7, 7), (64, 64, 15), (7, 2, 15), (64, 1, 3), (64, 48, 15)],
)
def test_last_step_size_verifies_all_drafts(
    count: int, drafting: int, max_drafts: int, buckets: Buckets | None
):
    sizes = verified_rows(buckets, count, drafting, max_drafts)
    assert sizes[-1][0] == drafting * max_drafts
    assert sizes == sorted(sizes)
    for drafts, rows in sizes:
        assert 0 < drafts <= drafting * max_drafts
        spans = [
            Span(i, 5, 5, (TAIL,), n, "dflash" if n else None, 1 + n)
            for i, n in enumerate([max_drafts] * drafting + [0] * (count - drafting))
        ]
        if buckets is not None:
            every = drafts == drafting * max_drafts
            assert buckets.shape_of(spans, None if every else drafts).rows == rows
        else:
            assert rows == count + drafts
