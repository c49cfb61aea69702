"""The report of shadow mode."""

from __future__ import annotations

import pytest

from strobe.speculation.shadow.report import Group, ShadowTally
from strobe.step import ScoredBlock


def block(accepted: int) -> ScoredBlock:
    return ScoredBlock(drafter="d", start=10, num_drafts=8, num_accepted=accepted)


def test_report_counts_blocks_by_group_with_intervals_over_answers():
    tally = ShadowTally()
    thinking = Group(drafter="d", kind="code", phase="thinking", context="0-1k")
    answer = thinking._replace(phase="answer", kind="text")
    tally.add([(thinking, block(3)), (thinking, block(1))])
    tally.add([(answer, block(0)), (answer, block(0))])
    scores = tally.as_dict()["d"]
    assert (scores["answers"], scores["blocks"], scores["accepted"]) == (2, 4, 4)
    assert scores["acceptance_length"] == 2.0
    low, high = scores["interval"]
    # The answers' ratios are 2 and 0 around 1, each of 2 blocks of 4: variance 2 * 8 / 16.
    assert (low, high) == (1.0, pytest.approx(2 + 1.96, abs=0.001))
    assert set(scores["by"]["phase"]) == {"thinking", "answer"}
    assert scores["by"]["kind"]["code"]["acceptance_length"] == 3.0
    assert scores["by"]["kind"]["code"]["interval"] is None
    assert scores["by"]["context"]["0-1k"]["blocks"] == 4
    assert tally.as_text().splitlines()[1].split() == [
        "d",
        "all",
        "2",
        "4",
        "2.00",
        "1.00",
        "to",
        "3.96",
    ]


def test_report_is_empty_without_scores():
    tally = ShadowTally()
    tally.add([])
    assert tally.as_dict() == {}
