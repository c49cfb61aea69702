"""The default draft policy: which requests draft, how wide, and how many drafts are verified.
Imports no torch.

The rule: plan the step that brings the most tokens per millisecond.

    tokens per millisecond = (requests + sum of the verified drafts' chances) / milliseconds

A draft's chance is the probability that it counts: that it and all drafts before it are right. So a
draft is verified if its chance exceeds the price of its row, which is the milliseconds that the row
adds times the tokens per millisecond of the best step. A request drafts if its block brings more
than the drafter's rows cost. If no draft pays, the step is plain decoding.

`_choose` compares plain decoding with every width of the drafter's block, several shares of the
requests and all row counts that a step can have. It needs two estimates:

- the chances of each request's next block (`AcceptanceForecast`), from earlier blocks. Which drafts
  are verified is decided later, on the device, by the margins of this step (`allocate.py`).
- the milliseconds of a step (`StepCosts`), measured at the start and corrected by every step.

Two more rules bound what this one costs:

- A width that is not used earns credit, a fixed share of the tokens generated meanwhile. Once its
  credit covers the loss expected from using it, it is tried for one step.
- Prompts come first: next to prompts, drafts get only the rows that prompts leave.

A chain of prompt lookup replaces a request's block if it is expected to bring more, up to the last
draft whose chance exceeds the price of a row.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from strobe.request import Request
from strobe.speculation.acceptance import AcceptanceForecast, DraftChances, evidence
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.speculation.policy_config import PolicyConfig
from strobe.step import Plan, StepResult


class Option(NamedTuple):
    """A kind of step: index of the block's width (-1 for no drafts), requests that draft, and
    drafts to verify, of all requests together."""

    width: int = -1
    num_drafting: int = 0
    num_verified: int = 0


class AdaptiveDraftPolicy(DraftPolicy):
    """Plans the step with the most tokens per millisecond. While costs are unknown, every request
    drafts as much as it may."""

    def __init__(
        self,
        widths: Sequence[int],
        slots: Sequence[int],
        rows: Callable[[int, int, int], Sequence[tuple[int, int]]],
        max_mixed_rows: int,
        max_requests: int,
        config: PolicyConfig | None = None,
    ):
        """widths: drafts of the drafter's blocks, ascending; slots: rows of these blocks.
        rows(requests, drafting requests, max drafts of each): the steps that exist for them, as
        (drafts of all together, rows). max_mixed_rows: of a step with prompts and decoding."""
        self.config = config = config or PolicyConfig()
        self.widths, self.slots, self.rows = tuple(widths), tuple(slots), functools.cache(rows)
        self.max_mixed_rows = max_mixed_rows
        self.costs: StepCosts | None = None
        self.chances = DraftChances(self.widths, config)
        self.chains = DraftChances(self.widths[-1:], config)
        self.forecast = AcceptanceForecast(max_requests, self.widths[-1], config)
        self._requests: list[weakref.ref[Request] | None] = [None] * max_requests
        self._match_lengths: dict[int, int] = {}  # of each slot's latest chain
        self._option, self._chosen_for, self._steps_left = Option(), (0, 0), 0
        self._credit, self._earned = np.zeros(len(self.widths) + 1), 0.0
        """Tokens of credit of each width, 0 for no drafts, and those that a step of the chosen
        option earns."""

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        if self.costs is None:
            return super().plan(candidates, load)
        self._register(candidates)
        count, limit = len(candidates), self.max_mixed_rows
        prompt_rows = min(load.prompt_rows, max(limit - count, limit // 2))
        room = max(limit - count - prompt_rows, 0) if prompt_rows else 2**30
        work = StepWork(0, count + prompt_rows, count, load.context_tokens)
        max_drafts, use_chain = [0] * count, None
        if any(candidate.chain.tokens for candidate in candidates):
            max_drafts = self._plan_chains(candidates, work, room)
            use_chain = [n > 0 for n in max_drafts]
        num_chained = sum(max_drafts)
        drafters = [i for i, c in enumerate(candidates) if c.on_device and not max_drafts[i]]
        if not drafters:
            return DraftPlan(max_drafts, use_chain=use_chain)
        slots = np.array([candidates[i].slot for i in drafters])
        limits = np.array([candidates[i].max_drafts for i in drafters])
        ranking = np.argsort(-_within(self.forecast.expected(slots), limits).sum(1), kind="stable")
        work = work._replace(rows=work.rows + num_chained)
        self._steps_left -= 1
        if self._steps_left <= 0 or self._chosen_for != (len(drafters), work.rows):
            self._chosen_for = len(drafters), work.rows
            blocks = _within(self.forecast.sample(slots), limits[:, None])[ranking]
            self._choose(blocks, work, room - num_chained)
        self._credit[:-1] += self._earned
        width, num_drafting, num_verified = self._option
        for i in ranking[:num_drafting].tolist():
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
        for table in (self.chances, self.chains):
            table.fade(min(len(spans) / config.request_memory, 1 / config.step_memory))
        num_verified = result.num_verified or [span.num_drafts for span in spans]
        for span, verified, accepted in zip(spans, num_verified, result.num_accepted, strict=False):
            if span.method is None and verified and span.slot in self._match_lengths:
                match = chain_evidence(self._match_lengths[span.slot], verified)
                self.chains.observe(0, match, np.array([verified]), np.array([accepted]))
        if drafting and result.margins is not None:
            drafts = np.array([spans[i].num_drafts for i in drafting])
            block = evidence(np.array(result.margins)[drafting, : self.widths[width]], drafts)
            slots = np.array([spans[i].slot for i in drafting])
            self.forecast.observe(slots, self.chances.chances(width, block))
            counts = np.array(num_verified)[drafting], np.array(result.num_accepted)[drafting]
            self.chances.observe(width, block, *counts)

    def _register(self, candidates: Sequence[Candidate]) -> None:
        """Note the requests that are new to their slots, and the lengths of chains' matches."""
        for request, _, _, slot, chain in candidates:
            known = self._requests[slot]
            if known is None or known() is not request:
                self._requests[slot], self._steps_left = weakref.ref(request), 0
                self.forecast.clear(slot)
            if chain.tokens:
                self._match_lengths[slot] = chain.match_length

    def _plan_chains(self, candidates: Sequence[Candidate], work: StepWork, room: int) -> list[int]:
        """Return how many drafts of its chain each candidate verifies; 0 if its block is expected
        to bring more. work: of a step without drafts; room: number of drafts that fit."""
        assert self.costs is not None
        blocks = self.forecast.expected(np.array([c.slot for c in candidates])).sum(1)
        blocks *= [candidate.on_device for candidate in candidates]
        chances = [
            self.chains.chances(0, chain_evidence(chain.match_length, len(chain.tokens)))[0]
            for *_, chain in candidates
        ]
        num_drafts = sum(map(len, chances))
        plain, ms = self.costs.ms(work._replace(rows=work.rows + np.array([0, num_drafts])))
        gain = sum([max(a.sum(), b) for a, b in zip(chances, blocks, strict=True)])
        price = (work.requests + gain) / ms * (ms - plain) / num_drafts
        max_drafts = [0] * len(candidates)
        for i, chain in enumerate(chances):
            if chain.sum() > blocks[i]:
                max_drafts[i] = min(int((chain > price).sum()), room)
                room -= max_drafts[i]
        return max_drafts

    def _choose(self, blocks: Any, work: StepWork, room: int) -> None:
        """Choose the best kind of step, and for how many steps. blocks [n, 2, K]: chances of two
        possible blocks of each request that may draft, the most promising requests first; work: of
        a step in which they do not draft; room: number of drafts that fit."""
        assert self.costs is not None
        config, count = self.config, len(blocks)
        steps = [(Option(), 0.0, 0, count)]
        for width, drafts in enumerate(self.widths):
            order = np.argsort(-blocks[..., :drafts], axis=None)
            gains = blocks[..., :drafts].flatten()[order] / 2
            for drafting in {max(round(share * count), 1) for share in config.shares}:
                totals = np.cumsum(gains[order < drafting * 2 * drafts])
                for n, rows in self.rows(count, drafting, drafts):
                    if n <= room:
                        draft_rows = drafting * self.slots[width]
                        option = Option(width, drafting, n)
                        steps.append((option, totals[2 * n - 1], draft_rows, rows))
        options, gains, draft_rows, rows = zip(*steps, strict=True)
        all_rows = work.rows - count + np.array(rows)
        ms = self.costs.ms(work._replace(draft_rows=np.array(draft_rows), rows=all_rows))
        tokens = work.requests + np.array(gains)
        rate = (tokens / ms).max()
        widths = np.array([option.width for option in options])
        value = tokens - rate * ms
        best, tried = value.argmax(), (value + self._credit[widths]).argmax()
        self._steps_left = config.hold_steps if widths[best] < 0 else min(config.hold_steps, count)
        if widths[tried] != widths[best]:
            best, self._steps_left = tried, 1
        self._option = options[best]
        self._earned = config.explore_share * float(rate * ms[best])
        self._credit[widths[best]] = 0.0


def _within(chances: Any, limits: Any) -> Any:
    """Return chances [..., K] with 0 from each limit [...] on."""
    return chances * (np.arange(chances.shape[-1]) < limits[..., None])


def chain_evidence(match_length: int, drafts: int) -> Any:
    """Return the evidence [1, drafts] of a chain: half the length of its match."""
    return np.full((1, drafts), match_length / 2)
