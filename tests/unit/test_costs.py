"""What steps cost: a table by rows, followed while steps take more or less than it says."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from strobe.speculation.costs import Costs, Work

DRAFT, VERIFY = {4: 1.0, 16: 1.6}, {1: 4.0, 16: 5.0, 64: 8.0}


def ms(costs: Costs, draft: Any, rows: Any, **more: int) -> Any:
    return costs.ms(Work(draft, rows, **more))


def test_costs_lie_on_lines_between_what_was_measured():
    costs = Costs(DRAFT, VERIFY)
    assert ms(costs, 0, 1) == 4.0
    assert ms(costs, 4, 1) == 5.0
    assert ms(costs, 10, 40) == pytest.approx(1.3 + 6.5)
    assert ms(costs, 28, 112) == pytest.approx(2.2 + 11.0), "the last line goes on"
    assert ms(costs, 0, 10, beside=30) == ms(costs, 0, 40)
    assert ms(costs, np.array([0, 4]), np.array([1, 16])).tolist() == [4.0, 6.0]


def test_requests_and_what_they_read_cost_beside_their_rows():
    costs = Costs(DRAFT, VERIFY, request=0.5, context=0.001, context_row=0.0001)
    assert ms(costs, 0, 1) == 4.5
    assert ms(costs, 0, 16, requests=4) == 5.0 + 2.0
    assert ms(costs, 0, 1, context=2000) == pytest.approx(4.5 + 2.0)
    # 15 further rows of the one request read 2000 positions each.
    assert ms(costs, 0, 16, context=2000) == pytest.approx(5.5 + 2.0 + 3.0)
    # Of 4 requests, who have 500 positions each, 3 further rows.
    assert ms(costs, 0, 16, requests=4, context=2000) == pytest.approx(7.0 + 2.0 + 0.6)


def test_more_rows_never_cost_less():
    costs = Costs({4: 2.0, 8: 1.5}, {1: 4.0, 8: 3.0, 16: 5.0})
    assert ms(costs, 0, 8) == 4.0
    assert ms(costs, 8, 1) == 6.0
    for _ in range(200):
        costs.observe(Work(0, 8), 1.0)
    assert ms(costs, 0, 1) <= ms(costs, 0, 8) <= ms(costs, 0, 16)


def test_a_machine_that_slows_down_is_followed_at_every_number_of_rows():
    costs, rng = Costs(DRAFT, VERIFY), random.Random(1)
    for _ in range(60):
        costs.observe(Work(4, 16), 6.0 * 1.5 * rng.uniform(0.9, 1.1))
    assert costs.pace == pytest.approx(1.5, rel=0.1)
    assert ms(costs, 4, 16) == pytest.approx(9.0, rel=0.1)
    assert ms(costs, 0, 1) == pytest.approx(6.0, rel=0.12)


def test_a_wrong_point_is_found_while_others_are_right():
    costs = Costs(DRAFT, VERIFY)
    for _ in range(600):
        costs.observe(Work(0, 1), 4.0)
        costs.observe(Work(4, 16), 7.0)
    assert ms(costs, 0, 1) == pytest.approx(4.0, rel=0.1)
    assert ms(costs, 4, 16) == pytest.approx(7.0, rel=0.1)


def test_steps_of_more_rows_than_were_measured_are_followed():
    costs = Costs(DRAFT, VERIFY)
    true = 1.45 * ms(costs, 0, 256)
    for _ in range(60):
        costs.observe(Work(0, 256), true, steps=16)
    assert ms(costs, 0, 256) == pytest.approx(true, rel=0.02)
    assert 0.5 < costs.pace < 2


def test_a_pause_in_one_step_says_little():
    costs = Costs(DRAFT, VERIFY)
    costs.observe(Work(0, 16), 5000.0)
    assert ms(costs, 0, 1) < 4.0 * 1.12


def test_a_table_is_read_as_it_was_written():
    costs = Costs(DRAFT, VERIFY, 0.25, 0.5, 0.125)
    found = costs.as_dict()
    assert [found[name] for name in ("request", "context", "context_row")] == [0.25, 0.5, 0.125]
    curves = [{int(n): ms for n, ms in found[k].items()} for k in ("draft", "verify")]
    again = Costs(curves[0], curves[1], 0.25, 0.5, 0.125)
    for work in (Work(0, 1), Work(4, 7, 2, 30), Work(9, 90, 3, 2, 11)):
        assert again.ms(work) == costs.ms(work)
