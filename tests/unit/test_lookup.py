"""Acceptance probabilities of prompt-lookup drafts, and the choice between them and the drafter."""

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

CONFIG = PolicyConfig()
RATE = CONFIG.first_rate


class Chains:
    """A policy's statistics on chains of up to 4 drafts."""

    def __init__(self) -> None:
        self.table = DraftChances((4,), CONFIG)

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
    chains, memory = Chains(), CONFIG.step_memory
    for _ in range(50):
        chains.observe(4, 4, 0)
    bad = chains.chances(4)[0]
    for _ in range(300):
        chains.table.fade(1 / memory)
    assert bad < 0.1 < chains.chances(4)[0]
    chains.table.fade(40)
    assert chains.chances(4)[0] == pytest.approx(RATE)


class PolicyRun:
    """A policy for requests that each have a drafter and a chain, with scripted results."""

    def __init__(self, count: int, row_ms: float = 0.1):
        self.policy = AdaptiveDraftPolicy((3,), (4,), self.steps, 64, count)
        self.policy.costs = StepCosts({4: 1.0, 16: 1.5}, {1: 5.0, 101: 5.0 + 100 * row_ms})
        requests = [Request(f"{i}", [1], SamplingParams(), seed=0) for i in range(count)]
        chain = DraftChain((5, 5, 5), 3)
        self.candidates = [Candidate(r, 3, True, i, chain) for i, r in enumerate(requests)]
        self.first_steps = self.take_steps(3, 3, 70)

    @staticmethod
    def steps(count: int, num_drafting: int, max_drafts: int) -> list[tuple[int, int]]:
        num_drafts = num_drafting * max_drafts
        return [(num_drafts, count + num_drafts)]

    def take_steps(self, block_accepted: int, chain_accepted: int, steps: int) -> list[list[bool]]:
        """Return, for each step and request, whether its chain was verified instead of a block.
        Steps accept so many drafts of a block or of a chain."""
        use_chain: list[list[bool]] = []
        for _ in range(steps):
            draft_plan = self.policy.plan(self.candidates, BatchLoad())
            chained = draft_plan.use_chain or [bool(c.chain.tokens) for c in self.candidates]
            spans, accepted = list[Span](), list[int]()
            for i, (by_chain, n) in enumerate(zip(chained, draft_plan.max_drafts, strict=True)):
                tokens, method = ((7,) + (5,) * n, None) if by_chain else ((TAIL,), "dflash")
                spans.append(Span(i, 9, 9, tokens, n, method if n else None, 1 + n))
                accepted.append(min(chain_accepted if by_chain else block_accepted, n))
            margins = [[9.0 if k < block_accepted else 0.0 for k in range(3)]] * len(spans)
            self.policy.observe(Plan(tuple(spans)), StepResult([], accepted, margins=margins))
            use_chain.append(chained)
        return use_chain


def test_chain_replaces_the_block_when_more_is_expected():
    run = PolicyRun(2)
    use_chain = run.take_steps(block_accepted=0, chain_accepted=3, steps=60)
    assert use_chain[-1] == [True, True]
    draft_plan = run.policy.plan(run.candidates, BatchLoad())
    assert draft_plan.max_drafts == [3, 3], "and the drafter does not run"
    use_chain = run.take_steps(block_accepted=3, chain_accepted=0, steps=200)
    assert use_chain[-1] == [False, False]


def test_drafter_is_tried_first_despite_chains():
    run = PolicyRun(2)
    assert sum(len(use_chain) - sum(use_chain) for use_chain in run.first_steps) >= 64


def test_chain_drafts_below_the_row_price_are_not_verified():
    cheap, expensive = PolicyRun(1), PolicyRun(1, row_ms=4.0)
    for run in (cheap, expensive):
        run.candidates = [candidate._replace(on_device=False) for candidate in run.candidates]
    assert cheap.policy.plan(cheap.candidates, BatchLoad()).max_drafts == [3]
    assert expensive.policy.plan(expensive.candidates, BatchLoad()).max_drafts[0] < 3
