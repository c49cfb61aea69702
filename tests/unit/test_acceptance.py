"""Chances of drafts: tables by evidence, and forecasts of requests' next blocks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from strobe.kernels.evidence import KNOTS
from strobe.speculation.acceptance import (
    AcceptanceForecast,
    DraftChances,
    knot_weights,
    margin_evidence,
    monotone,
)
from strobe.speculation.policy_config import PolicyConfig
from strobe.tools.bench.draft_traces import load
from strobe.tools.bench.request_load import TRACES

CONFIG = PolicyConfig()
INITIAL = CONFIG.first_rate ** np.arange(1, 3)


def table(*widths: int) -> DraftChances:
    return DraftChances(widths, CONFIG)


def blocks(rng: np.random.Generator, n: int, rate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the evidence of n blocks of 3 drafts, 1 or 4 throughout, and their leading right
    drafts: each draft is right with the chance rate[0] or rate[1]."""
    easy = rng.integers(0, 2, n)
    right = rng.random((n, 3)) < rate[easy][:, None]
    accepted = np.where(right.all(1), 3, right.argmin(1))
    return knot_weights(np.where(easy, 4.0, 1.0)[:, None].repeat(3, 1)), accepted


def learned(rate: list[float], n: int = 2000, seed: int = 0) -> DraftChances:
    result, rng = table(3), np.random.default_rng(seed)
    for _ in range(n // 16):
        block_evidence, accepted = blocks(rng, 16, np.array(rate))
        result.observe(0, block_evidence, np.full(16, 3), accepted)
    return result


def test_evidence_combines_a_draft_and_its_block():
    result = margin_evidence(np.array([[1.0, 3.0, 99.0], [4.0, 0.0, 2.0]]), np.array([2, 3]))
    assert result[0, :2] == pytest.approx([8**0.125, 24**0.125])
    assert result[1] == pytest.approx([32**0.125, 0.0, 16**0.125])


@pytest.mark.parametrize("seed", range(5))
def test_monotone_minimizes_squared_error(seed: int):
    rng = np.random.default_rng(seed)
    seen = rng.integers(1, 9, 4).astype(float)
    right = seen * rng.integers(0, 5, 4) / 4
    result, grid = monotone(np.stack((right, seen))), np.linspace(0, 1, 21)
    assert (np.diff(result) >= 0).all()
    loss = (seen * (result - right / seen) ** 2).sum()
    for rates in itertools.combinations_with_replacement(grid, 4):
        assert loss <= (seen * (np.array(rates) - right / seen) ** 2).sum() + 1e-9


def test_table_separates_easy_from_hard_drafts():
    chances = learned([0.3, 0.9]).chances(0, knot_weights(np.array([[1.0] * 3, [4.0] * 3])))
    assert chances[0] == pytest.approx([0.3, 0.09, 0.027], abs=0.05)
    assert chances[1] == pytest.approx([0.9, 0.81, 0.729], abs=0.05)


def test_chances_are_calibrated_on_recorded_blocks():
    """Blocks are predicted one by one, each before its result is learned; checked over all blocks
    and over the most promising ones."""
    traces, width = load(TRACES), 15
    chances, predictions, results, place = table(width), list[float](), list[int](), 0
    while place < len(traces.right):
        margins = traces.margins[-1][place : place + 1].astype(float)
        block_evidence = knot_weights(margin_evidence(margins, np.array([width])))
        accepted = int(traces.right[place, -1])
        predictions.append(float(chances.chances(0, block_evidence).sum()))
        results.append(accepted)
        chances.observe(0, block_evidence, np.array([width]), np.array([accepted]))
        place += 1 + accepted
    predicted, true = np.array(predictions[64:]), np.array(results[64:])
    assert predicted.sum() == pytest.approx(true.sum(), rel=0.06)
    for low, high in ((0.5, 0.8), (0.8, 0.9), (0.9, 1.0)):
        bounds = np.quantile(predicted, low), np.quantile(predicted, high)
        between = (predicted >= bounds[0]) & (predicted <= bounds[1])
        assert predicted[between].mean() == pytest.approx(true[between].mean(), rel=0.2)


def test_unreached_position_follows_the_others():
    chances, rng = table(3), np.random.default_rng(1)
    block_evidence, accepted = blocks(rng, 400, np.array([0.2, 0.8]))
    chances.observe(0, block_evidence, np.full(400, 1), np.minimum(accepted, 1))
    assert chances.counts[1].sum(2)[0].tolist() == [400, 0, 0]
    rates = chances.table(0)
    np.testing.assert_allclose(rates[1:], rates[:1].repeat(2, 0), atol=0.05)


def test_unused_width_follows_the_others():
    chances, rng = table(3, 7), np.random.default_rng(1)
    block_evidence, accepted = blocks(rng, 400, np.array([0.0, 0.0]))
    chances.observe(0, block_evidence, np.full(400, 3), accepted)
    assert chances.chances(1, knot_weights(np.full((1, 7), 2.0)))[0, 0] < 0.1


def test_only_verified_drafts_up_to_a_wrong_one_count():
    chances = table(4)
    chances.observe(0, knot_weights(np.ones((3, 4))), np.array([4, 2, 0]), np.array([1, 2, 0]))
    right, seen = chances.counts[:, 0].sum(2).tolist()
    assert right == [2, 1, 0, 0]
    assert seen == [2, 2, 0, 0]


def test_faded_counts_follow_a_text_that_gets_harder():
    chances, rng, after = table(3), np.random.default_rng(3), list[float]()
    for rate in (0.9, 0.1):
        for _ in range(400):
            block_evidence, accepted = blocks(rng, 8, np.array([rate, rate]))
            chances.fade(8 / 500)
            chances.observe(0, block_evidence, np.full(8, 3), accepted)
        after.append(chances.chances(0, knot_weights(np.full((1, 3), 3.0)))[0, 0])
    assert after[0] > 0.87
    assert after[1] < 0.15


@pytest.mark.parametrize("right", [0, 3])
def test_constant_verdicts_are_expected_again(right: int):
    chances = table(3)
    for _ in range(20):
        block_evidence = knot_weights(np.full((16, 3), 2.0))
        chances.observe(0, block_evidence, np.full(16, 3), np.full(16, right))
    chance = chances.chances(0, knot_weights(np.full((1, 3), 2.0)))[0, 0]
    assert chance > 0.97 if right else chance < 0.03
    assert chances.table(0).shape == (3, KNOTS)


def test_logistic_fits_meet_the_rates_at_evidence_1_and_3():
    chances = learned([0.3, 0.9])
    for (drafts, k, slope, intercept), rates in zip(
        chances.logistic_fits(), chances.table(0), strict=True
    ):
        assert drafts == 3
        assert slope > 0
        for at in (1, 3):
            assert 1 / (1 + np.exp(-slope * at - intercept)) == pytest.approx(rates[2 * at]), k


def forecast(slots: int) -> AcceptanceForecast:
    return AcceptanceForecast(slots, 2, CONFIG)


def step(expectations: AcceptanceForecast, slots: list[int], chances: list[list[float]]) -> None:
    """Observe the blocks of a step."""
    expectations.advance()
    if slots:
        expectations.observe(np.array(slots), np.array(chances))


def test_new_request_starts_at_first_blocks_of_others():
    expectations = forecast(2)
    assert expectations.expected(np.array([0, 1])).tolist() == [INITIAL.tolist()] * 2
    for _ in range(200):
        expectations.clear(0)
        step(expectations, [0], [[0.1, 0.0]])
    expectations.clear(0)
    assert expectations.expected(np.array([0]))[0] == pytest.approx([0.1, 0.0], abs=1e-2)
    assert expectations.expected(np.array([1]))[0] == pytest.approx([0.1, 0.0], abs=1e-2)


def test_easy_running_requests_do_not_raise_the_first_prior():
    expectations = forecast(9)
    for _ in range(300):
        expectations.clear(8)
        step(expectations, list(range(9)), [[0.9, 0.9]] * 8 + [[0.1, 0.0]])
    expectations.clear(8)
    assert expectations.expected(np.array([8]))[0, 0] < 0.3
    assert expectations.expected(np.array([0]))[0, 0] > 0.6


def test_resting_request_returns_to_the_prior():
    expectations, sums = forecast(1), list[float]()
    for _ in range(5):
        step(expectations, [0], [[0.0, 0.0]])
    prior = float(expectations.priors[1].sum())
    for _ in range(200):
        step(expectations, [], [])
        sums.append(float(expectations.expected(np.array([0])).sum()))
    assert sums == sorted(sums)
    assert sums[0] < 0.5 * prior < 0.95 * prior < sums[-1]
    step(expectations, [0], [[0.0, 0.0]])
    assert float(expectations.expected(np.array([0])).sum()) < 0.6 * prior
    assert float(expectations.priors[1].sum()) < prior


def test_narrow_block_scales_the_expectation_of_later_positions():
    trusting = replace(CONFIG, own_weight=1.0, max_own_weight=1.0)
    expectations, rate = AcceptanceForecast(1, 4, trusting), CONFIG.first_rate
    step(expectations, [0], [[0.4, 0.2]])
    block = [0.4, 0.2, 0.2 * rate, 0.2 * rate**2]
    assert expectations.expected(np.array([0]))[0] == pytest.approx(block)


def test_possible_blocks_average_to_the_expectation():
    expectations = forecast(2)
    step(expectations, [0, 1], [[0.5, 0.5], [0.9, 0.8]])
    slots = np.array([0, 1])
    samples = expectations.sample(slots, expectations.expected(slots))
    assert samples.mean(1) == pytest.approx(expectations.expected(slots))
    assert (samples >= 0).all()
    assert (samples <= 1).all()


def test_possible_blocks_differ_more_among_many_requests():
    few, many = forecast(2), forecast(200)
    few.config = many.config = replace(CONFIG, spread=2.0)
    for expectations, count, share in ((few, 2, 0.5), (many, 200, 200 / 202)):
        slots = np.arange(count)
        step(expectations, slots.tolist(), [[0.7, 0.6]] * count)
        samples = expectations.sample(slots, expectations.expected(slots))
        difference = share * (np.array([0.7, 0.6]) - INITIAL)
        assert samples[:, 0] - expectations.expected(slots) == pytest.approx(
            np.tile(difference, (count, 1))
        )
