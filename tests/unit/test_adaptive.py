"""Which number of drafts is chosen, in a world where chances and costs are known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from strobe.request import Request
from strobe.runner.buckets import Buckets, verified_rows
from strobe.sampling_params import SamplingParams
from strobe.speculation.acceptance import extend
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.allocate import most_promising
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftChain, DraftPlan
from strobe.step import TAIL, Plan, Span, StepResult, num_rows

WIDTHS, SLOTS = (3, 7, 15), (4, 8, 16)

# Rows that cost nothing up to 64, as on a GPU; and each as much as the others, as on a CPU.
GPU = {1: 5.0, 64: 5.2, 256: 9.0, 512: 15.0, 4096: 100.0}
CPU = {1: 5.0, 512: 105.0}

APART = 1.5  # in logits: how far easy and hard drafts are from their middle


class Life:
    """Requests without end; each draft is right with a chance that its margin tells, or not."""

    def __init__(
        self,
        count: int,
        verify: dict[int, float],
        *,
        told: bool = True,
        pace: float = 1.0,
        buckets: Buckets | None = None,
    ):
        rows = functools.partial(verified_rows, buckets)
        self.policy = AdaptiveDraftPolicy(WIDTHS, SLOTS, rows, 512, count)
        drafting = {4: 0.8, 16: 0.9, 512: 3.0, 4096: 20.0}
        self.policy.costs, self.true = StepCosts(drafting, verify), StepCosts(drafting, verify)
        self.true.pace, self.told = pace, told
        self.rng = np.random.default_rng(count)
        request = Request("r", [1], SamplingParams(), seed=0)
        self.candidates = [Candidate(request, 15, slot=i) for i in range(count)]
        self.took = self.tokens = 0.0
        self.allotted: list[DraftPlan] = []

    def step(self, chance: Callable[[int], float]) -> None:
        """chance(place) of a draft to be right, in the middle of what the margins tell."""
        count = len(self.candidates)
        found = self.policy.plan(self.candidates, BatchLoad(count, 0, 0))
        self.allotted.append(found)
        most = max(found.max_drafts)
        spans = [
            Span(i, 9, 9, (TAIL,), n, "dflash" if n else None, 1 + n)
            for i, n in enumerate(found.max_drafts)
        ]
        width = next((w for w in WIDTHS if w >= most), 0) if most else 0
        logits = np.array([[np.log(chance(k) / (1 - chance(k))) for k in range(width)]] * count)
        margins = self.rng.uniform(0, 5, logits.shape)
        if self.told:
            logits = logits + self.rng.choice([-APART, APART], (count, 1))
            margins = np.clip(logits + 3.0, 0, 40)
        right = self.rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
        verified = self.verified(found, margins)
        run = np.where(right.all(1), width, right.argmin(1)) if width else np.zeros(count, int)
        accepted = np.minimum(run, verified)
        plan = Plan(tuple(spans), (), (), found.num_verified, found.confidence)
        rows = num_rows(spans, found.num_verified)
        drafting = sum(n > 0 for n in found.max_drafts)
        draft = drafting * SLOTS[WIDTHS.index(width)] if width else 0
        ms = float(self.true.ms(StepWork(draft, rows, count)))
        self.took += ms
        self.tokens += count + int(accepted.sum())
        told = margins.tolist() if width else None
        result = StepResult([], accepted.tolist(), rows, ms / 1e3, verified.tolist(), told)
        self.policy.observe(plan, result)

    def verified(self, found: DraftPlan, margins: Any) -> Any:
        most = torch.tensor(found.max_drafts)
        if found.num_verified is None:
            return most.numpy()
        rates = torch.tensor(found.confidence)[: margins.shape[1]]
        return most_promising(torch.from_numpy(margins), rates, most, found.num_verified).numpy()

    def rate(self, steps: int, chance: Callable[[int], float]) -> float:
        """Tokens a millisecond."""
        self.took = self.tokens = 0.0
        for _ in range(steps):
            self.step(chance)
        return self.tokens / self.took


def fixed(life: Life, drafts: int, chance: float) -> float:
    """What a fixed number of drafts, each right with that chance in the middle, would bring."""
    count = len(life.candidates)
    slots = SLOTS[WIDTHS.index(drafts)] if drafts else 0
    middle = np.log(chance / (1 - chance))
    sides = [middle - APART, middle + APART] if life.told else [middle]
    chances = [1 / (1 + np.exp(-side)) for side in sides]
    brought = np.mean([sum(p**k for k in range(drafts + 1)) for p in chances])
    return float(
        count * brought / life.true.ms(StepWork(count * slots, count * (1 + drafts), count))
    )


def best_fixed(life: Life, chance: float) -> float:
    return max(fixed(life, drafts, chance) for drafts in (0, *WIDTHS))


@pytest.mark.parametrize("verify", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("chance", [0.02, 0.5, 0.85, 0.97])
@pytest.mark.parametrize("count", [1, 8, 64])
def test_adaptive_step_matches_best_fixed_number(
    count: int, chance: float, verify: dict[int, float]
):
    life, steps = Life(count, verify, told=False), max(300, 3000 // count)  # for chance itself
    life.rate(steps, lambda place: chance)
    assert life.rate(steps, lambda place: chance) >= 0.96 * best_fixed(life, chance)


@pytest.mark.parametrize("count", [32, 64, 128])
def test_informative_margins_beat_every_fixed_number(count: int):
    life = Life(count, GPU, buckets=Buckets(256, 15, 16))
    life.rate(300, lambda place: 0.8)
    assert life.rate(300, lambda place: 0.8) > 1.05 * best_fixed(life, 0.8)
    assert any(found.num_verified is not None for found in life.allotted[300:])


def test_drafter_that_is_never_right_rests():
    life = Life(64, GPU, told=False)
    plain = 64 / float(life.true.ms(StepWork(0, 64, 64)))
    life.rate(300, lambda place: 0.01)
    assert life.rate(1000, lambda place: 0.01) > 0.99 * plain
    asked = [found for found in life.allotted[300:] if any(found.max_drafts)]
    assert 0 < len(asked) < 40


@pytest.mark.parametrize("count", [8, 64])
def test_drafting_pauses_for_bad_drafts_and_resumes(count: int):
    life = Life(count, CPU, told=False)
    for chance in (0.97, 0.02, 0.97):
        life.rate(200, lambda place, chance=chance: chance)
        best = best_fixed(life, chance)
        assert life.rate(200, lambda place, chance=chance: chance) > 0.95 * best


@pytest.mark.parametrize("count", [1, 3])
def test_requests_draft_only_while_they_are_easy(count: int):
    life = Life(count, CPU, told=True)
    easy, hard = (lambda place: 0.995), (lambda place: 0.02)

    def live(requests: int) -> float:
        took = tokens = 0.0
        for number in range(requests):
            request = Request(f"{number}", [1], SamplingParams(), seed=number)
            life.candidates = [one._replace(request=request) for one in life.candidates]
            for steps, chance in ((8, easy), (50, hard)):
                life.rate(steps, chance)
                took, tokens = took + life.took, tokens + life.tokens
        return tokens / took

    live(20)
    begun = len(life.allotted)
    rate = live(20)
    plain, whole = fixed(life, 0, 0.5), 0.0
    for steps, chance in ((8, 0.995), (50, 0.02)):  # tokens of a request's life
        whole += (
            steps
            * fixed(life, 15, chance)
            * float(life.true.ms(StepWork(count * 16, count * 16, count)))
        )
    whole /= 58 * float(life.true.ms(StepWork(count * 16, count * 16, count)))
    assert rate > 1.1 * max(plain, whole)
    drafting = [max(found.max_drafts) > 0 for found in life.allotted[begun:]]
    first = [drafting[58 * i + j] for i in range(20) for j in range(8)]
    last = [drafting[58 * i + j] for i in range(20) for j in range(20, 58)]
    assert sum(first) > 0.9 * len(first)
    assert sum(last) < 0.3 * len(last)


def test_few_drafting_requests_do_not_slow_many_plain_ones():
    life = Life(64, GPU)
    for i in range(4, 64):
        life.candidates[i] = life.candidates[i]._replace(max_drafts=0, on_device=False)
    for _ in range(200):
        life.step(lambda place: 0.4)
    life.took = life.tokens = 0.0
    for _ in range(200):
        life.step(lambda place: 0.4)
    plain = 64 / float(life.true.ms(StepWork(0, 64, 64)))
    assert life.tokens / life.took > 0.98 * plain


def test_slower_machine_changes_no_choice():
    slow = Life(32, CPU, told=False, pace=3.0)
    slow.rate(300, lambda place: 0.7)
    best = best_fixed(slow, 0.7)
    assert slow.rate(300, lambda place: 0.7) > 0.95 * best


def test_whole_block_graph_runs_when_best():
    life = Life(1, GPU, told=False)
    life.rate(300, lambda place: 0.97)
    assert sum(found == DraftPlan([15]) for found in life.allotted[64:]) > 0.95 * (300 - 64)


@pytest.mark.parametrize(("count", "choices"), [(1, 12), (3, 4), (64, 2)])
def test_few_drafting_requests_are_decided_on_more_often(
    count: int, choices: int, monkeypatch: pytest.MonkeyPatch
):
    life, calls = Life(count, GPU, told=False), list[int]()
    life.rate(120, lambda position: 0.97)
    choose = life.policy._choose
    life.policy.config = replace(life.policy.config, explore_share=0.0)
    monkeypatch.setattr(life.policy, "_choose", lambda *a: calls.append(count) or choose(*a))
    life.rate(12, lambda position: 0.97)
    assert len(calls) == choices


def test_without_costs_every_request_drafts_its_maximum():
    life = Life(3, GPU)
    life.policy.costs = None
    candidates = [
        one._replace(max_drafts=n) for one, n in zip(life.candidates, (15, 2, 0), strict=True)
    ]
    assert life.policy.plan(candidates, BatchLoad(3, 0, 0)) == DraftPlan([15, 2, 0])
    life.rate(100, lambda place: 0.01)
    assert set(map(str, life.allotted)) == {str(DraftPlan([15] * 3))}


def test_request_limits_hold_and_chains_share_rows():
    life = Life(4, CPU, told=False)
    life.rate(100, lambda place: 0.9)
    mixed = [
        life.candidates[0],
        life.candidates[0]._replace(max_drafts=2),
        life.candidates[0]._replace(max_drafts=9, on_device=False, chain=DraftChain((5,) * 9, 4)),
        life.candidates[0]._replace(max_drafts=0, on_device=False),
    ]
    for _ in range(50):
        found = life.policy.plan(mixed, BatchLoad(4, 300, 1))
        assert found.max_drafts[0] <= 15
        assert found.max_drafts[1] <= 2
        assert 0 < found.max_drafts[2] <= 9
        assert found.max_drafts[3] == 0
        assert found.num_verified is None or found.num_verified < sum(found.max_drafts[:2])
        assert found.use_chain == [False, False, True, False]


@pytest.mark.parametrize("count", [8, 64, 300])
def test_drafts_get_the_rows_left_by_prompts(count: int):
    """Of the 512 rows of a step that computes prompts, too, they get at least half."""
    life = Life(count, GPU, told=False)
    life.rate(100, lambda place: 0.99)
    for prompt_rows, prompts in ((0, 0), (100, 100), (9000, max(512 - count, 256))):
        found = life.policy.plan(life.candidates, BatchLoad(count, prompt_rows, 0))
        made = sum(found.max_drafts)
        verified = made if found.num_verified is None else found.num_verified
        if prompts:
            assert verified <= max(512 - count - prompts, 0)
        elif count < 300:  # of so many, whole blocks hardly pay
            assert verified > 0
    if count == 8:
        found = life.policy.plan(life.candidates, BatchLoad(count, 100, 0))
        assert sum(found.max_drafts) == 8 * 15, "there is room for all"


@pytest.mark.parametrize("verify", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("count", [1, 8, 256])
def test_exploration_costs_less_than_one_percent(count: int, verify: dict[int, float]):
    life = Life(count, verify, told=False)
    plain = count / float(life.true.ms(StepWork(0, count, count)))
    life.rate(500, lambda place: 0.001)
    assert life.rate(1000, lambda place: 0.001) > 0.99 * plain
    assert any(max(found.max_drafts) for found in life.allotted[500:]), "it is tried"


def test_extended_chances_keep_their_last_rate():
    found = extend(np.array([[0.8, 0.4], [0.5, 0.5]]), 4)
    assert found.tolist() == [[0.8, 0.4, 0.2, 0.1], [0.5, 0.5, 0.5, 0.5]]
    assert extend(np.array([[0.8, 0.4]]), 1).tolist() == [[0.8]]


@pytest.mark.parametrize("buckets", [None, Buckets(64, 15, 16)])
@pytest.mark.parametrize(
    ("count", "drafting", "most"),
    [(1, 1, 3), (2, 2, 15), (7, 7, 7), (64, 64, 15), (7, 2, 15), (64, 1, 3), (64, 48, 15)],
)
def test_last_step_size_verifies_all_drafts(
    count: int, drafting: int, most: int, buckets: Buckets | None
):
    found: Sequence[tuple[int, int]] = verified_rows(buckets, count, drafting, most)
    assert found[-1][0] == drafting * most
    assert found == sorted(found)
    for drafts, rows in found:
        assert 0 < drafts <= drafting * most
        spans = [
            Span(i, 5, 5, (TAIL,), n, "dflash" if n else None, 1 + n)
            for i, n in enumerate([most] * drafting + [0] * (count - drafting))
        ]
        if buckets is not None:
            every = drafts == drafting * most
            assert buckets.shape_of(spans, None if every else drafts).rows == rows
        else:
            assert rows == count + drafts
