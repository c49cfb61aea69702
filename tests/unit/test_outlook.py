"""What requests' next drafts promise: each one's own blocks, and others' first ones."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.speculation.draft_policy import Candidate
from strobe.speculation.outlook import FEW, LATEST, Outlook

FIRST = np.array([0.8, 0.4])


def candidates(count: int, first: int = 0) -> list[Candidate]:
    return [
        Candidate(Request(f"{first + i}", [1], SamplingParams(), seed=0), 2, slot=i)
        for i in range(count)
    ]


def outlook(count: int) -> Outlook:
    made = Outlook(count, FIRST)
    made.meet(candidates(count))
    return made


def step(one: Outlook, slots: list[int], chances: list[list[float]]) -> None:
    """The blocks of a step."""
    one.steps += 1
    if slots:
        one.take(np.array(slots), np.array(chances))


def test_a_new_request_promises_what_first_blocks_of_others_brought():
    one = outlook(2)
    assert one.of(np.array([0, 1]), np.full(len([0, 1]), 2))[1].tolist() == [FIRST.tolist()] * 2
    for _ in range(200):
        same = candidates(1)
        assert one.meet(same)
        assert not one.meet(same)
        step(one, [0], [[0.1, 0.0]])
    one.meet(candidates(1))
    assert one.of(np.array([0]), np.full(len([0]), 2))[1][0] == pytest.approx([0.1, 0.0], abs=1e-3)


def test_requests_that_have_ended_are_let_go():
    one, (candidate,) = Outlook(1, FIRST), candidates(1)
    one.meet([candidate])
    ended = weakref.ref(candidate.request)
    del candidate
    gc.collect()
    assert ended() is None
    assert one.meet(candidates(1))


def test_the_most_promising_come_first():
    one = outlook(3)
    for _ in range(30):
        step(one, [0, 1, 2], [[0.2, 0.1], [0.9, 0.8], [0.5, 0.4]])
    order, chances = one.of(np.array([0, 1, 2]), np.full(len([0, 1, 2]), 2))
    assert order.tolist() == [1, 2, 0]
    assert chances.sum(1).tolist() == sorted(chances.sum(1), reverse=True)
    assert one.of(np.array([2, 0]), np.full(len([2, 0]), 2))[0].tolist() == [0, 1]


def test_a_request_that_rests_promises_ever_more_what_others_brought_after_a_rest():
    one = outlook(1)
    for _ in range(50):
        step(one, [0], [[0.0, 0.0]])
    found = []
    for _ in range(200):
        step(one, [], [])
        found.append(float(one.of(np.array([0]), np.full(len([0]), 2))[1].sum()))
    assert found == sorted(found)
    assert found[0] < 0.3 < 0.7 * float(one.rested.sum()) < found[-1]
    step(one, [0], [[0.0, 0.0]])
    assert float(one.of(np.array([0]), np.full(len([0]), 2))[1].sum()) < 0.1
    assert float(one.rested.sum()) < 0.9 * found[-1]


def test_how_often_requests_turn_is_learned():
    def after(turning: int) -> float:
        one, rng = outlook(8), np.random.default_rng(0)
        for _ in range(400):
            easy = rng.random(8) < 1 / turning
            step(one, list(range(8)), np.where(easy[:, None], FIRST, 0.0).tolist())
        return one.turns

    assert after(2) > after(8) > 0.05 > after(10**9)


def test_of_many_requests_the_first_are_no_better_than_they_turned_out_to_be():
    """Where blocks differ but requests do not, none promises more than another."""
    count, rng = 4 * FEW, np.random.default_rng(1)
    one, totals = outlook(count), []
    for _ in range(60):
        blocks = rng.choice([0.1, 0.9], (count, 1)) * np.array([1.0, 0.9])
        step(one, list(range(count)), blocks.tolist())
        chances = one.of(np.arange(count), np.full(count, 2))[1]
        assert sorted(chances.sum(1)) == pytest.approx(sorted(blocks.sum(1)))
        totals.append(chances[:FEW].sum(1).mean() / chances.sum(1).mean())
    assert np.mean(totals[10:]) == pytest.approx(1.0, abs=0.06)


def test_drafts_beyond_a_requests_own_limit_promise_nothing():
    one = outlook(2)
    order, chances = one.of(np.array([0, 1]), np.array([1, 2]))
    assert order.tolist() == [1, 0]
    assert chances.tolist() == [FIRST.tolist(), [FIRST[0], 0.0]]


def test_of_few_requests_the_mean_of_their_blocks_counts():
    one = outlook(2)
    step(one, [0], [[0.5, 0.5]])
    step(one, [0], [[1.0, 0.5]])
    one.turns = 0.0
    assert one.of(np.array([0]), np.full(len([0]), 2))[1][0].tolist() == [0.5 + LATEST * 0.5, 0.5]
