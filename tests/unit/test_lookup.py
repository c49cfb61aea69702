"""How likely drafts of prompt lookup are to be right, and when they go before the drafter's."""

from __future__ import annotations

import numpy as np
import pytest

from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.speculation.acceptance import DraftChances
from strobe.speculation.adaptive import AdaptiveDraftPolicy, chain_evidence
from strobe.speculation.costs import StepCosts
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftChain
from strobe.speculation.policy_config import PolicyConfig
from strobe.step import TAIL, Plan, Span, StepResult

RATE = PolicyConfig().chain_rate


class Chains:
    """What a policy knows of chains of up to 4 drafts."""

    def __init__(self) -> None:
        self.table = DraftChances((4,), RATE, PolicyConfig().table_prior)

    def chances(self, match: int, drafts: int = 4) -> list[float]:
        return self.table.chances(0, chain_evidence(match, drafts))[0].tolist()

    def observe(self, match: int, verified: int, accepted: int) -> None:
        verdict = np.array([verified]), np.array([accepted])
        self.table.observe(0, chain_evidence(match, verified), *verdict)


def test_chain_chances_depend_on_match_length_and_position():
    chains = Chains()
    assert chains.chances(4) == pytest.approx([RATE**k for k in range(1, 5)])
    for _ in range(50):
        chains.observe(4, 4, 4)
        chains.observe(2, 4, 1)
    long, short = chains.chances(4), chains.chances(2)
    assert min(long) > 0.9
    assert short[0] > 0.95
    assert short[1] < 0.1
    assert chains.chances(4, 2) == long[:2]
    assert chains.chances(4, 0) == []


def test_longer_matches_are_never_less_likely():
    chains = Chains()
    for _ in range(50):
        chains.observe(3, 4, 4)
    assert chains.chances(2)[0] <= chains.chances(3)[0] <= chains.chances(5)[0]
    assert chains.chances(5)[3] > 0.9


def test_chain_learns_only_from_verified_drafts_up_to_a_wrong_one():
    chains = Chains()
    for _ in range(50):
        chains.observe(4, 4, 0)
        chains.observe(2, 1, 1)
    right, seen = chains.table.counts[:, 0].sum(2).tolist()
    assert right == [50, 0, 0, 0]
    assert seen == [100, 0, 0, 0]


def test_chain_counts_fade():
    chains, memory = Chains(), PolicyConfig().chain_memory
    for _ in range(50):
        chains.observe(4, 4, 0)
    bad = chains.chances(4)[0]
    for _ in range(128):
        chains.table.fade(1 / memory)
    assert bad < 0.1 < chains.chances(4)[0]
    chains.table.fade(40)
    assert chains.chances(4)[0] == pytest.approx(RATE)


class Front:
    """Requests with a drafter and a chain each; both are right as often as is said."""

    def __init__(self, count: int, row: float = 0.1):
        self.policy = AdaptiveDraftPolicy((3,), (4,), self.steps, 64, count)
        self.policy.costs = StepCosts({4: 1.0, 16: 1.5}, {1: 5.0, 101: 5.0 + 100 * row})
        asked = [Request(f"{i}", [1], SamplingParams(), seed=0) for i in range(count)]
        chain = DraftChain((5, 5, 5), 3)
        self.candidates = [Candidate(one, 3, True, i, chain) for i, one in enumerate(asked)]
        self.first = self.run(3, 3, 70)

    @staticmethod
    def steps(count: int, some: int, most: int) -> list[tuple[int, int]]:
        return [(some * most, count + some * most)]

    def run(self, drafted: int, looked_up: int, steps: int) -> list[list[bool]]:
        """What was chained, where blocks keep `drafted` and chains `looked_up` drafts; the first
        blocks are the drafter's."""
        found: list[list[bool]] = []
        for _ in range(steps):
            allotted = self.policy.plan(self.candidates, BatchLoad(len(self.candidates), 0, 0))
            chained = allotted.use_chain or [bool(one.chain.tokens) for one in self.candidates]
            spans, kept = list[Span](), list[int]()
            for i, (own, n) in enumerate(zip(chained, allotted.max_drafts, strict=True)):
                tokens, method = ((7,) + (5,) * n, None) if own else ((TAIL,), "dflash")
                spans.append(Span(i, 9, 9, tokens, n, method if n else None, 1 + n))
                kept.append(min(looked_up if own else drafted, n))
            margins = [[9.0 if k < drafted else 0.0 for k in range(3)]] * len(spans)
            self.policy.observe(Plan(tuple(spans)), StepResult([], kept, margins=margins))
            found.append(chained)
        return found


def test_chain_replaces_the_block_when_more_is_expected():
    front = Front(2)
    found = front.run(drafted=0, looked_up=3, steps=60)
    assert found[-1] == [True, True]
    allotted = front.policy.plan(front.candidates, BatchLoad(2, 0, 0))
    assert allotted.max_drafts == [3, 3], "and the drafter does not run"
    better = front.run(drafted=3, looked_up=0, steps=200)
    assert better[-1] == [False, False]


def test_drafter_is_tried_first_despite_chains():
    front = Front(2)
    assert sum(len(drafted) - sum(drafted) for drafted in front.first) >= 64


def test_chain_drafts_below_the_row_price_are_not_verified():
    cheap, dear = Front(1), Front(1, row=4.0)
    for front in (cheap, dear):
        front.candidates = [one._replace(on_device=False) for one in front.candidates]
    assert cheap.policy.plan(cheap.candidates, BatchLoad(1, 0, 0)).max_drafts == [3]
    assert dear.policy.plan(dear.candidates, BatchLoad(1, 0, 0)).max_drafts[0] < 3
