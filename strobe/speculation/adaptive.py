"""The default draft policy: chooses the requests that draft, the width of their blocks, and the
number of drafts to verify. Imports no torch.

It maximizes the expected tokens per millisecond of a step, by two estimates:

- the chances of each request's next block (`AcceptanceForecast`), from earlier blocks. Which drafts
  are verified is decided later, on the device, by the margins of this step (`allocate.py`).
- the milliseconds of a step (`StepCosts`), measured at the start and corrected by every step.

Widths that are not used are tried from time to time (`exploration.py`). Little is staked on a
drafter that nothing is known of: at most as many requests draft as blocks were seen before. A chain
of prompt lookup replaces a request's block if it is expected to bring more. `docs/adaptive.md`
explains the rules.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from strobe.request import Request
from strobe.speculation.acceptance import (
    AcceptanceForecast,
    DraftChances,
    Floats,
    Ints,
    knot_weights,
    margin_evidence,
)
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.draft_policy import (
    BatchLoad,
    Candidate,
    DraftPlan,
    DraftPolicy,
    with_required_drafts,
)
from strobe.speculation.exploration import Exploration
from strobe.speculation.policy_config import PolicyConfig
from strobe.step import Plan, StepResult


class Option(NamedTuple):
    """A kind of step: index of the block's width (-1 for no drafts), requests that draft, and
    drafts to verify, of all requests together."""

    width: int = -1
    num_drafting: int = 0
    num_verified: int = 0


class AdaptiveDraftPolicy(DraftPolicy):
    """Maximizes the expected tokens per millisecond. While costs are unknown, every request drafts
    as much as it may."""

    def __init__(
        self,
        widths: Sequence[int],
        block_rows: Sequence[int],
        rows: Callable[[int, int, int], Sequence[tuple[int, int]]],
        max_mixed_rows: int,
        max_requests: int,
    ):
        """widths: drafts of the drafter's blocks, ascending; block_rows: rows of these blocks.
        rows(requests, drafting requests, max drafts of each): the steps that exist for them, as
        (drafts of all together, rows). max_mixed_rows: of a step with prompts and decoding."""
        self.config = config = PolicyConfig()
        self.widths = tuple(widths)
        self.block_rows = tuple(block_rows)
        self.rows = rows
        self.options = functools.cache(self._list_options)
        self.max_mixed_rows = max_mixed_rows
        self.costs: StepCosts | None = None
        self.chances = DraftChances(self.widths, config)
        self.chains = DraftChances(self.widths[-1:], config)
        self.forecast = AcceptanceForecast(max_requests, self.widths[-1], config)
        self._requests = WeakValueDictionary[int, Request]()  # by slot
        self._match_lengths: dict[int, int] = {}  # of each slot's latest chain
        self._option = Option()
        self._chosen_for = (0, 0)
        self._steps_left = 0
        self._tried: float | None = None
        """Drafts that should be right in the next step if it tries a width beyond the best one. A
        narrower one tells nothing more, however right its drafts are."""
        self._best_width = -1
        """The width of the latest choice, tries aside."""
        self._num_blocks = 0
        """Blocks whose drafts were verified, of all requests."""
        self._step_tokens = 0.0
        """Tokens expected of a step of the chosen option."""
        self.exploration = Exploration(len(self.widths), config)

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        if self.costs is None:
            return super().plan(candidates, load)
        return with_required_drafts(self._best_plan(candidates, load), candidates)

    def _best_plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        """Return the plan with the best ratio of expected tokens to milliseconds."""
        self._register(candidates)
        count = len(candidates)
        limit = self.max_mixed_rows
        prompt_rows = min(load.prompt_rows, max(limit - count, limit // 2))
        room = max(limit - count - prompt_rows, 0) if prompt_rows else 2**30
        work = StepWork(
            draft_rows=0,
            rows=count + prompt_rows,
            requests=count,
            context=load.context_tokens,
        )
        max_drafts = [0] * count
        use_chain = None
        if any(candidate.chain.tokens for candidate in candidates):
            max_drafts = self._plan_chains(candidates, work, room)
            use_chain = [n > 0 for n in max_drafts]
        num_chained = sum(max_drafts)
        drafters = [i for i, c in enumerate(candidates) if c.on_device and not max_drafts[i]]
        if not drafters:
            return DraftPlan(max_drafts=max_drafts, use_chain=use_chain)
        work = work._replace(rows=work.rows + num_chained, drafts=num_chained)
        self._steps_left -= 1
        is_due = self._steps_left <= 0 or self._chosen_for != (len(drafters), work.rows)
        if is_due or 0 < self._option.num_drafting < len(drafters):
            fields = [(candidates[i].slot, candidates[i].max_drafts) for i in drafters]
            slots, limits = np.array(fields).T
            expected = self.forecast.expected(slots)
            expected *= np.arange(self.widths[-1]) < limits[:, None]
            ranking = np.argsort(-expected.sum(1), kind="stable")
            drafters = [drafters[i] for i in ranking.tolist()]
            if is_due:
                self._chosen_for = len(drafters), work.rows
                blocks = self.forecast.sample(slots[ranking], expected[ranking])
                self._choose(blocks, work, room - num_chained)
        self.exploration.earn(self._step_tokens)
        width, num_drafting, num_verified = self._option
        for i in drafters[:num_drafting]:
            max_drafts[i] = min(candidates[i].max_drafts, self.widths[width])
        if self._tried is not None and num_drafting:
            drafting = [candidates[i].slot for i in drafters[:num_drafting]]
            self.exploration.begin_try(width, drafting, self._tried)
        self._tried = None
        if num_verified >= sum(max_drafts) - num_chained:
            return DraftPlan(max_drafts=max_drafts, use_chain=use_chain)
        rates = tuple(map(tuple, self.chances.table(width).tolist()))
        return DraftPlan(
            max_drafts=max_drafts,
            num_verified=num_verified,
            confidence=rates,
            use_chain=use_chain,
        )

    @property
    def confidence_by_place(self) -> tuple[tuple[int, int, float, float], ...]:
        return tuple(self.chances.logistic_fits())

    def observe(self, plan: Plan, result: StepResult) -> None:
        if self.costs is None:  # nothing is chosen by what could be learned
            return
        spans = plan.spans
        config = self.config
        drafting = [i for i, span in enumerate(spans) if span.method is not None]
        width = bisect_left(self.widths, max([spans[i].num_drafts for i in drafting], default=0))
        work = StepWork.of(plan, result, self.block_rows[width])
        if result.seconds is not None and work is not None:
            agrees = self.costs.observe(work, 1e3 * result.seconds, config)
            self.exploration.confirm(
                (width if drafting else -1) if agrees else None, self.costs.pace
            )
        self.forecast.advance()
        for table in (self.chances, self.chains):
            table.fade(min(len(spans) / config.request_memory, 1 / config.step_memory))
        num_verified = result.num_verified or [span.num_drafts for span in spans]
        verdicts = np.array((num_verified, result.num_accepted))
        for i, span in enumerate(spans):
            if span.method is None and num_verified[i] and span.slot in self._match_lengths:
                match = chain_evidence(self._match_lengths[span.slot], num_verified[i])
                self.chains.observe(0, match, *verdicts[:, [i]])
        if drafting and result.margins is not None:
            self._num_blocks += len(drafting)
            num_right = sum([result.num_accepted[i] for i in drafting])
            slots, drafts = np.array([(spans[i].slot, spans[i].num_drafts) for i in drafting]).T
            self.exploration.end_try(width, slots.tolist(), num_right)
            margins = np.array(result.margins)[drafting, : self.widths[width]]
            block = knot_weights(margin_evidence(margins, drafts))
            self.forecast.observe(slots, self.chances.chances(width, block))
            self.chances.observe(width, block, *verdicts[:, drafting])

    def _register(self, candidates: Sequence[Candidate]) -> None:
        """Note the requests that are new to their slots, and the lengths of chains' matches."""
        for request, _, _, slot, chain in candidates:
            if self._requests.get(slot) is not request:
                self._requests[slot] = request
                self._steps_left = 0
                self.forecast.clear(slot)
            if chain.tokens:
                self._match_lengths[slot] = chain.match_length

    def _plan_chains(self, candidates: Sequence[Candidate], work: StepWork, room: int) -> list[int]:
        """Return the number of drafts of its chain that each candidate verifies; 0 if its block is
        expected to bring more. work: of a step without drafts; room: number of drafts that fit."""
        assert self.costs is not None
        blocks = self.forecast.expected(np.array([c.slot for c in candidates])).sum(1)
        blocks *= [candidate.on_device for candidate in candidates]
        chains = [chain_evidence(c.match_length, len(c.tokens)) for *_, c in candidates]
        chances = [self.chains.chances(0, chain)[0] for chain in chains]
        num_drafts = sum(map(len, chances))
        drafts = np.array([0, num_drafts])
        plain, ms = self.costs.ms(work._replace(rows=work.rows + drafts, drafts=drafts))
        gain = sum([max(a.sum(), b) for a, b in zip(chances, blocks, strict=True)])
        price = (work.requests + gain) / ms * (ms - plain) / num_drafts
        max_drafts = [0] * len(candidates)
        for i, chain in enumerate(chances):
            if chain.sum() > blocks[i]:
                max_drafts[i] = min(int((chain > price).sum()), room)
                room -= max_drafts[i]
        return max_drafts

    def _choose(self, blocks: Floats, work: StepWork, room: int) -> None:
        """Choose the best kind of step, and for how many steps. blocks [n, 2, K]: chances of two
        possible blocks of each request that may draft, in descending order of their promise; work:
        of a step in which they do not draft; room: number of drafts that fit."""
        assert self.costs is not None
        count = len(blocks)
        options = self.options(count)
        widths, num_drafting, num_drafts, draft_rows, rows = options
        within = np.arange(self.widths[-1]) < np.array(self.widths)[:, None, None, None]
        narrowed = blocks * within
        gains = np.zeros(len(widths))
        for n in set(num_drafting[1:].tolist()):
            likeliest = np.sort(-narrowed[:, :n].reshape(len(within), -1))
            at = np.flatnonzero(num_drafting == n)
            gains[at] = np.cumsum(likeliest, 1)[widths[at], 2 * num_drafts[at] - 1] / -2
        limit = max(num_drafting[1:].min(), self._num_blocks)
        gains[(num_drafts > room) | (num_drafting > limit)] = -np.inf
        drafted = work._replace(
            draft_rows=draft_rows,
            rows=work.rows - count + rows,
            drafting=num_drafting,
            drafts=work.drafts + num_drafts,
        )
        ms = self.costs.ms(drafted)
        tokens = work.requests + gains
        rate = (tokens / ms).max()
        value = tokens - rate * ms
        best = value.argmax()
        tried = (value + self.exploration.credit[widths]).argmax()
        self._steps_left = self._hold(int(widths[best]), count)
        self._best_width = int(widths[best])
        if widths[tried] != widths[best]:
            if widths[tried] > widths[best]:
                self._tried = float(gains[tried])
            best = tried
            self._steps_left = 1
        self._option = Option(*options[:3, best].tolist())
        self._step_tokens = float(rate * ms[best])
        self.exploration.spend(int(widths[best]))
        self.exploration.set_shares(widths, tokens, ms)

    def _hold(self, width: int, count: int) -> int:
        """Return for how many steps a choice among so many requests holds. To draft, a new width
        and one that few blocks are known of are looked at after one step."""
        config = self.config
        if width < 0:
            return config.hold_steps
        num_blocks = self._num_blocks if width == self._best_width else 0
        return min(config.hold_steps, count, max(num_blocks // count, 1))

    def _list_options(self, count: int) -> Ints:
        """Return the kinds of steps of so many requests that may draft, as the fields of `Option`,
        rows of the drafter's blocks, and rows of these requests."""
        options = [(*Option(), 0, count)]
        for n in {max(round(share * count), 1) for share in self.config.shares}:
            for width, (drafts, block) in enumerate(zip(self.widths, self.block_rows, strict=True)):
                for num_drafts, rows in self.rows(count, n, drafts):
                    options.append((width, n, num_drafts, n * block, rows))
        return np.array(options).T


def chain_evidence(match_length: int, drafts: int) -> Floats:
    """Return the weights [1, drafts, B] of a chain's evidence: half the length of its match."""
    return knot_weights(np.full((1, drafts), match_length / 2))
