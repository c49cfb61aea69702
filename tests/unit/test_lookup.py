"""How likely drafts of prompt lookup are to be right, and when they go before the drafter's."""

from __future__ import annotations

import pytest

from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.costs import Costs
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftChain
from strobe.speculation.lookup import FIRST, HALVED, Lookup
from strobe.step import TAIL, Plan, Span, StepResult

LONG, SHORT = DraftChain((5,) * 4, 4), DraftChain((5,) * 4, 2)


def test_chances_are_of_the_tokens_matched_and_of_the_place():
    lookup = Lookup(4)
    assert lookup.chances(LONG, 0) == pytest.approx([FIRST**k for k in range(1, 5)])
    for _ in range(50):
        lookup.observe(4, 4, 4, 0)
        lookup.observe(2, 4, 1, 0)
    long, short = lookup.chances(LONG, 0), lookup.chances(SHORT, 0)
    assert long.min() > 0.9
    assert short[0] > 0.95
    assert short[1] < 0.1
    assert lookup.chances(DraftChain((5, 5), 4), 0).tolist() == long[:2].tolist()
    assert lookup.chances(DraftChain((), 4), 0).tolist() == []


def test_places_behind_the_first_wrong_draft_or_the_last_verified_tell_nothing():
    lookup = Lookup(4)
    for _ in range(50):
        lookup.observe(4, 4, 0, 0)
        lookup.observe(2, 1, 1, 0)
    assert lookup.chances(LONG, 0)[1:] / lookup.chances(LONG, 0)[:-1] == pytest.approx([FIRST] * 3)
    assert lookup.chances(SHORT, 0)[1] / lookup.chances(SHORT, 0)[0] == pytest.approx(FIRST)


def test_what_was_bad_is_forgotten():
    lookup = Lookup(4)
    for _ in range(50):
        lookup.observe(4, 4, 0, 7)
    bad = lookup.chances(LONG, 7)[0]
    assert bad < 0.1 < lookup.chances(LONG, 7 + 2 * HALVED)[0]
    assert lookup.chances(LONG, 7 + 40 * HALVED)[0] == pytest.approx(FIRST)


class Front:
    """Requests with a drafter and a chain each; both are right as often as is said."""

    def __init__(self, count: int, row: float = 0.1):
        self.budget = AdaptiveDraftPolicy((3,), (4,), self.steps, 64, count)
        self.budget.costs = Costs({4: 1.0, 16: 1.5}, {1: 5.0, 101: 5.0 + 100 * row})
        asked = [Request(f"{i}", [1], SamplingParams(), seed=0) for i in range(count)]
        chain = DraftChain((5, 5, 5), 3)
        self.candidates = [Candidate(one, 3, True, i, chain) for i, one in enumerate(asked)]
        self.run(3, 3, 70)

    @staticmethod
    def steps(count: int, some: int, most: int) -> list[tuple[int, int]]:
        return [(some * most, count + some * most)]

    def run(self, drafted: int, looked_up: int, steps: int) -> list[list[bool]]:
        """What was chained, where blocks keep `drafted` and chains `looked_up` drafts; the first
        blocks are the drafter's."""
        found: list[list[bool]] = []
        for _ in range(steps):
            allotted = self.budget.plan(self.candidates, BatchLoad(len(self.candidates), 0, 0))
            chained = allotted.use_chain or [bool(one.chain.tokens) for one in self.candidates]
            spans, kept = list[Span](), list[int]()
            for i, (own, n) in enumerate(zip(chained, allotted.max_drafts, strict=True)):
                tokens, method = ((7,) + (5,) * n, None) if own else ((TAIL,), "dflash")
                spans.append(Span(i, 9, 9, tokens, n, method if n else None, 1 + n))
                kept.append(min(looked_up if own else drafted, n))
            margins = [[9.0 if k < drafted else 0.0 for k in range(3)]] * len(spans)
            self.budget.observe(Plan(tuple(spans)), StepResult([], kept, margins=margins))
            found.append(chained)
        return found


def test_a_chain_stands_in_the_drafters_place_where_it_promises_more():
    front = Front(2)
    found = front.run(drafted=0, looked_up=3, steps=60)
    assert found[-1] == [True, True]
    allotted = front.budget.plan(front.candidates, BatchLoad(2, 0, 0))
    assert allotted.max_drafts == [3, 3], "and the drafter does not run"
    better = front.run(drafted=3, looked_up=0, steps=200)
    assert better[-1] == [False, False]


def test_the_drafter_is_looked_at_first_whatever_prompt_lookup_finds():
    front = Front(2)
    assert sum(track.seen for track in front.budget.tracks) >= 64


def test_drafts_that_cost_more_than_they_promise_are_not_verified():
    cheap, dear = Front(1), Front(1, row=4.0)
    for front in (cheap, dear):
        front.candidates = [one._replace(on_device=False) for one in front.candidates]
    assert cheap.budget.plan(cheap.candidates, BatchLoad(1, 0, 0)).max_drafts == [3]
    assert dear.budget.plan(dear.candidates, BatchLoad(1, 0, 0)).max_drafts[0] < 3
