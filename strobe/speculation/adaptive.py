"""Which requests draft, how wide, and how many drafts are verified. Imports no torch.

The rule: a step shall bring the most tokens a millisecond.

    tokens a millisecond = (requests + sum of the verified drafts' chances to count) / milliseconds

So a draft is verified if its chance exceeds the price of its row: the milliseconds that the row
adds times the tokens a millisecond of the best step. Likewise a request drafts if its block brings
more than the drafter's rows cost, and where no draft pays the step is a plain one.

- Chances (`acceptance.py`): of a request's next block by its own blocks and others'. The host
  decides how many requests draft and how many drafts are verified; the device, by the step's own
  margins, which drafts (`allocate.py`). Chains of prompt lookup are priced by the same rule.
- Costs (`costs.py`): measured by warm-up, corrected while the engine runs.
- Optimism: a width of the drafter's block that is not used earns credit with time, a fixed share of
  the tokens achieved; once the credit covers its expected loss, it is tried. So resting drafters
  and other widths are looked at again, for a bounded price.
- Prompts come first: beside them drafts get the rows that they leave. A step that is full of rows
  makes a token of a row by decoding, and fewer by verifying.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from strobe.request import Request
from strobe.speculation.acceptance import AcceptanceForecast, DraftChances, evidence, extend
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.speculation.policy_config import PolicyConfig
from strobe.step import Plan, StepResult


class Option(NamedTuple):
    """A kind of step. width: index of the drafter's block, -1 for no drafts; num_drafting: requests
    that draft; num_verified: drafts of all of them."""

    width: int = -1
    num_drafting: int = 0
    num_verified: int = 0


class AdaptiveDraftPolicy(DraftPolicy):
    """Plan the best step by what was seen. Until costs are known, draft as much as allowed."""

    def __init__(
        self,
        widths: Sequence[int],
        slots: Sequence[int],
        rows: Callable[[int, int, int], Sequence[tuple[int, int]]],
        max_mixed_rows: int,
        max_requests: int,
        config: PolicyConfig | None = None,
    ):
        """widths: drafts of the drafter's blocks, ascending; slots: their rows. rows(requests,
        those that draft, drafts of each at most): the steps there are for them, each by drafts of
        all together and rows. max_mixed_rows: of a step that computes prompts beside decoding."""
        self.config = config = config or PolicyConfig()
        self.widths, self.slots, self.rows = tuple(widths), tuple(slots), functools.cache(rows)
        self.max_mixed_rows = max_mixed_rows
        self.costs: StepCosts | None = None
        self.chances = DraftChances(self.widths, config.first_rate, config.table_prior)
        self.chains = DraftChances(self.widths[-1:], config.chain_rate, config.table_prior)
        self.forecast = AcceptanceForecast(max_requests, self.widths[-1], config)
        self._requests: list[weakref.ref[Request] | None] = [None] * max_requests
        self._match_lengths: dict[int, int] = {}  # by slot, of its newest chain
        self._option, self._held_for, self._steps_left = Option(), (0, 0), 0
        self._unused, self._step_ms = np.zeros(len(self.widths)), 0.0
        """Milliseconds since each width was last used, and those of a step of the newest option."""
        self._rate: dict[int, float] = {}
        """Tokens a millisecond of the newest option, by the number of decoding requests."""

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        if self.costs is None:
            return super().plan(candidates, load)
        count, limit = len(candidates), self.max_mixed_rows
        prompt_rows = min(load.prompt_rows, max(limit - count, limit // 2))
        room = max(limit - count - prompt_rows, 0) if prompt_rows else 2**30
        if self._register(candidates):
            self._steps_left = 0
        work = StepWork(0, count + prompt_rows, count, load.context_tokens)
        max_drafts, use_chain = [0] * count, None
        if any(candidate.chain.tokens for candidate in candidates):
            max_drafts = self._plan_chains(candidates, work, room)
            use_chain = [n > 0 for n in max_drafts]
        num_chained = sum(max_drafts)
        drafters = [i for i, c in enumerate(candidates) if c.on_device and not max_drafts[i]]
        if not drafters:
            return DraftPlan(max_drafts, use_chain=use_chain)
        pairs = [(candidates[i].slot, candidates[i].max_drafts) for i in drafters]
        slots, limits = np.array(pairs).T
        work = work._replace(rows=work.rows + num_chained)
        self._steps_left -= 1
        if self._steps_left <= 0 or self._held_for != (len(drafters), work.rows):
            self._held_for = len(drafters), work.rows
            self._option = self._choose(slots, limits, work, room - num_chained)
        self._unused += self._step_ms
        width, num_drafting, num_verified = self._option
        if width < 0:
            return DraftPlan(max_drafts, use_chain=use_chain)
        for i in _ranked(self.forecast.expected(slots), limits)[:num_drafting]:
            max_drafts[drafters[i]] = min(int(limits[i]), self.widths[width])
        if num_verified >= sum(max_drafts) - num_chained:
            return DraftPlan(max_drafts, use_chain=use_chain)
        rates = tuple(map(tuple, self.chances.table(width).tolist()))
        return DraftPlan(max_drafts, num_verified, rates, use_chain)

    @property
    def confidence_by_place(self) -> tuple[tuple[int, int, float, float], ...]:
        return tuple(self.chances.logistic_fits())

    def observe(self, plan: Plan, result: StepResult) -> None:
        spans, config = plan.spans, self.config
        drafting = [i for i, span in enumerate(spans) if span.method is not None]
        width = bisect_left(self.widths, max([spans[i].num_drafts for i in drafting], default=0))
        work = StepWork.of(plan, result, self.slots[width])
        if self.costs is not None and result.seconds is not None and work is not None:
            self.costs.observe(work, 1e3 * result.seconds, config)
        self.forecast.advance()
        self.chances.fade(min(len(spans) / config.request_memory, 1 / config.step_memory))
        self.chains.fade(1 / config.chain_memory)
        num_verified = result.num_verified or [span.num_drafts for span in spans]
        for span, verified, accepted in zip(spans, num_verified, result.num_accepted, strict=False):
            if span.method is None and verified and span.slot in self._match_lengths:
                match = chain_evidence(self._match_lengths[span.slot], verified)
                self.chains.observe(0, match, np.array([verified]), np.array([accepted]))
        if not drafting or result.margins is None:
            return
        made = np.array([spans[i].num_drafts for i in drafting])
        block = evidence(np.array(result.margins)[drafting, : self.widths[width]], made)
        chances = extend(self.chances.chances(width, block), self.widths[-1])
        self.forecast.observe(np.array([spans[i].slot for i in drafting]), chances)
        counts = np.array(num_verified)[drafting], np.array(result.num_accepted)[drafting]
        self.chances.observe(width, block, *counts)

    def _register(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether one of the candidates is new to its slot."""
        new = False
        for request, _, _, slot, chain in candidates:
            known = self._requests[slot]
            if known is None or known() is not request:
                self._requests[slot], new = weakref.ref(request), True
                self.forecast.clear(slot)
            if chain.tokens:
                self._match_lengths[slot] = chain.match_length
        return new

    def _plan_chains(self, candidates: Sequence[Candidate], work: StepWork, room: int) -> list[int]:
        """Return how many drafts of its chain each candidate verifies: those whose chance exceeds
        the price of a row, if together they bring more than the drafter's block would. work: of a
        step without drafts; room: drafts that fit."""
        assert self.costs is not None
        rows = work.rows + np.array([0, self.config.chain_rows])
        now, more = self.costs.ms(work._replace(rows=rows))
        rate = max(self._rate.get(work.requests, 0.0), work.requests / now)
        price = rate * (more - now) / self.config.chain_rows
        max_drafts = [0] * len(candidates)
        for i, (_, _, on_device, slot, chain) in enumerate(candidates):
            match = chain_evidence(chain.match_length, len(chain.tokens))
            chances = self.chains.chances(0, match)[0]
            block = self.forecast.expected(np.array([slot])).sum() if on_device else 0.0
            if chances.sum() > block:
                max_drafts[i] = min(int((chances > price).sum()), room)
                room -= max_drafts[i]
        return max_drafts

    def _choose(self, slots: Any, limits: Any, work: StepWork, room: int) -> Option:
        """Return the best kind of step for the requests in these slots. work: of a step in which
        they do not draft; room: drafts that fit."""
        assert self.costs is not None
        config, count = self.config, len(slots)
        spread = count / (count + config.spread_requests) if count > 1 else 0.0
        chances, before = self.forecast.sample(slots, spread)
        chances *= np.arange(chances.shape[1]) < limits[:, None]
        chances = chances[_ranked(before, limits)]
        options, tokens, draft_rows, rows = [Option()], [work.requests], [0], [count]
        for width, drafts in enumerate(self.widths):
            likeliest = np.argsort(-chances[:, :drafts], axis=None)
            gains = chances[:, :drafts].flatten()[likeliest]
            for drafting in {max(round(share * count), 1) for share in config.shares}:
                total = np.cumsum(gains[likeliest < drafting * drafts])
                for n, size in self.rows(count, drafting, drafts):
                    if n <= room:
                        options.append(Option(width, drafting, n))
                        tokens.append(work.requests + total[n - 1])
                        draft_rows.append(drafting * self.slots[width])
                        rows.append(size)
        all_rows = work.rows - count + np.array(rows)
        ms = self.costs.ms(work._replace(draft_rows=np.array(draft_rows), rows=all_rows))
        rate = (np.array(tokens) / ms).max()
        self._rate = {work.requests: float(rate)}
        widths = np.array([option.width for option in options])
        value = np.array(tokens) - rate * ms
        credit = config.explore_share * rate * np.append(self._unused, 0.0)[widths]
        best, tried = int(value.argmax()), int((value + credit).argmax())
        self._steps_left = config.hold_steps if widths[best] < 0 else min(config.hold_steps, count)
        if widths[tried] != widths[best]:
            best, self._steps_left = tried, 1
        self._step_ms = float(ms[best])
        if widths[best] >= 0:
            self._unused[widths[best]] = 0.0
        return options[best]


def _ranked(expected: Any, limits: Any) -> list[int]:
    """Return requests by what their drafts, within their limits, are expected to bring."""
    exists = np.arange(expected.shape[1]) < limits[:, None]
    return np.argsort(-(expected * exists).sum(1), kind="stable").tolist()


def chain_evidence(match_length: int, drafts: int) -> Any:
    """Return the evidence [1, drafts] of a chain."""
    return np.full((1, drafts), match_length / 2)
