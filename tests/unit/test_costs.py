"""Costs of steps: fitted, interpolated, and corrected by the steps that follow."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest

from benchmarks.policy import COSTS
from benchmarks.policy import costs as costs_in
from strobe.speculation.costs import PrefillCosts, StepCosts, StepWork
from strobe.speculation.policy_config import PolicyConfig
from strobe.step import Plan, Span, StepResult
from tests.support.cpu_answers import true_costs

CONFIG = PolicyConfig()
DRAFT, VERIFY = {4: 1.0, 16: 1.6}, {1: 4.0, 16: 5.0, 64: 8.0}


def ms(costs: StepCosts, draft: Any, rows: Any, **more: int) -> Any:
    return costs.ms(StepWork(draft, rows, **more))


def test_costs_are_interpolated_between_measurements():
    costs = StepCosts(DRAFT, VERIFY)
    assert ms(costs, 0, 1) == 4.0
    assert ms(costs, 4, 1) == 5.0
    assert ms(costs, 10, 40) == pytest.approx(1.3 + 6.5)
    assert ms(costs, 28, 112) == pytest.approx(2.2 + 11.0), "the last line goes on"
    assert ms(costs, np.array([0, 4]), np.array([1, 16])).tolist() == [4.0, 6.0]


def test_requests_and_context_add_to_the_cost_of_rows():
    costs = StepCosts(DRAFT, VERIFY, request=0.5, context=0.001)
    assert ms(costs, 0, 1) == 4.5
    assert ms(costs, 0, 16, requests=4) == 5.0 + 2.0
    assert ms(costs, 0, 1, context=2000) == pytest.approx(4.5 + 2.0)


def test_plain_drafting_and_verified_rows_have_rates_over_context():
    rates = {"block_context": 2e-3, "draft_row_context": 1e-4, "verify_row_context": 5e-4}
    costs = StepCosts(DRAFT, VERIFY, context=1e-3, **rates)
    plain = StepWork(draft_rows=0, rows=16, requests=2, context=2000)
    assert costs.ms(plain) == pytest.approx(5.0 + 2.0)
    drafted = plain._replace(draft_rows=4, drafting=1, drafts=3)
    assert costs.ms(drafted) == pytest.approx(5.0 + 1.0 + 2.0 + 2.0 + 0.4 + 1.5)


@pytest.mark.parametrize("measured", [0.0, 2e-3])
def test_rates_over_context_follow_steps(measured: float):
    """measured: the rates at the start; 0 if no context was long enough to time steps in."""
    rng = random.Random(0)
    true = StepCosts(DRAFT, VERIFY, context=1e-3, block_context=2e-3, verify_row_context=5e-4)
    costs = StepCosts(
        DRAFT, VERIFY, context=measured, block_context=measured / 2, verify_row_context=measured / 2
    )
    plain = StepWork(draft_rows=0, rows=1)
    drafted = plain._replace(draft_rows=4, rows=4, drafting=1, drafts=3)
    works = [w._replace(context=n) for n in (2000, 8000, 32_000) for w in (plain, drafted)]
    for _ in range(600):
        work = rng.choice(works)
        costs.observe(work, float(true.ms(work)) * rng.uniform(0.95, 1.05), CONFIG)
    for work in works:
        assert costs.ms(work) == pytest.approx(true.ms(work), rel=0.1)


def test_short_contexts_change_no_rates():
    costs = StepCosts(DRAFT, VERIFY, context=1e-3)
    for _ in range(100):
        costs.observe(StepWork(0, 1, 1, 500), 9.0, CONFIG)
    assert costs.rates == (0, 1e-3, 0, 0, 0)


def test_more_rows_never_cost_less():
    costs = StepCosts({4: 2.0, 8: 1.5}, {1: 4.0, 8: 3.0, 16: 5.0})
    assert ms(costs, 0, 8) == 4.0
    assert ms(costs, 8, 1) == 6.0
    for _ in range(200):
        costs.observe(StepWork(0, 8), 1.0, CONFIG)
    assert ms(costs, 0, 1) <= ms(costs, 0, 8) <= ms(costs, 0, 16)


def test_pace_follows_a_slower_machine_at_all_row_counts():
    costs, rng = StepCosts(DRAFT, VERIFY), random.Random(1)
    for _ in range(60):
        costs.observe(StepWork(4, 16), 6.0 * 1.5 * rng.uniform(0.9, 1.1), CONFIG)
    assert costs.pace == pytest.approx(1.5, rel=0.1)
    assert ms(costs, 4, 16) == pytest.approx(9.0, rel=0.1)
    assert ms(costs, 0, 1) == pytest.approx(6.0, rel=0.12)


def test_single_wrong_point_is_corrected():
    costs = StepCosts(DRAFT, VERIFY)
    for _ in range(600):
        costs.observe(StepWork(0, 1), 4.0, CONFIG)
        costs.observe(StepWork(4, 16), 7.0, CONFIG)
    assert ms(costs, 0, 1) == pytest.approx(4.0, rel=0.1)
    assert ms(costs, 4, 16) == pytest.approx(7.0, rel=0.1)


GPU = costs_in(COSTS)
"""Of Qwen3-8B's shapes on an H200."""
WRONG_FITS = [(1.0, 1.15), (1.0, 0.7), (1.1, 1.0), (0.9, 1.0), (0.9, 1.3)]
"""Milliseconds over fitted ones: of plain steps, and of what drafts add."""


class Steps:
    """Plain steps, and steps in which all requests verify whole blocks, that do not take what their
    fit says; `costs` learns from them, with 3 % of noise."""

    def __init__(self, device: str, plain: float = 1.0, drafts: float = 1.0):
        self.costs = copy.deepcopy(GPU) if device == "gpu" else true_costs("float32")
        self.rng = random.Random(0)
        self.plain = StepWork(draft_rows=0, rows=8, requests=8)
        self.drafted = StepWork(draft_rows=64, rows=64, requests=8, drafting=8, drafts=56)
        fitted, with_drafts = (float(self.costs.ms(work)) for work in (self.plain, self.drafted))
        self.plain_ms = plain * fitted
        self.drafted_ms = self.plain_ms + drafts * (with_drafts - fitted)

    def run(self, steps: int, *, plain_every: int, pace: float = 1.0) -> None:
        """Run steps of which every so manieth is plain. pace: factor by which all take longer."""
        for i in range(1, steps + 1):
            work, ms = (self.drafted, self.drafted_ms) if i % plain_every else self.usual
            self.costs.observe(work, pace * ms * self.rng.uniform(0.97, 1.03), CONFIG)

    @property
    def usual(self) -> tuple[StepWork, float]:
        return self.plain, self.plain_ms

    @property
    def error(self) -> float:
        """The share by which drafting steps seem to take longer, over plain steps, than they do."""
        ratio = float(self.costs.ms(self.drafted) / self.costs.ms(self.plain))
        return ratio / (self.drafted_ms / self.plain_ms) - 1


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(("plain", "drafts"), WRONG_FITS)
def test_few_plain_steps_tell_dear_drafts_from_a_slow_machine(
    plain: float, drafts: float, device: str
):
    """One factor for all steps left an error of 2 to 20 % after five plain steps of 50."""
    steps = Steps(device, plain, drafts)
    steps.run(50, plain_every=10)
    assert abs(steps.error) < 0.05
    steps.run(150, plain_every=10)
    assert abs(steps.error) < 0.02


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("pace", [0.5, 2.0])
@pytest.mark.parametrize(("plain", "drafts"), WRONG_FITS)
def test_change_of_the_machine_forgets_no_costs_of_drafts(
    plain: float, drafts: float, pace: float, device: str
):
    """As when another program ends or starts. Whole errors of single steps, at half the pace,
    halved the costs of drafts."""
    steps = Steps(device, plain, drafts)
    steps.run(205, plain_every=10)
    before = steps.costs.pace
    for _ in range(4):
        steps.run(30, plain_every=10, pace=pace)
        assert abs(steps.error) < 0.05
    assert steps.costs.pace == pytest.approx(pace * before, rel=0.1)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("start", [0, 200])
def test_one_outlier_does_not_change_what_drafts_seem_to_cost(
    start: int, is_plain: bool, device: str
):
    steps = Steps(device)
    steps.run(start, plain_every=10)
    work, ms = steps.usual if is_plain else (steps.drafted, steps.drafted_ms)
    steps.costs.observe(work, 20 * ms, CONFIG)
    assert abs(steps.error) < (0.04 if start else 0.25)
    steps.run(50, plain_every=10)
    assert abs(steps.error) < 0.04


def test_drafts_right_after_a_plain_step_are_cheap_if_far_faster():
    """Noise makes steps longer. After a step that was read late, the next one seems short."""
    for plain_factor, is_cheap in ((1.0, True), (3.0, False)):
        steps = Steps("cpu")
        steps.run(60, plain_every=6)
        steps.costs.observe(steps.plain, plain_factor * steps.plain_ms, CONFIG)
        agrees = steps.costs.observe(steps.drafted, 0.6 * steps.drafted_ms, CONFIG)
        assert not agrees
        assert (steps.error < -0.3) is is_cheap


def test_steps_beyond_the_measured_rows_are_followed():
    costs = StepCosts(DRAFT, VERIFY)
    true = 1.45 * ms(costs, 0, 256)
    for _ in range(300):
        costs.observe(StepWork(0, 256), true, CONFIG)
    assert ms(costs, 0, 256) == pytest.approx(true, rel=0.02)
    assert 0.5 < costs.pace < 2


def test_one_long_pause_changes_little():
    costs = StepCosts(DRAFT, VERIFY)
    costs.observe(StepWork(0, 16), 5000.0, CONFIG)
    assert ms(costs, 0, 1) < 4.0 * 1.12


def test_step_may_be_far_shorter_where_drafts_cost_nothing():
    costs = StepCosts({1: 0.0, 2: 0.0}, {1: 4.0, 64: 4.0})
    for _ in range(40):
        costs.observe(StepWork(4, 16), 0.1, CONFIG)
    assert 0.0 < ms(costs, 4, 16) < 1.0


def test_fit_recovers_rates_over_context():
    true = StepCosts(
        {4: 1.0, 8: 1.2, 16: 1.6}, {1: 4.0, 16: 5.5}, context=1e-4, block_context=2e-4,
        draft_row_context=1e-5, verify_row_context=3e-5,
    )  # fmt: skip
    works = [StepWork(0, n, n, n * context) for n in (1, 4) for context in (9, 2000)]
    for work in list(works):
        for rows in (4, 8, 16):
            for drafts in (1, rows - 1):
                n = work.requests
                work = StepWork(n * rows, n * (1 + drafts), n, work.context, n, n * drafts)
                works.append(work)
    costs = StepCosts.fit([(work, float(true.ms(work))) for work in works], lines=True)
    assert costs is not None
    for context in (2000, 128_000):
        for work in works:
            work = work._replace(context=work.requests * context)
            assert costs.ms(work) == pytest.approx(true.ms(work), rel=0.02)


def test_costs_round_trip_through_as_dict():
    costs = StepCosts(DRAFT, VERIFY, 0.25, 0.5)
    saved = costs.as_dict()
    assert [saved[name] for name in ("request", "context")] == [0.25, 0.5]
    curves = [{int(n): ms for n, ms in saved[k].items()} for k in ("draft", "verify")]
    again = StepCosts(curves[0], curves[1], 0.25, 0.5)
    for work in (StepWork(0, 1), StepWork(4, 7, 2, 30), StepWork(9, 90, 3, 2)):
        assert again.ms(work) == costs.ms(work)


def timed(lines: bool) -> list[tuple[StepWork, float]]:
    """Return steps of 1 to 16 requests with their milliseconds: plain steps, and for three widths
    of the drafter's block steps with some drafts and with all."""
    works = [
        StepWork(n * slots, rows, n, 5 * n)
        for n in (1, 2, 4, 8, 16)
        for slots in (0, 4, 8, 16)
        for rows in ({2 * n, n * slots} if slots else {n})
    ]
    works.append(StepWork(0, 4, 4, 8000))
    bend = (lambda rows: rows) if lines else (lambda rows: rows**1.5)
    return [
        (w, 5 + 0.02 * bend(w.rows) + (w.draft_rows > 0) * (0.8 + 0.01 * w.draft_rows)
         + 0.1 * w.requests + 1e-4 * w.context)
        for w in works
    ]  # fmt: skip


@pytest.mark.parametrize("lines", [False, True])
def test_fit_recovers_costs_of_rows_requests_and_context(lines: bool):
    steps = timed(lines)
    costs = StepCosts.fit(steps, lines=lines)
    assert costs is not None
    for work, expected in steps:
        assert costs.ms(work) == pytest.approx(expected, rel=1e-6)
    assert costs.rates.context == pytest.approx(1e-4)
    if lines:
        assert costs.ms(StepWork(512, 1024, 64, 0)) == pytest.approx(5 + 20.48 + 5.92 + 6.4)


def test_fit_tells_drafting_from_rows_where_steps_alone_cannot():
    """Steps of 1, 16 and 256 requests, which share few row counts: all drafter's rows could cost
    2 ms more and all drafts' rows 2 ms less, and no measured step would take another time."""
    rng = np.random.default_rng(0)

    def true_ms(work: StepWork) -> float:
        drafting = 0.8 + 0.005 * work.draft_rows if work.draft_rows else 0.0
        return max(4.2, 0.024 * work.rows) + drafting + 0.01 * work.requests

    def works(n: int) -> list[StepWork]:
        some = [StepWork(n * slots, n + n // 2 + 1, n) for slots in (4, 8, 16)]
        return [StepWork(0, n, n), *some, *[StepWork(n * k, n * k, n) for k in (4, 8, 16)]]

    measured = [work for n in (1, 16, 256) for work in works(n)]
    steps = [(work, true_ms(work) * rng.uniform(0.99, 1.01)) for work in measured]
    costs = StepCosts.fit([*steps, (StepWork(0, 16, 16, 2**15), 4.4)], lines=False)
    assert costs is not None
    for work in [*measured, *works(2), *works(8), *works(128)]:
        assert costs.ms(work) == pytest.approx(true_ms(work), rel=0.08)
    assert costs.ms(StepWork(1024, 256)) - costs.ms(StepWork(0, 256)) == pytest.approx(5.9, rel=0.1)


def test_fit_minimizes_relative_errors():
    """1 % of a long step is more than the cost of requests in a short one."""
    rng = np.random.default_rng(0)
    noisy = [(work, ms * rng.uniform(0.98, 1.02)) for work, ms in timed(lines=True)]
    costs = StepCosts.fit(noisy, lines=True)
    assert costs is not None
    for work, expected in timed(lines=True):
        assert costs.ms(work) == pytest.approx(expected, rel=0.04)


def test_fit_treats_negative_rates_as_noise():
    cheap = [(work, ms - 0.15 * work.requests) for work, ms in timed(lines=True)]
    costs = StepCosts.fit(cheap, lines=True)
    assert costs is not None
    assert costs.rates.request == 0.0


def test_fit_needs_two_row_counts():
    assert StepCosts.fit([], lines=True) is None
    assert StepCosts.fit([(StepWork(0, 1), 4.0), (StepWork(4, 4), 5.0)], lines=True) is None


def test_observing_corrects_fitted_lines_where_steps_take_longer():
    """Whole blocks, a tenth of the steps, take 10 % longer than fitted; plain steps 10 % less."""
    steps, rng = timed(lines=True), random.Random(0)
    costs = StepCosts.fit(steps, lines=True)
    assert costs is not None
    plain, block = StepWork(0, 1, 1, 5), StepWork(16, 16, 1, 5)
    true = {plain: 0.9 * float(costs.ms(plain)), block: 1.1 * float(costs.ms(block))}
    for _ in range(3000):
        work = block if rng.random() < 0.1 else plain
        costs.observe(work, true[work] * rng.uniform(0.95, 1.05), CONFIG)
    for work, ms_taken in true.items():
        assert costs.ms(work) == pytest.approx(ms_taken, rel=0.04)
    assert 0.7 < costs.pace < 1.4


def prompt_step(costs: PrefillCosts, start: int, rows: int, ms: float, decoding: int = 0) -> None:
    """Let costs observe a step with `rows` rows of one prompt and so many decoding requests."""
    prompt = Span(slot=0, start=start, max_start=start, tokens=(1,) * rows)
    others = [
        Span(slot=1 + i, start=9, max_start=9, tokens=(1,), num_logits=1) for i in range(decoding)
    ]
    costs.observe(
        Plan(spans=(prompt, *others)),
        StepResult(tokens=[], num_accepted=[], rows=rows + decoding, seconds=ms / 1e3),
    )


def test_prompts_cost_by_their_rows_and_the_positions_before_them():
    costs = PrefillCosts()
    assert costs.ms(0, 100) == float("inf"), "nothing is known, so all else is cheaper"
    for start in (0, 1000, 8000):
        for rows in (64, 200, 1000):
            seen = rows * (start + rows / 2)
            prompt_step(costs, start, rows, 5.0 + 0.02 * rows + 1e-6 * seen)
    assert costs.ms(0, 1000) == pytest.approx(20 + 1e-6 * 1000 * 500)
    assert costs.ms(2000, 3000) == pytest.approx(20 + 1e-6 * 1000 * 2500)
    prompt_step(costs, 0, 10, 1e6, decoding=10)
    assert costs.ms(0, 1000) == pytest.approx(20 + 1e-6 * 1000 * 500), "half of it decodes"


def test_prompts_of_one_size_cost_all_the_time_of_their_steps():
    costs = PrefillCosts()
    for ms in (10.0, 11.0, 50.0):
        prompt_step(costs, 0, 100, ms)
    assert costs.ms(0, 200) == pytest.approx(22.0)


def h200_prompt(costs: PrefillCosts, start: int, rows: int, factor: float = 1.0) -> float:
    """Let costs observe a step with rows of one prompt as an H200 takes with Qwen3-8B, times a
    factor; return its milliseconds without the factor."""
    seen = rows * (start + rows / 2)
    ms = max(6.0, 0.027 * rows) + 1.2e-6 * seen
    prompt_step(costs, start, rows, factor * ms)
    return ms


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_few_long_steps_never_makes_rows_free(seed: int):
    noise = random.Random(seed)
    costs = PrefillCosts()
    for _ in range(2):
        first = h200_prompt(costs, 0, 8192, noise.uniform(0.9, 1.1))
        second = h200_prompt(costs, 8192, 7808, noise.uniform(0.9, 1.1))
        h200_prompt(costs, 16000, 64, noise.uniform(1.0, 4.0))
        assert costs.ms(0, 16000) == pytest.approx(first + second, rel=0.25)


def test_step_that_seems_far_too_short_after_a_late_result_does_not_count():
    costs = PrefillCosts()
    h200_prompt(costs, 0, 8192, 2.4)  # kernels are compiled meanwhile
    h200_prompt(costs, 8192, 7808, 0.005)
    h200_prompt(costs, 16000, 64, 3.0)
    for factor in (0.95, 1.05):
        first = h200_prompt(costs, 0, 8192)
        second = h200_prompt(costs, 8192, 7872, factor)
    assert costs.ms(0, 16064) == pytest.approx(first + second, rel=0.25)


def test_long_prompts_weigh_more_than_slow_steps_of_few_rows():
    costs = PrefillCosts()
    for rows in (16, 32, 64, 128, 192, 256, 384, 512):
        h200_prompt(costs, 0, rows, 50.0)
        h200_prompt(costs, 0, rows)
    first = h200_prompt(costs, 0, 8192)
    second = h200_prompt(costs, 8192, 7808)
    assert costs.ms(0, 16000) == pytest.approx(first + second, rel=0.1)


def test_reset_prompt_costs_forget_their_steps():
    costs = PrefillCosts()
    h200_prompt(costs, 0, 8192)
    costs.reset()
    assert costs.ms(0, 16000) == float("inf")
