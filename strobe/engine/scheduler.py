"""Who runs, how far, and what became of it. Imports no torch.

    waiting --admit--> running --finish--> finished
       ^                  |
       +----preempt-------+        first come, first served; the newest makes room

Results may come one step late: a record whose request ended or was preempted while a step was in
flight keeps its slot and pages until that step is collected, and the step's result is dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from strobe.config import Limits
from strobe.engine.stats import EngineStats
from strobe.kv.lease import Lease, reserve_all
from strobe.kv.pages import PagePool
from strobe.request import FinishReason, Request, Status
from strobe.step import HostVerdict, PageWrite, Plan, Span, TokenEvent

logger = logging.getLogger(__name__)

DraftLength = Callable[[Request, int], int]
"""(request, drafts it may use) -> drafts to verify in this step, from 0 to that many."""


def full_length(request: Request, allowed: int) -> int:
    """Verify every draft the request may use."""
    return allowed


@dataclass(eq=False)
class Record:
    """A running request's hold on the engine.

    start: positions that have K/V once the steps in flight are done, at the least. goal: the
    tokens known when it was admitted; up to there it prefills, from there on it decodes.
    """

    request: Request
    slot: int
    lease: Lease
    start: int
    goal: int
    sent: int = 0
    in_flight: int = 0
    draining: bool = False

    @property
    def decoding(self) -> bool:
        return self.start >= self.goal


class Scheduler:
    """Continuous batching over leases. plan() and commit() alternate, up to `overlap` apart."""

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        *,
        host_methods: Collection[str] = (),
        prefix_caching: bool = True,
        recurrent: bool = False,
        draft_length: DraftLength = full_length,
    ):
        """host_methods: drafting methods that read the host's tokens, so that no result of theirs
        may be in flight when they draft. recurrent: the target's states have moved on where a step
        failed, so that it cannot be run again."""
        self.limits, self.pool = limits, pool
        self.host_methods, self.prefix_caching = frozenset(host_methods), prefix_caching
        self.draft_length, self.recurrent = draft_length, recurrent
        self.stats = EngineStats()
        self.waiting: deque[Request] = deque()
        self.running: list[Record] = []
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._records: dict[Request, Record] = {}
        self._draining: list[Record] = []
        self._flying: deque[list[Record]] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._draining)

    def add(self, request: Request) -> None:
        """Queue a request; the caller has checked that it fits the context."""
        self.stats.prompt_tokens += request.num_prompt
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside (stop string, abort). Ending one that has ended is nothing."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        if request in self._records:
            self._leave(self._records[request])

    def plan(self) -> Plan:
        """Choose this step's spans and reserve their pages, all or nothing."""
        budget = self.limits.max_num_batched_tokens
        chosen: list[tuple[Record, Span]] = []
        for record in [r for r in self.running if r.decoding]:
            if self._ready(record):
                span = self._decode_span(record)
                chosen.append((record, span))
                budget -= span.num_tokens + span.drafts
        most = self.limits.max_mixed_tokens
        if most is not None and any(record.decoding for record in self.running):
            taken = self.limits.max_num_batched_tokens - budget
            budget = min(budget, max(most - taken, most // 2))
        for record in [r for r in self.running if not r.decoding]:
            if budget <= 0:
                break
            span = self._prefill_span(record, budget)
            chosen.append((record, span))
            budget -= span.num_tokens
        fitting = self._reserve(chosen)
        crowded, chosen = len(fitting) < len(chosen), fitting
        admitted: list[tuple[int, Request, int]] = []
        while budget > 0 and self.waiting and self._slots and not crowded:
            admission = self._admit(self.waiting[0], budget)
            if admission is None:
                break
            record, span = admission
            self.waiting.popleft()
            admitted.append((record.slot, record.request, span.start))
            chosen.append(admission)
            budget -= span.num_tokens
        for record, span in chosen:
            record.in_flight += 1
            record.start += span.num_tokens
        if chosen:
            self._flying.append([record for record, _ in chosen])
        pages = [write for record, _ in chosen if (write := self._page_write(record))]
        return Plan([span for _, span in chosen], pages, admitted)

    def commit(self, plan: Plan, verdict: HostVerdict) -> list[TokenEvent]:
        """Take in the oldest step in flight: advance leases, apply stop rules, tell the news."""
        events: list[TokenEvent] = []
        self.stats.steps += 1
        for i, (record, span) in enumerate(zip(self._flying.popleft(), plan.spans, strict=True)):
            start = record.lease.length
            record.in_flight -= 1
            record.lease.commit(span.num_tokens + verdict.accepted[i])
            record.start += verdict.accepted[i]
            if record.draining:
                self._release_if_landed(record)
                continue
            if span.scored:
                known = span.request.prompt_logprobs
                known[span.start + 1 :] = verdict.prompt_logprobs[i]
            if span.rows:
                drafted = max(0, min(span.drafts, self.limits.max_model_len - 1 - start))
                events.append(self._take(record, start, drafted, i, verdict))
            if self.prefix_caching and not record.draining:
                record.lease.publish(record.request.tokens)
        return events

    def cancel(self, plan: Plan) -> None:
        """Give up the newest plan, whose step did not run: whom it admitted waits again, with a
        recurrent target everyone does; and the next plan tells the device every page anew, since it
        may not have seen this one's."""
        if not plan.spans:
            return
        admitted = {request for _, request, _ in plan.admitted}
        back: list[Record] = []
        for record, span in zip(self._flying.pop(), plan.spans, strict=True):
            record.in_flight -= 1
            record.lease.rollback()
            record.sent = 0
            record.start -= span.num_tokens
            if record.draining:
                self._release_if_landed(record)
            elif self.recurrent or record.request in admitted:
                back.append(record)
        for record in reversed(back):
            record.request.status = Status.WAITING
            self._leave(record)
            self.waiting.appendleft(record.request)

    def check(self) -> None:
        """Raises AssertionError where bookkeeping disagrees with itself."""
        self.pool.check()
        held = [*self._records.values(), *self._draining]
        assert len({r.slot for r in held}) == len(held), "a slot is used twice"
        assert len(held) + len(self._slots) == self.limits.max_num_seqs, "a slot is lost"
        if not held:
            assert self.pool.available == self.pool.capacity, "an idle engine holds pages"
        for record in held:
            assert record.lease.num_open == record.in_flight
            if record.decoding and not record.in_flight and not record.draining:
                assert record.lease.length == record.start == len(record.request.tokens) - 1

    def _ready(self, record: Record) -> bool:
        """Whether its next step may be planned while results of it are on their way."""
        request = record.request
        by_host = request.needs_host_tokens or request.method in self.host_methods
        return not (record.in_flight and by_host)

    def _decode_span(self, record: Record) -> Span:
        request = record.request
        allowed = min(request.num_drafts, self.limits.num_drafts)
        drafts = min(max(self.draft_length(request, allowed), 0), allowed) if allowed else 0
        bound = record.lease.length + record.lease.open
        return Span(request, record.slot, record.start, bound, None, drafts, 1 + drafts)

    def _prefill_span(self, record: Record, budget: int) -> Span:
        start = record.start
        tokens = tuple(record.request.tokens[start : min(record.goal, start + budget)])
        rows = 1 if start + len(tokens) == record.goal else 0
        scored = 0
        if record.request.scores_prompt:
            last = record.request.num_prompt - 1
            scored = max(0, min(start + len(tokens), last) - start)
        return Span(record.request, record.slot, start, start, tokens, 0, rows, scored)

    def _positions(self, span: Span) -> int:
        """Positions to reserve: a drafting request always gets the whole block."""
        if span.tokens is not None:
            return len(span.tokens)
        return self.limits.block if span.request.num_drafts else 1

    def _reserve(self, chosen: list[tuple[Record, Span]]) -> list[tuple[Record, Span]]:
        """Reserve for all of them. Where pages run out the newest running request makes room, and
        while a leaving one's pages are still on their way the newest chosen ones sit this step out.
        """
        while not reserve_all([(r.lease, self._positions(s)) for r, s in chosen]):
            if self._draining:
                chosen = chosen[:-1]
                continue
            victim = self.running[-1]
            self._preempt(victim)
            chosen = [(r, s) for r, s in chosen if r is not victim]
        return chosen

    def _admit(self, request: Request, budget: int) -> tuple[Record, Span] | None:
        """Start a waiting request if all its known tokens and a block more find pages."""
        lease = Lease(self.pool, self.limits.max_model_len)
        start = 0
        if self.prefix_caching and not request.scores_prompt:
            start = lease.adopt(request.tokens)
        record = Record(request, self._slots[-1], lease, start, len(request.tokens))
        span = self._prefill_span(record, budget)
        rest = record.goal - start + self.limits.block
        if lease.pages_for(rest) > self.pool.available:
            lease.release()
            return None
        reserved = reserve_all([(lease, self._positions(span))])
        assert reserved, "pages that were available are not"
        self._slots.pop()
        if request.num_cached is None:
            request.num_cached, request.admitted_at = start, time.monotonic()
            self.stats.prefix_queries += len(request.tokens)
            self.stats.prefix_hits += start
        request.status = Status.RUNNING
        self.running.append(record)
        self._records[request] = record
        return record, span

    def _page_write(self, record: Record) -> PageWrite | None:
        first, pages = record.sent, record.lease.pages
        record.sent = len(pages)
        return PageWrite(record.slot, first, tuple(pages[first:])) if first < len(pages) else None

    def _take(
        self, record: Record, start: int, drafted: int, i: int, verdict: HostVerdict
    ) -> TokenEvent:
        """Append the verdict's tokens up to the first one that ends the request."""
        request, tokens = record.request, verdict.tokens[i]
        count, reason = self._ending(request, tokens)
        kept = tokens[:count]
        request.tokens += kept
        self.stats.generation_tokens += count
        if drafted:
            self._count(request, drafted, verdict.accepted[i], count)
        if reason is not None:
            request.status, request.finish_reason = Status.FINISHED, reason
            self._leave(record)
        accepted, logprobs = min(verdict.accepted[i], count), verdict.logprobs.get(i, [])[:count]
        return TokenEvent(request, kept, reason, drafted, accepted, logprobs, start)

    def _ending(self, request: Request, tokens: list[int]) -> tuple[int, FinishReason | None]:
        """How many of `tokens` the request takes, and why it ends there, if it does."""
        if request.error is not None:
            return 0, "error"
        sampling, made = request.sampling, request.num_output
        room = self.limits.max_model_len - len(request.tokens)
        if sampling.max_tokens is not None:
            room = min(room, sampling.max_tokens - made)
        if not request.stop_ids.isdisjoint(tokens):
            for i, token in enumerate(tokens[:room]):
                # Before min_tokens only a grammar that is at its end lets an end token be made.
                bound = request.structured is not None
                if token in request.stop_ids and (bound or made + i >= sampling.min_tokens):
                    if token in sampling.stop_token_ids:
                        request.stop_reason = token
                    return i + 1, "stop"
        return (room, "length") if len(tokens) >= room else (len(tokens), None)

    def _count(self, request: Request, drafted: int, accepted: int, committed: int) -> None:
        """Drafts count as accepted up to the token that ended the answer; a stop string, which is
        found later in the text, takes nothing back."""
        accepted = min(accepted, committed)
        counts = request.speculation
        counts.add(drafted, accepted)
        self.stats.verified(drafted, accepted)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "verify request=%s accepted=%d/%d committed=%d acceptance_rate=%.3f",
                request.id,
                accepted,
                drafted,
                committed,
                counts.accepted / counts.drafted,
            )

    def _preempt(self, record: Record) -> None:
        """Take a running request's pages; it starts over from the tokens it has, first in line."""
        request = record.request
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self._leave(record)
        self.waiting.appendleft(request)

    def _leave(self, record: Record) -> None:
        self.running.remove(record)
        del self._records[record.request]
        record.draining = True
        self._draining.append(record)
        self._release_if_landed(record)

    def _release_if_landed(self, record: Record) -> None:
        if not record.in_flight:
            record.lease.release()
            self._draining.remove(record)
            self._slots.append(record.slot)
