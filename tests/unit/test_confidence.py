"""The online fit of chances against a batch regression, and what it may learn from."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from strobe.speculation.confidence import FIRST, WINDOW, Confidence, evidence, regress
from strobe.tools.bench.load import TRACES
from strobe.tools.bench.traces import load


def recorded(rng: np.random.Generator, n: int, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Margins of n blocks and how many of their drafts were right, one after another."""
    margins = rng.gamma(1.5, 2.0, (n, len(weights)))
    right = rng.random(margins.shape) < 1 / (1 + np.exp(-margins * weights[:, 0] - weights[:, 1]))
    return margins, right, np.where(right.all(1), len(weights), right.argmin(1))


@pytest.mark.parametrize("seed", range(6))
def test_a_regression_finds_what_a_batch_optimiser_finds(seed: int):
    rng = np.random.default_rng(seed)
    true = np.array([[rng.uniform(0.2, 1.5), rng.uniform(-2, 2)]])
    margins, right, _ = recorded(rng, 200, true)
    there = rng.random(200) < 0.9
    towards, strength = rng.normal(size=(1, 2)), np.array([[rng.uniform(0, 5), 0.5]])

    def loss(w: np.ndarray) -> float:
        z = (w[0] * margins[:, 0] + w[1])[there]
        likelihood = np.where(right[there, 0], -np.logaddexp(0, -z), -np.logaddexp(0, z)).sum()
        return -likelihood + (strength[0] * (w - towards[0]) ** 2).sum() / 2

    wanted = minimize(loss, np.array(FIRST), bounds=[(0, None), (None, None)], tol=1e-10).x
    found = np.array([FIRST])
    for _ in range(80):
        found, _ = regress(margins.T, right.T, there[None], found, towards, strength)
    assert loss(found[0]) <= loss(wanted) + 1e-5
    np.testing.assert_allclose(found[0], wanted, atol=2e-2)


def fitted(true: np.ndarray, n: int, seed: int = 0, step: int = 16) -> Confidence:
    found, rng = Confidence(len(true)), np.random.default_rng(seed)
    for _ in range(n // step):
        margins, _, accepted = recorded(rng, step, true)
        found.observe(margins, np.full(step, len(true)), accepted)
        found.fit()
    return found


def test_the_fit_tells_easy_from_hard_drafts():
    true = np.array([[0.9, -1.0], [0.5, 0.2], [0.2, 1.0], [0.0, 2.0]])
    found = fitted(true, 3000)
    margins = np.array([[m] * 4 for m in (0.1, 1.0, 3.0, 8.0)])
    wanted = np.cumprod(1 / (1 + np.exp(-margins * true[:, 0] - true[:, 1])), 1)
    assert abs(found.chances(margins) - wanted).max() < 0.12
    assert (found.weights[:, 0] >= 0).all()


def test_evidence_is_of_a_draft_and_of_its_block():
    found = evidence(np.array([[1.0, 3.0, 99.0], [4.0, 0.0, 2.0]]), np.array([2, 3]))
    assert found[0, :2].tolist() == [1.5, 2.5]
    assert found[1].tolist() == [3.0, 1.0, 2.0]


def test_on_recorded_blocks_chances_are_what_was_right():
    """Online, each block valued before it is seen: in all, and of the blocks that promise most."""
    traces, width = load(TRACES), 15
    fit, said, right, place = Confidence(width), list[float](), list[int](), 0
    while place < len(traces.right):
        margins = traces.margins[-1][place : place + 1].astype(float)
        found, accepted = evidence(margins, np.array([width])), int(traces.right[place, -1])
        said.append(float(fit.chances(found).sum()))
        right.append(accepted)
        fit.observe(found, np.array([width]), np.array([accepted]))
        if len(said) % 16 == 0:
            fit.fit()
        place += 1 + accepted
    told, true = np.array(said[64:]), np.array(right[64:])
    assert told.sum() == pytest.approx(true.sum(), rel=0.06)
    for low, high in ((0.5, 0.8), (0.8, 0.9), (0.9, 1.0)):
        among = (told >= np.quantile(told, low)) & (told <= np.quantile(told, high))
        assert told[among].mean() == pytest.approx(true[among].mean(), rel=0.2)


def test_a_place_that_was_never_reached_takes_after_the_others():
    found, rng = Confidence(3), np.random.default_rng(1)
    margins, _, accepted = recorded(rng, 200, np.array([[0.8, -2.0]] * 3))
    found.observe(margins, np.full(200, 1), np.minimum(accepted, 1))
    found.fit()
    assert found.seen.tolist() == [200, 0, 0]
    np.testing.assert_allclose(found.weights[1:], found.weights[:1].repeat(2, 0), atol=0.3)


def test_what_lies_behind_a_wrong_draft_or_was_not_verified_tells_nothing():
    found = Confidence(4)
    margins = np.arange(12.0).reshape(3, 4)
    found.observe(margins, np.array([4, 2, 0]), np.array([1, 2, 0]))
    assert found.seen.tolist() == [2, 2, 0, 0]
    assert found._evidence[0, :2].tolist() == [0.0, 4.0]
    assert found._right[0, :2].tolist() == [1, 1]
    assert found._evidence[1, :2].tolist() == [1.0, 5.0]
    assert found._right[1, :2].tolist() == [0, 1]


def test_the_fit_follows_a_text_that_gets_harder():
    found, rng = Confidence(2), np.random.default_rng(3)
    easy, hard = np.array([[0.3, 2.0]] * 2), np.array([[0.3, -2.0]] * 2)
    rates = []
    for true in (easy, hard):
        for _ in range(WINDOW // 8 * 3):
            margins, _, accepted = recorded(rng, 8, true)
            found.observe(margins, np.full(8, 2), accepted)
        found.fit()
        rates.append(found.chances(np.full((1, 2), 3.0))[0, 0])
    assert rates[0] > 0.9
    assert rates[1] < 0.4


def test_more_observations_than_are_kept_leave_the_newest():
    found = Confidence(1)
    more = WINDOW + 44
    found.observe(np.arange(float(more))[:, None], np.ones(more, int), np.zeros(more, int))
    assert sorted(found._evidence[0]) == list(range(44, more))


@pytest.mark.parametrize("right", [0, 1])
def test_drafts_that_are_always_wrong_or_right_leave_finite_weights(right: int):
    found = Confidence(3)
    for _ in range(20):
        found.observe(np.full((16, 3), 2.0), np.full(16, 3), np.full(16, 3 * right))
        found.fit()
    assert np.isfinite(found.weights).all()
    chance = found.chances(np.full((1, 3), 2.0))[0, 0]
    assert chance > 0.97 if right else chance < 0.03


def test_newest_drafts_of_all_requests_lift_chances_however_many_there_are():
    """Of 256 requests the last 64 are hard, and no margin says so."""
    found, nothing = Confidence(3), np.zeros((256, 3))
    accepted = np.where(np.arange(256) < 192, 3, 0)
    for clock in range(256, 20 * 256, 256):
        found.observe(nothing, np.full(256, 3), accepted, clock)
        found.fit(clock, 32 * 256)
        found.lift(clock, 2 * 256)
    assert found.chances(nothing)[0, 0] == pytest.approx(0.75, abs=0.04)
    harder = np.where(np.arange(256) < 64, 3, 0)
    for clock in range(20 * 256, 23 * 256, 256):
        found.observe(nothing, np.full(256, 3), harder, clock)
        found.lift(clock, 2 * 256)
    assert found.chances(nothing)[0, 0] < 0.55
