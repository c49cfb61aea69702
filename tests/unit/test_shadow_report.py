"""The report of shadow mode."""

from __future__ import annotations

import numpy as np
import pytest

from strobe.speculation.costs import StepCosts
from strobe.speculation.shadow.block_sums import BlockSums
from strobe.speculation.shadow.report import Group, ShadowTally, report_dict, report_text
from strobe.speculation.shadow.speed_up import DrafterCosts, ShadowCosts
from strobe.step import ScoredBlock

GROUP = Group(drafter="d", kind="text", phase="answer", context="0-1k")
COSTLY = StepCosts({16: 8.0, 64: 32.0}, {1: 10.0, 101: 110.0})
"""Rows of 1 ms, and blocks of 8 ms each."""


def block(accepted: int, drafter: str = "d", drafts: int = 8, start: int = 10) -> ScoredBlock:
    return ScoredBlock(drafter=drafter, start=start, num_drafts=drafts, num_accepted=accepted)


def tally_of(*accepted: int, drafter: str = "d") -> ShadowTally:
    """Count answers of one block each."""
    tally = ShadowTally()
    for count in accepted:
        tally.add([(GROUP._replace(drafter=drafter), block(count, drafter))])
    return tally


def test_report_counts_blocks_by_group_with_intervals_over_answers():
    tally = ShadowTally()
    thinking = GROUP._replace(kind="code", phase="thinking")
    for _ in range(3):
        tally.add([(thinking, block(3)), (thinking, block(1))])
        tally.add([(GROUP, block(0)), (GROUP, block(0))])
    scores = report_dict(tally, None)["drafters"]["d"]
    assert (scores["answers"], scores["blocks"], scores["accepted"]) == (6, 12, 12)
    assert scores["acceptance_length"] == 2.0
    # The answers' sums are 4 and 0 around 2: variance 6/5 * 6 * 2² / 12², times Student's 2.571².
    reach = 2.571 * np.sqrt(6 / 5 * 24) / 12
    assert scores["interval"] == [1.0, pytest.approx(2 + reach, abs=0.005)]
    assert set(scores["by"]["phase"]) == {"thinking", "answer"}
    assert scores["by"]["kind"]["code"]["acceptance_length"] == 3.0
    assert scores["by"]["kind"]["code"]["interval"] is None
    assert scores["by"]["context"]["0-1k"]["blocks"] == 12
    row = report_text(tally, None).splitlines()[3].split()
    assert row == ["d", "all", "6", "12", f"2.00±{reach:.2f}"]


def test_report_is_empty_without_scores():
    tally = ShadowTally()
    tally.add([])
    assert report_dict(tally, None) == {
        "costs_measured": False,
        "recommended": [],
        "drafters": {},
    }


def test_sums_of_fewer_drafts_equal_truncated_blocks():
    """Blocks differ in length, as prompt lookup's do; some have none."""
    blocks = [[block(0, drafts=0), block(2, drafts=3)], [block(5), block(8)], [block(1, drafts=2)]]
    sums = BlockSums()
    for answer in blocks:
        sums.add(answer)
    for k in range(9):
        truncated = BlockSums()
        for answer in blocks:
            short = [(min(b.num_drafts, k), min(b.num_accepted, k)) for b in answer]
            truncated.add([block(accepted, drafts=drafts) for drafts, accepted in short])
        assert sums.drafts[k] == truncated.drafts[-1]
        assert sums.accepted[k] == truncated.accepted[-1]
        assert sums.squared_accepted[k] == truncated.squared_accepted[-1]
        assert sums.products[k] == truncated.products[-1]


def test_interval_covers_the_true_tokens_per_step():
    """In 95 % of 400 experiments with 8 answers; blocks of one answer resemble each other."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        sums = BlockSums()
        for chance in generator.uniform(0.3, 0.9, size=8):
            accepted = generator.binomial(8, chance, size=10).tolist()
            sums.add([block(count) for count in accepted])
        interval = sums.tokens_per_step().interval
        assert interval is not None
        covered += interval[0] <= 1 + 8 * 0.6 <= interval[1]
    assert 0.92 <= covered / 400 <= 0.98


def test_speed_up_is_tokens_per_step_times_cost_of_steps():
    costs = ShadowCosts(drafters={"d": DrafterCosts(COSTLY, block_rows=16)}, max_num_seqs=4)
    tally = tally_of(8, 8, 0, 0, 2, 2)
    entries = {e["concurrency"]: e for e in report_dict(tally, costs)["drafters"]["d"]["speedup"]}
    assert list(entries) == [1, 2, 4]
    # One request: K drafts make a step of 10 + K ms with 8 ms of drafting, in place of 10 ms.
    # Tokens per step are 1 + K * 2/3 up to 2 drafts, then 1 + 4/3 + (K - 2) / 3.
    by_drafts = [(1 + min(k, 2) * 2 / 3 + max(k - 2, 0) / 3) * 10 / (18 + k) for k in range(9)]
    best = int(np.argmax(by_drafts))
    assert entries[1]["num_drafts"] == best
    assert entries[1]["speedup"] == pytest.approx(by_drafts[best], abs=0.001)
    # Four: 13 ms plain, and 13 + 4 K + 32 ms with drafts.
    by_drafts = [(1 + min(k, 2) * 2 / 3 + max(k - 2, 0) / 3) * 13 / (45 + 4 * k) for k in range(9)]
    best = int(np.argmax(by_drafts))
    assert entries[4]["num_drafts"] == best
    assert entries[4]["speedup"] == pytest.approx(by_drafts[best], abs=0.001)
    low, high = entries[4]["interval"]
    assert low < entries[4]["speedup"] < high


def test_speed_up_grows_with_the_context():
    """A plain step of long contexts costs more, so the same drafter brings more there."""
    steps = StepCosts({16: 10.0, 64: 10.0}, {1: 10.0, 100: 10.0}, context=0.01)
    costs = ShadowCosts(drafters={"d": DrafterCosts(steps, 16)}, max_num_seqs=1)
    speed_ups: list[float] = []
    for start in (10, 10_000):
        sums = BlockSums()
        sums.add([block(4, start=start)])
        speed_up = costs.speed_up("d", sums, 1)
        assert speed_up is not None
        speed_ups.append(speed_up.estimate.value)
    assert speed_ups[0] == pytest.approx(5 * 10.1 / 20.1)
    assert speed_ups[1] == pytest.approx(5 * 110 / 120)


@pytest.mark.parametrize(
    ("accepted", "best", "rivals"),
    [
        ({"d": (7, 8, 7, 8, 7, 8), "e": (2, 1, 2, 1, 2, 1)}, "d", []),
        ({"d": (8, 0, 8, 0, 8, 0), "e": (3, 4, 3, 4, 3, 3)}, "d", ["none", "e"]),
        ({"d": (8, 8), "e": (1, 1)}, "d", ["none", "e"]),
        ({"d": (0, 0, 0, 0, 0, 0), "e": (1, 0, 0, 0, 0, 0)}, "none", []),
    ],
    ids=["clear", "overlapping", "few answers", "plain"],
)
def test_recommendation_is_clear_where_intervals_part(
    accepted: dict[str, tuple[int, ...]], best: str, rivals: list[str]
):
    tally = ShadowTally()
    for name, counts in accepted.items():
        tally.sums |= tally_of(*counts, drafter=name).sums
    slow = StepCosts({1: 0.0, 2: 0.0}, {1: 10.0, 2: 20.0, 100: 20.0})
    drafters = {"d": DrafterCosts(slow), "e": DrafterCosts(slow)}
    costs = ShadowCosts(drafters=drafters, max_num_seqs=1)
    (choice,) = report_dict(tally, costs)["recommended"]
    assert choice["drafter"] == best
    assert choice["rivals"] == rivals
    lines = report_text(tally, costs).splitlines()
    assert lines[2].split() == ["requests", "d", "e", "best"]
    assert lines[3].endswith(" or ".join([best, *rivals]))
