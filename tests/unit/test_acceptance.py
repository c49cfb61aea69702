"""How likely drafts are to count: tables of evidence, and forecasts of requests' next blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from strobe.speculation.acceptance import (
    KNOTS,
    AcceptanceForecast,
    DraftChances,
    evidence,
    monotone,
)
from strobe.speculation.policy_config import PolicyConfig
from strobe.tools.bench.load import TRACES
from strobe.tools.bench.traces import load

CONFIG = PolicyConfig()
FIRST = CONFIG.first_rate ** np.arange(1, 3)


def table(*widths: int) -> DraftChances:
    return DraftChances(widths, CONFIG.first_rate, CONFIG.table_prior)


def blocks(rng: np.random.Generator, n: int, rate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Evidence of n blocks, 1 or 4 throughout, and drafts in a row that were right: each with
    rate[0] or rate[1]."""
    sure = rng.integers(0, 2, n)
    right = rng.random((n, 3)) < rate[sure][:, None]
    accepted = np.where(right.all(1), 3, right.argmin(1))
    return np.where(sure, 4.0, 1.0)[:, None].repeat(3, 1), accepted


def learned(rate: list[float], n: int = 2000, seed: int = 0) -> DraftChances:
    found, rng = table(3), np.random.default_rng(seed)
    for _ in range(n // 16):
        shown, accepted = blocks(rng, 16, np.array(rate))
        found.observe(0, shown, np.full(16, 3), accepted)
    return found


def test_evidence_combines_a_draft_and_its_block():
    found = evidence(np.array([[1.0, 3.0, 99.0], [4.0, 0.0, 2.0]]), np.array([2, 3]))
    assert found[0, :2] == pytest.approx([8**0.125, 24**0.125])
    assert found[1] == pytest.approx([32**0.125, 0.0, 16**0.125])


@pytest.mark.parametrize("seed", range(5))
def test_monotone_minimizes_squared_error(seed: int):
    rng = np.random.default_rng(seed)
    seen = rng.integers(1, 9, 4).astype(float)
    right = seen * rng.integers(0, 5, 4) / 4
    found, grid = monotone(right, seen), np.linspace(0, 1, 21)
    assert (np.diff(found) >= 0).all()
    loss = (seen * (found - right / seen) ** 2).sum()
    for rates in itertools.combinations_with_replacement(grid, 4):
        assert loss <= (seen * (np.array(rates) - right / seen) ** 2).sum() + 1e-9


def test_table_separates_easy_from_hard_drafts():
    found = learned([0.3, 0.9])
    chances = found.chances(0, np.array([[1.0] * 3, [4.0] * 3]))
    assert chances[0] == pytest.approx([0.3, 0.09, 0.027], abs=0.05)
    assert chances[1] == pytest.approx([0.9, 0.81, 0.729], abs=0.05)


def test_chances_are_calibrated_on_recorded_blocks():
    """Online, each block valued before it is seen: in all, and of the blocks that promise most."""
    traces, width = load(TRACES), 15
    chances, said, right, place = table(width), list[float](), list[int](), 0
    while place < len(traces.right):
        margins = traces.margins[-1][place : place + 1].astype(float)
        found, accepted = evidence(margins, np.array([width])), int(traces.right[place, -1])
        said.append(float(chances.chances(0, found).sum()))
        right.append(accepted)
        chances.observe(0, found, np.array([width]), np.array([accepted]))
        place += 1 + accepted
    told, true = np.array(said[64:]), np.array(right[64:])
    assert told.sum() == pytest.approx(true.sum(), rel=0.06)
    for low, high in ((0.5, 0.8), (0.8, 0.9), (0.9, 1.0)):
        among = (told >= np.quantile(told, low)) & (told <= np.quantile(told, high))
        assert told[among].mean() == pytest.approx(true[among].mean(), rel=0.2)


def test_unreached_position_follows_the_others():
    found, rng = table(3), np.random.default_rng(1)
    shown, accepted = blocks(rng, 400, np.array([0.2, 0.8]))
    found.observe(0, shown, np.full(400, 1), np.minimum(accepted, 1))
    assert found.counts[1].sum(2)[0].tolist() == [400, 0, 0]
    np.testing.assert_allclose(found.table(0)[1:], found.table(0)[:1].repeat(2, 0), atol=0.05)


def test_unused_width_follows_the_others():
    found, rng = table(3, 7), np.random.default_rng(1)
    shown, accepted = blocks(rng, 400, np.array([0.0, 0.0]))
    found.observe(0, shown, np.full(400, 3), accepted)
    assert found.chances(1, np.full((1, 7), 2.0))[0, 0] < 0.1


def test_only_verified_drafts_up_to_a_wrong_one_count():
    found = table(4)
    found.observe(0, np.ones((3, 4)), np.array([4, 2, 0]), np.array([1, 2, 0]))
    right, seen = found.counts[:, 0].sum(2).tolist()
    assert right == [2, 1, 0, 0]
    assert seen == [2, 2, 0, 0]


def test_fadedcounts_follow_a_text_that_gets_harder():
    found, rng, chances = table(3), np.random.default_rng(3), list[float]()
    for rate in (0.9, 0.1):
        for _ in range(400):
            shown, accepted = blocks(rng, 8, np.array([rate, rate]))
            found.fade(8 / 500)
            found.observe(0, shown, np.full(8, 3), accepted)
        chances.append(found.chances(0, np.full((1, 3), 3.0))[0, 0])
    assert chances[0] > 0.87
    assert chances[1] < 0.15


@pytest.mark.parametrize("right", [0, 3])
def test_constant_verdicts_are_expected_again(right: int):
    found = table(3)
    for _ in range(20):
        found.observe(0, np.full((16, 3), 2.0), np.full(16, 3), np.full(16, right))
    chance = found.chances(0, np.full((1, 3), 2.0))[0, 0]
    assert chance > 0.97 if right else chance < 0.03
    assert found.table(0).shape == (3, KNOTS)


def forecast(slots: int) -> AcceptanceForecast:
    return AcceptanceForecast(slots, 2, CONFIG)


def step(one: AcceptanceForecast, slots: list[int], chances: list[list[float]]) -> None:
    """The blocks of a step."""
    one.step += 1
    if slots:
        one.observe(np.array(slots), np.array(chances))


def test_new_request_starts_at_first_blocks_of_others():
    one = forecast(2)
    assert one.expected(np.array([0, 1])).tolist() == [FIRST.tolist()] * 2
    for _ in range(200):
        one.clear(0)
        step(one, [0], [[0.1, 0.0]])
    one.clear(0)
    assert one.expected(np.array([0]))[0] == pytest.approx([0.1, 0.0], abs=1e-2)
    assert one.expected(np.array([1]))[0] == pytest.approx([0.1, 0.0], abs=1e-2)


def test_easy_running_requests_do_not_raise_the_first_prior():
    one = forecast(9)
    for _ in range(300):
        one.clear(8)
        step(one, list(range(9)), [[0.9, 0.9]] * 8 + [[0.1, 0.0]])
    one.clear(8)
    assert one.expected(np.array([8]))[0, 0] < 0.3
    assert one.expected(np.array([0]))[0, 0] > 0.6


def test_resting_request_returns_to_the_prior():
    one, found = forecast(1), list[float]()
    for _ in range(5):
        step(one, [0], [[0.0, 0.0]])
    prior = float(one.priors[1].sum())
    for _ in range(200):
        step(one, [], [])
        found.append(float(one.expected(np.array([0])).sum()))
    assert found == sorted(found)
    assert found[0] < 0.5 * prior < 0.95 * prior < found[-1]
    step(one, [0], [[0.0, 0.0]])
    assert float(one.expected(np.array([0])).sum()) < 0.6 * prior
    assert float(one.priors[1].sum()) < prior


def test_ranking_does_not_flatter_the_first_requests():
    """Where blocks differ but requests do not, none is expected to bring more than another."""
    count, rng = 64, np.random.default_rng(1)
    one, totals = forecast(count), list[float]()
    for _ in range(60):
        drawn = rng.choice([0.3, 0.7], (count, 1)) * np.array([1.0, 0.9])
        step(one, list(range(count)), drawn.tolist())
        chances, before = one.sample(np.arange(count), spread=1.0)
        assert chances.mean(0) == pytest.approx(one.expected(np.arange(count)).mean(0))
        assert chances - chances.mean(0) == pytest.approx(drawn - drawn.mean(0))
        first = np.argsort(-before.sum(1), kind="stable")[:16]
        totals.append(chances[first].sum(1).mean() / chances.sum(1).mean())
    assert np.mean(totals[10:]) == pytest.approx(1.0, abs=0.06)


def test_sample_without_spread_returns_expectations():
    one = forecast(2)
    step(one, [0, 1], [[0.5, 0.5], [0.9, 0.8]])
    chances, before = one.sample(np.array([0, 1]), spread=0.0)
    assert chances.tolist() == before.tolist() == one.expected(np.array([0, 1])).tolist()
