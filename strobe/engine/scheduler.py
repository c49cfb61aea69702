"""Who runs, how far, and what became of it. Imports no torch.

    waiting --admit--> running --finish--> finished
       ^                  |
       +----preempt-------+        first come, first served; the newest makes room

Results may come one step late: a record whose request ended or was preempted while a step was in
flight keeps its slot and pages until that step's result is in, which is dropped.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from operator import eq
from typing import TYPE_CHECKING

from strobe.config import Limits
from strobe.engine.outcomes import EngineStats, Outcomes
from strobe.engine.record import Record
from strobe.engine.suspects import Suspects
from strobe.kv.lease import Lease, reserve_all
from strobe.kv.pages import PagePool
from strobe.request import FinishReason, Request, Status
from strobe.spec.budget import Advice, Allotment, Budget, Candidate, Chain, Load
from strobe.step import TAIL, Plan, Span, StepResult, TokenEvent, num_rows

if TYPE_CHECKING:
    from strobe.spec.base import HostProposer

_LOOKED_AT = 64
"""Waiting requests that one plan looks at, at most."""


class Scheduler:
    """Continuous batching over leases. plan() and commit() alternate, up to `overlap` apart."""

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        *,
        host: Mapping[str, HostProposer] | None = None,
        prefix_caching: bool = True,
        budget: Budget | None = None,
    ):
        """host: methods that draft on the host, by what it knows of a request's tokens. budget: how
        many drafts are verified."""
        self.limits, self.pool = limits, pool
        self.host = host or {}
        self.prefix_caching = prefix_caching
        self.budget = budget or Budget()
        self.outcomes = Outcomes(limits)
        self.waiting: deque[Request] = deque()
        self.running: list[Record] = []
        self.alone: Request | None = None
        """The request that the newest plan runs alone, since a step of it failed."""
        self._draining: list[Record] = []
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._flying: deque[list[Record]] = deque()
        self._suspects, self._advice = Suspects(), Advice()

    @property
    def stats(self) -> EngineStats:
        return self.outcomes.stats

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._draining)

    def add(self, request: Request) -> None:
        """Queue a request; the caller has checked that it fits the context."""
        self.stats.prompt_tokens += request.num_prompt
        at = bisect_right(self.waiting, request.priority, key=_priority)
        self.waiting.insert(at, request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside (stop string, abort). Ending one that has ended is nothing."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        for record in [r for r in self.running + self._draining if r.request is request]:
            self._leave(record)

    def plan(self) -> Plan:
        """Choose this step's spans and reserve their pages, all or nothing."""
        self.alone = alone = self._suspects.first()
        if alone is not None and self._flying:
            return Plan()  # a failed step of its own must be the only one in flight
        for record in [record for record in self._draining if not record.draining]:
            self._draining.remove(record)
            self.waiting.remove(record.request)
            self.running.append(record)
            record.request.status, record.sent = Status.RUNNING, 0
        running = [r for r in self.running if alone is None or r.request is alone]
        # Who is drafted for on the host waits for its tokens.
        ready = [r for r in running if r.decoding and not (r.in_flight and r.host)]
        chosen, allotted = self._decode_spans(ready)
        taken = num_rows([span for _, span in chosen], allotted.verified)
        budget = self.limits.max_num_batched_tokens - taken
        most = self.limits.max_mixed_tokens
        if most is not None and any(record.decoding for record in running):
            budget = min(budget, max(most - taken, most // 2))
        for record in [r for r in running if not r.decoding]:
            if budget <= 0:
                break
            span = self._prefill_span(record, budget)
            chosen.append((record, span))
            budget -= span.num_rows
        fitting = self._reserve(chosen)
        crowded, chosen = len(fitting) < len(chosen), fitting
        chosen += [] if crowded else self._admit_waiting(alone, budget)
        if alone is not None and not chosen and not self._flying:
            self._suspects.clear()  # it finds no room beside the others
            return self.plan()
        for record, span in chosen:
            record.in_flight += 1
            record.start += span.num_certain
        if chosen:
            self._flying.append([record for record, _ in chosen])
        spans = tuple([span for _, span in chosen])
        admissions = tuple([r.admission(span.start) for r, span in chosen if not r.sent])
        pages = tuple([write for record, _ in chosen if (write := record.page_write())])
        return Plan(spans, pages, admissions, allotted.verified, allotted.confidence)

    def commit(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        """Take in the oldest step in flight: advance leases, apply stop rules, make the events. All
        of it or, where anything raises, nothing; then `cancel_all` must follow."""
        records = [record for record in self._flying[0] if not record.draining]
        before = [(len(r.request.tokens), r.request.started, r.lease.length) for r in records]
        try:
            events, ended = self._commit(plan, result)
            self.alone = None  # what is published is not written again, so nobody goes on there
            for record in records:
                if self.prefix_caching and record.request.error is None:
                    record.lease.publish(record.request.tokens)
            for record in ended:
                self._leave(record)
        except BaseException:
            for record, (count, started, length) in zip(records, before, strict=True):
                record.rewind(count, started, length)
            raise
        self._flying.popleft()
        return events

    def _commit(self, plan: Plan, result: StepResult) -> tuple[list[TokenEvent], list[Record]]:
        taken, ends = list[tuple[Request, TokenEvent]](), dict[int, int]()
        for i, (record, span) in enumerate(zip(self._flying[0], plan.spans, strict=True)):
            request, start = record.request, record.lease.length
            record.in_flight -= 1
            record.lease.commit(span.num_certain + result.accepted[i])
            record.start += result.accepted[i]
            if record.draining:
                ends[i] = 0
                continue
            self._suspects.passed(request, record.lease.length)
            if span.scored and i not in result.errors:
                request.prompt_logprobs[span.start + 1 :] = result.prompt_logprobs[i]
            if span.logits or i in result.errors:
                drafted = span.drafts if result.drafted is None else result.drafted[i]
                drafted = max(0, min(drafted, self.limits.max_model_len - 1 - start))
                may = request.num_drafts and start >= record.goal
                made = span.drafts if may else None
                event = self.outcomes.take(request, start, made, drafted, i, result)
                taken.append((request, event))
                if event.finish_reason is not None:
                    ends[i] = len(event.tokens)
        seen = result.until(ends, plan.spans)
        self._advice.of("The draft policy", lambda: self.budget.observe(plan, seen), None)
        self.stats.steps += 1
        for request, event in taken:
            self.outcomes.count(request, event)
        return [event for _, event in taken], [self._flying[0][i] for i in ends]

    def cancel(self, plan: Plan, error: str = "") -> list[TokenEvent]:
        """Give up the newest plan, whose step failed: its requests wait again, since part of the
        step may have been done, and then run alone for a few steps. A request whose steps go on
        failing though it is alone ends with the error, which the event returned says."""
        if not plan.spans:
            return []
        records = self._flying.pop()
        for record, span in zip(records, plan.spans, strict=True):
            record.in_flight -= 1
            record.lease.rollback()
            record.start -= span.num_certain
        return self._start_over(records, error)

    def cancel_all(self, error: str) -> list[TokenEvent]:
        """Give up all steps in flight, as `cancel` does, since the oldest one's result could not be
        taken in, and the others were launched on top of it."""
        records = list(dict.fromkeys(itertools.chain(*self._flying)))
        self._flying.clear()
        for record in records:
            record.in_flight, record.start = 0, record.lease.length
            while record.lease.reserved:
                record.lease.rollback()
        return self._start_over(records, error)

    def _start_over(self, records: list[Record], error: str) -> list[TokenEvent]:
        back = [record.request for record in records if not record.draining]
        for record in reversed(records):
            if record.draining:
                self._leave(record)
                continue
            if record.start > record.request.failed_at:
                record.request.failures = 0
            record.request.failed_at = record.start
            self._wait_again(record, keep=record.request is self.alone and not record.in_flight)
        request = self._suspects.failed(back)
        if request is None:
            return []
        request.error = f"The step failed {request.failures} times with this request alone: {error}"
        self.finish(request, "error")
        return [self.outcomes.event(request, [])]

    def check(self) -> None:
        """Raises AssertionError where bookkeeping disagrees with itself."""
        self.pool.check()
        held = [*self.running, *self._draining]
        assert len({r.slot for r in held}) == len(held), "a slot is used twice"
        assert len(held) + len(self._slots) == self.limits.max_num_seqs, "a slot is lost"
        if not held:
            assert self.pool.available == self.pool.capacity, "an idle engine holds pages"
        for record in held:
            assert len(record.lease.reserved) == record.in_flight
            if record.decoding and not record.in_flight and not record.draining:
                assert record.lease.length == record.start == len(record.request.tokens) - 1

    def _decode_spans(self, records: list[Record]) -> tuple[list[tuple[Record, Span]], Allotment]:
        """Each record's newest token, and the drafts that it verifies."""
        if not records:
            return [], Allotment([])
        most = self.limits.num_drafts
        prompt_rows = sum([r.goal - r.start for r in self.running if not r.decoding])
        context = sum([record.start for record in records])
        load = Load(len(records), prompt_rows, len(self.waiting), context)
        asked = [self._candidate(r, min(r.request.num_drafts, most)) for r in records]
        every = Budget().allot(asked, load)
        found = self._advice.of("The draft policy", lambda: self.budget.allot(asked, load), every)
        chained = found.chained or [bool(one.chain.tokens) for one in asked]
        chains = [one.chain if own else None for one, own in zip(asked, chained, strict=True)]
        spans = map(self._decode_span, records, found.most, chains)
        return list(zip(records, spans, strict=True)), found

    def _candidate(self, record: Record, most: int) -> Candidate:
        request, host, chain = record.request, record.host, Chain()
        if most and host is not None:
            chain = self._advice.of("Drafting", lambda: host.propose(request, most), chain)
        on_device = most > 0 and record.device is not None
        most = most if on_device else len(chain.tokens)
        return Candidate(request, most, on_device, record.slot, chain)

    def _decode_span(self, record: Record, count: int, chain: Chain | None) -> Span:
        slot, start, bound = record.slot, record.start, record.lease.length + record.lease.open
        if chain is not None or record.device is None:
            drafts = () if chain is None else chain.tokens[:count]
            tokens = (TAIL if record.host is None else record.request.tokens[-1], *drafts)
            return Span(slot, start, bound, tokens, len(drafts), None, len(tokens))
        method = record.device if count else None
        return Span(slot, start, bound, (TAIL,), count, method, 1 + count)

    def _prefill_span(self, record: Record, budget: int) -> Span:
        request, start = record.request, record.start
        end = min(record.goal, start + budget)
        scored, top = (), 0
        if request.scores_prompt:
            scored = tuple(request.tokens[start + 1 : min(end + 1, request.num_prompt)])
            top = request.sampling.prompt_logprobs or 0
        tokens, logits = tuple(request.tokens[start:end]), int(end == record.goal)
        return Span(record.slot, start, start, tokens, 0, None, logits, scored, top)

    def _positions(self, record: Record, span: Span) -> int:
        """Positions to reserve: a drafting request always gets the whole block."""
        drafting = record.decoding and record.request.num_drafts
        return self.limits.block if drafting else span.num_rows

    def _reserve(self, chosen: list[tuple[Record, Span]]) -> list[tuple[Record, Span]]:
        """Reserve for all of them. Where pages run out the newest running request of the lowest
        priority makes room, and while a leaving one's pages are still on their way the newest
        chosen ones sit this step out."""
        while not reserve_all([(r.lease, self._positions(r, s)) for r, s in chosen]):
            if self._draining:
                chosen = chosen[:-1]
                continue
            victim = max(reversed(self.running), key=lambda record: record.request.priority)
            victim.request.num_preemptions += 1
            self.stats.preemptions += 1
            self._wait_again(victim)
            chosen = [(r, s) for r, s in chosen if r is not victim]
        return chosen

    def _admit_waiting(self, alone: Request | None, budget: int) -> list[tuple[Record, Span]]:
        """Start waiting requests, in their order, as far as slots, pages and rows go. Who would
        compute what another is computing waits for that."""
        admitted: list[tuple[Record, Span]] = []
        first = itertools.islice(self.waiting, _LOOKED_AT)
        for request in [alone] if alone is not None else list(first):
            if budget <= 0 or not self._slots or request.status is not Status.WAITING:
                break
            if self._computed_elsewhere(request):
                continue
            admission = self._admit(request, budget)
            if admission is None:
                break
            self.waiting.remove(request)
            admitted.append(admission)
            budget -= admission[1].num_rows
        return admitted

    def _admit(self, request: Request, budget: int) -> tuple[Record, Span] | None:
        """Start a waiting request if all its known tokens and a block more find pages."""
        lease, start = Lease(self.pool, self.limits.max_model_len, request.page_keys), 0
        if self.prefix_caching:
            self.pool.extend(request.page_keys, request.tokens)
            start = 0 if request.scores_prompt else lease.adopt(request.tokens)
        record = Record(request, self._slots[-1], lease, start, len(request.tokens))
        for method in request.methods if request.num_drafts else ():
            if method in self.host:
                record.host = self.host[method]
            else:
                record.device = method
        span = self._prefill_span(record, budget)
        rest = record.goal - start + self.limits.block
        if lease.pages_for(rest) > self.pool.available:
            lease.release()
            return None
        reserved = reserve_all([(lease, self._positions(record, span))])
        assert reserved, "pages that were available are not"
        self._slots.pop()
        if request.num_cached is None:
            request.num_cached, request.queued = start, time.monotonic() - request.arrived_at
            self.stats.prefix_queries += len(request.tokens)
            self.stats.prefix_hits += start
        request.status = Status.RUNNING
        self.running.append(record)
        return record, span

    def _computed_elsewhere(self, request: Request) -> bool:
        """Whether a running request is computing at least half of what it would have to."""
        computing = [record for record in self.running if record.lease.length < record.goal]
        if not computing or not self.prefix_caching or request.scores_prompt:
            return False
        keys, size = self.pool.extend(request.page_keys, request.tokens), self.pool.page_size
        others = [r.request.page_keys[: (r.goal - 1) // size] for r in computing]
        done = next((i for i, k in enumerate(keys) if self.pool.lookup(k) is None), len(keys))
        # A key stands for all the tokens up to its page's end: equal ones are a common prefix's.
        coming = max([sum(map(eq, keys, other)) for other in others]) - done
        return 2 * size * coming >= len(request.tokens) - done * size

    def _wait_again(self, record: Record, *, keep: bool = False) -> None:
        """Take a running request's pages; it starts over from the tokens it has, first in line of
        its priority. keep: leave it the pages, and the next plan goes on from there."""
        request = record.request
        request.status = Status.WAITING
        self._leave(record, keep=keep)
        self.waiting.insert(bisect_left(self.waiting, request.priority, key=_priority), request)

    def _leave(self, record: Record, *, keep: bool = False) -> None:
        """Have a record give back its slot and pages, once no step of it is in flight."""
        if record in self.running:
            self.running.remove(record)
            self._draining.append(record)
        record.draining = not keep
        if record.draining and not record.in_flight and record in self._draining:
            record.lease.release()
            self._draining.remove(record)
            self._slots.append(record.slot)


def _priority(request: Request) -> int:
    return request.priority
