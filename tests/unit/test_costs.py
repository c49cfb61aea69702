"""What steps cost: a table by rows, followed while steps take more or less than it says."""

from __future__ import annotations

import random

import pytest

from strobe.spec.costs import Costs

DRAFT, VERIFY = {4: 1.0, 16: 1.6}, {1: 4.0, 16: 5.0, 64: 8.0}


def test_costs_lie_on_lines_between_what_was_measured():
    costs = Costs(DRAFT, VERIFY, context=0.001)
    assert costs.ms(0, 1) == 4.0
    assert costs.ms(4, 1) == 5.0
    assert costs.ms(10, 40) == pytest.approx(1.3 + 6.5)
    assert costs.ms(28, 112) == pytest.approx(2.2 + 11.0), "the last line goes on"
    assert costs.ms(0, 1, context=2000) == pytest.approx(6.0)
    assert costs.ms([0, 4], [1, 16]).tolist() == [4.0, 6.0]


def test_more_rows_never_cost_less():
    costs = Costs({4: 2.0, 8: 1.5}, {1: 4.0, 8: 3.0, 16: 5.0})
    assert costs.ms(0, 8) == 4.0
    assert costs.ms(8, 1) == 6.0
    for _ in range(200):
        costs.observe(0, 8, 0, 1.0)
    assert costs.ms(0, 1) <= costs.ms(0, 8) <= costs.ms(0, 16)


def test_a_machine_that_slows_down_is_followed_at_every_number_of_rows():
    costs, rng = Costs(DRAFT, VERIFY), random.Random(1)
    for _ in range(60):
        costs.observe(4, 16, 0, 6.0 * 1.5 * rng.uniform(0.9, 1.1))
    assert costs.pace == pytest.approx(1.5, rel=0.1)
    assert costs.ms(4, 16) == pytest.approx(9.0, rel=0.1)
    assert costs.ms(0, 1) == pytest.approx(6.0, rel=0.12)


def test_a_wrong_point_is_found_while_others_are_right():
    costs = Costs(DRAFT, VERIFY)
    for _ in range(600):
        costs.observe(0, 1, 0, 4.0)
        costs.observe(4, 16, 0, 7.0)
    assert costs.ms(0, 1) == pytest.approx(4.0, rel=0.1)
    assert costs.ms(4, 16) == pytest.approx(7.0, rel=0.1)


def test_a_pause_in_one_step_says_little():
    costs = Costs(DRAFT, VERIFY)
    costs.observe(0, 16, 0, 5000.0)
    assert costs.ms(0, 1) < 4.0 * 1.12


def test_a_table_is_read_as_it_was_written():
    costs = Costs(DRAFT, VERIFY, 0.25)
    found = costs.as_dict()
    assert found["context"] == 0.25
    again = Costs(*[{int(n): ms for n, ms in found[k].items()} for k in ("draft", "verify")])
    assert again.ms([0, 4, 9], [1, 7, 90]).tolist() == costs.ms([0, 4, 9], [1, 7, 90]).tolist()
