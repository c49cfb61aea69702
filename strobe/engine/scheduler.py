"""Chooses each step's requests and their rows, and commits the results. Imports no torch.

    waiting --admit--> running --finish--> finished
       ^                  |
       +----preempt-------+        first come, first served; the newest is preempted

A request waits for requests of a higher priority, for a prefix that another one computes, and for
room. But once MAX_PASSED requests that arrived later were admitted before it, it is overdue: it
goes first, waits for no prefix, and is preempted last. So its wait has a bound: the requests
admitted before it, and the running ones that it then waits for.

Results may come one step late: a request that ended or was preempted while a step was in flight
keeps its slot and pages until that step's result is in, which is dropped.
"""

from __future__ import annotations

import itertools
import logging
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from operator import eq
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from strobe.config import Limits
from strobe.counters import EngineStats
from strobe.engine.fault_isolation import Advice, FaultIsolation
from strobe.engine.result_processor import ResultProcessor, SpanCounts
from strobe.engine.running_request import Residence, RunningRequest
from strobe.engine.state_ledger import StateLedger
from strobe.kv.host_tier import HostTier
from strobe.kv.kept_states import KeptStates, SequenceStates
from strobe.kv.lease import Lease, reserve_all
from strobe.kv.pages import PagePool
from strobe.request import FinishReason, Request, Status
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftChain, DraftPlan, DraftPolicy
from strobe.speculation.shadow.ledger import ShadowLedger
from strobe.step import (
    TAIL,
    HostCopies,
    Plan,
    ShadowWork,
    Span,
    StepResult,
    TokenEvent,
    num_rows,
)

if TYPE_CHECKING:
    from strobe.speculation.proposer import Drafter

logger = logging.getLogger(__name__)

Scheduled: TypeAlias = "list[tuple[RunningRequest, Span]]"
_MAX_SCANNED = 64
"""Maximum number of waiting requests that one plan looks at."""


def _place(request: Request) -> tuple[bool, int]:
    """Return a request's place in line: overdue ones first, then by priority."""
    return not request.is_overdue, 0 if request.is_overdue else request.scheduling.priority


class PrefixCache(NamedTuple):
    """What prompts begin from.

    enabled: whether they begin from cached pages. kept_states: of a target with recurrent layers,
    whose cached prefixes end where a state is kept. host: the cache's tier in host memory."""

    enabled: bool = True
    kept_states: KeptStates | None = None
    host: HostTier | None = None


class Scheduler:
    """Continuous batching over leases. plan() and commit() alternate, up to `overlap` apart."""

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        *,
        drafters: Mapping[str, Drafter] | None = None,
        prefix_cache: PrefixCache | None = None,
        draft_policy: DraftPolicy | None = None,
        shadow: ShadowLedger | None = None,
    ):
        """drafters: proposers of each drafting method. prefix_cache: None for one of pages only.
        draft_policy: chooses the number of drafts to verify. shadow: scores drafters, in shadow
        mode."""
        cache = prefix_cache or PrefixCache()
        self.limits = limits
        self.pool = pool
        self.drafters = drafters or {}
        self.prefix_caching = cache.enabled
        self.states = None if cache.kept_states is None else StateLedger(cache.kept_states)
        self.host = cache.host
        self.draft_policy = draft_policy or DraftPolicy()
        self.shadow = shadow
        self.results = ResultProcessor(limits)
        self.reset_stats()
        self.waiting: deque[Request] = deque()
        self.running: list[RunningRequest] = []
        self.alone: Request | None = None
        """The request that the newest plan runs alone, since a step of it failed."""
        self._set_aside: list[RunningRequest] = []
        """Requests that are suspended or leaving."""
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[list[RunningRequest]] = deque()
        self._orders = itertools.count()
        self._fault_isolation = FaultIsolation()
        self._advice = Advice()

    @property
    def stats(self) -> EngineStats:
        return self.results.stats

    def reset_stats(self) -> None:
        """Clear all counters."""
        self.results.stats = EngineStats()
        if self.shadow is not None:
            self.shadow.stats = self.results.stats

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._set_aside)

    def add(self, request: Request) -> None:
        """Queue a request; the caller has checked that it fits the context."""
        self.stats.prompt_tokens += request.num_prompt
        request.order = next(self._orders)
        at = bisect_right(self.waiting, _place(request), key=_place)
        self.waiting.insert(at, request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside (stop string, abort). No effect on a request that has
        ended."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self.waiting.remove(request)
            if self.host is not None:
                self.host.end(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        for record in [r for r in self.running + self._set_aside if r.request is request]:
            self._retire(record)

    def plan(self) -> Plan:
        """Choose this step's spans and reserve their pages, all or nothing. If anything raises,
        nothing stays reserved, and requests that this plan admitted wait again."""
        self.alone = solo = self._fault_isolation.solo_request()
        if solo is not None and self._in_flight:
            return Plan()  # a failed step of its own must be the only one in flight
        for record in [record for record in self._set_aside if not record.is_leaving]:
            self._resume(record)
        if self.host is not None:
            self.host.settle()
        running = list(self.running)
        try:
            return self._plan(solo)
        except BaseException:
            self._undo_plan(running)
            raise

    def _undo_plan(self, running: list[RunningRequest]) -> None:
        """Drop what a failed plan has reserved, and requeue what it has admitted. running: the
        requests that ran before it. Each has one reservation for each step in flight."""
        if self.host is not None:
            self.host.revert()
        for record in [*reversed(self.running), *self._set_aside]:
            while len(record.lease.reserved) > record.in_flight:
                record.lease.rollback()
            record.pages_sent = min(record.pages_sent, record.lease.num_columns)
            if record in self.running and record not in running:
                self._requeue(record)

    def _plan(self, solo: Request | None) -> Plan:
        """Choose spans and reserve their pages. solo: the only request to run, if any."""
        running = [r for r in self.running if solo is None or r.request is solo]
        # Drafting on the host needs all tokens, so such requests wait for their results.
        ready = [r for r in running if r.is_decoding and not (r.in_flight and r.host_proposer)]
        chosen, draft_plan = self._decode_spans(ready)
        decode_rows = num_rows([span for _, span in chosen], draft_plan.num_verified)
        token_budget = self._prompt_budget(running, decode_rows)
        for record in [r for r in running if not r.is_decoding]:
            if token_budget <= 0:
                break
            span = self._prefill_span(record, token_budget)
            chosen.append((record, span))
            token_budget -= span.num_rows
        fitting = self._reserve(chosen)
        if len(fitting) == len(chosen):  # there may be pages for others
            fitting += self._admit_waiting(solo, token_budget)
        chosen = fitting
        if solo is not None and not chosen and not self._in_flight:
            self._fault_isolation.clear()  # no room for it next to the others
            return self.plan()
        admitted = [r.admission(span.start) for r, span in chosen if not r.pages_sent]
        pages = [write for record, _ in chosen for write in record.page_writes()]
        plan = Plan(
            spans=tuple([span for _, span in chosen]),
            pages=tuple(pages),
            admitted=tuple(admitted),
            num_verified=draft_plan.num_verified,
            confidence=draft_plan.confidence,
            states=() if self.states is None else self.states.copies(chosen),
            shadow=self._plan_shadow(chosen),
        )
        if self.host is not None:  # after all that may evict
            plan = plan._replace(host=self._plan_copies(self.host, plan.spans))
        self._launch(chosen)  # last, since `_undo_plan` does not undo it
        return plan

    def _plan_copies(self, host: HostTier, spans: Sequence[Span]) -> HostCopies | None:
        """Return a plan's copies between the tiers, and count them."""
        prompts = [span for span in spans if span.num_context_rows > 1]
        copies = host.copies(
            has_step=bool(spans),
            prompts=[(span.start, span.start + span.num_rows) for span in prompts],
        )
        if copies is not None:
            self.stats.host_saves += len(copies.evicted) + len(copies.saved)
            self.stats.host_loads += len(copies.loaded)
        return copies

    def _plan_shadow(self, chosen: Scheduled) -> ShadowWork | None:
        shadow = self.shadow
        if shadow is None:
            return None
        return self._advice.of("Shadow mode", lambda: shadow.plan(chosen), None)

    def _launch(self, chosen: Scheduled) -> None:
        """Advance the requests of a plan by its spans."""
        if chosen:
            self._in_flight.append([record for record, _ in chosen])
        for record, span in chosen:
            record.in_flight += 1
            record.start += span.num_context_rows
            record.pages_sent = record.lease.num_columns

    def _prompt_budget(self, running: list[RunningRequest], decode_rows: int) -> int:
        """Return the maximum of prompt rows in the step, in addition to its decoding rows."""
        budget = self.limits.max_num_batched_tokens - decode_rows
        max_mixed = self.limits.max_mixed_tokens
        if max_mixed is not None and any(record.is_decoding for record in running):
            budget = min(budget, max(max_mixed - decode_rows, max_mixed // 2))
        return budget

    def commit(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        """Commit the oldest step in flight: advance leases, apply stop rules, make events. If
        anything raises, nothing is committed, and `cancel_all` must follow."""
        records = [record for record in self._in_flight[0] if not record.is_leaving]
        before = [(len(r.request.tokens), r.request.started, r.lease.length) for r in records]
        try:
            events, ended = self._commit(plan, result)
            self.alone = None  # published pages are not written again, so no request resumes there
            if self.prefix_caching:
                self._publish(records)
            if self.states is not None:
                self._commit_states(self.states, plan, records, [length for _, _, length in before])
            for record in ended:
                self._retire(record)
            if self.pool.has_windows:
                for record in records:
                    record.lease.give_back()
        except BaseException:
            for record, (count, started, length) in zip(records, before, strict=True):
                record.rewind(count, started, length)
            raise
        self._in_flight.popleft()
        return events

    def _publish(self, records: list[RunningRequest]) -> None:
        """Add the pages that requests have filled to the prefix cache."""
        for record in records:
            if record.lease.length >= record.lease.publish_from and record.request.error is None:
                record.lease.publish(record.request.tokens)

    def _commit_states(
        self, ledger: StateLedger, plan: Plan, records: list[RunningRequest], starts: list[int]
    ) -> None:
        """Index the states that a step has kept. starts: the records' positions before it."""
        for record in records:
            ledger.end_revival(record)
        if not plan.states:
            return
        by_slot = {r.slot: (r, start) for r, start in zip(records, starts, strict=True)}
        for copy in plan.states:
            if copy.keeps and copy.slot in by_slot:
                record, start = by_slot[copy.slot]
                self.stats.states_kept += ledger.commit(record, copy, start)

    def _commit(
        self, plan: Plan, result: StepResult
    ) -> tuple[list[TokenEvent], list[RunningRequest]]:
        event_pairs: list[tuple[Request, TokenEvent]] = []
        ends: dict[int, int] = {}
        num_verified = result.num_verified or [span.num_drafts for span in plan.spans]
        max_length = self.limits.max_model_len
        for i, (record, span) in enumerate(zip(self._in_flight[0], plan.spans, strict=True)):
            request = record.request
            lease = record.lease
            start = lease.length
            num_accepted = result.num_accepted[i]
            record.in_flight -= 1
            lease.commit(span.num_context_rows + num_accepted)
            record.start += num_accepted
            if record.is_leaving:
                ends[i] = 0
                continue
            if self._fault_isolation.is_active:
                self._fault_isolation.succeeded(request, lease.length)
            if span.scored_tokens and i not in result.errors:
                request.prompt_logprobs[span.start + 1 :] = result.prompt_logprobs[i]
            if span.num_logits or i in result.errors:
                can_draft = request.num_drafts and start >= record.prefill_end
                counts = SpanCounts(
                    num_proposed=span.num_drafts if can_draft else None,
                    num_verified=max(0, min(num_verified[i], max_length - 1 - start)),
                    num_computed_tokens=start,
                )
                event = self.results.apply(request, i, result, counts)
                if self.shadow is not None and lease.observed:
                    resolve = partial(self.shadow.resolve, request)
                    event = event._replace(scored=self._advice.of("Shadow mode", resolve, []))
                event_pairs.append((request, event))
                if event.finish_reason is not None:
                    ends[i] = len(event.tokens)
        counted = result.truncate(ends, plan.spans)
        self._advice.of("The draft policy", lambda: self.draft_policy.observe(plan, counted), None)
        self.stats.steps += 1
        self.results.count(event_pairs)
        return [event for _, event in event_pairs], [self._in_flight[0][i] for i in ends]

    def cancel(self, plan: Plan, error: str = "") -> list[TokenEvent]:
        """Give up the newest plan, whose step failed. Its requests wait again, since part of the
        step may have run, and then run alone for a few steps. A request that keeps failing alone
        ends with the error, in the event returned."""
        if self.host is not None:
            self.host.revert()
        if not plan.spans:
            return []
        records = self._in_flight.pop()
        for record, span in zip(records, plan.spans, strict=True):
            record.in_flight -= 1
            record.lease.rollback()
            record.start -= span.num_context_rows
        return self._start_over(records, error)

    def cancel_all(self, error: str) -> list[TokenEvent]:
        """Give up all steps in flight, as `cancel` does: the oldest one's result could not be
        committed, and the others build on it."""
        if self.host is not None:
            self.host.revert()
        records = list(dict.fromkeys(itertools.chain(*self._in_flight)))
        self._in_flight.clear()
        for record in records:
            record.in_flight = 0
            record.start = record.lease.length
            while record.lease.reserved:
                record.lease.rollback()
        return self._start_over(records, error)

    def _start_over(self, records: list[RunningRequest], error: str) -> list[TokenEvent]:
        requeued = [record.request for record in records if not record.is_leaving]
        for record in reversed(records):
            if record.is_leaving:
                self._retire(record)
                continue
            if record.start > record.request.failed_at:
                record.request.failures = 0
            record.request.failed_at = record.start
            if record.request is self.alone and not record.in_flight:
                self._suspend(record)
            else:
                self._requeue(record)
        request = self._fault_isolation.failed(requeued)
        if request is None:
            return []
        request.error = f"The step failed {request.failures} times with this request alone: {error}"
        self.finish(request, "error")
        return [self.results.make_event(request)]

    def _decode_spans(self, records: list[RunningRequest]) -> tuple[Scheduled, DraftPlan]:
        """Make the decoding requests' spans: each one's newest token and the drafts to verify."""
        if not records:
            return [], DraftPlan(max_drafts=[])
        max_drafts = self.limits.num_drafts
        load = BatchLoad(self._prompt_rows(), sum([record.start for record in records]))
        candidates = [self._candidate(r, min(r.request.num_drafts, max_drafts)) for r in records]
        plan = self._advice.of(
            "The draft policy",
            lambda: self.draft_policy.plan(candidates, load),
            default=DraftPolicy().plan(candidates, load),
        )
        use_chain = plan.use_chain or [bool(c.chain.tokens) for c in candidates]
        chains = [c.chain if used else None for c, used in zip(candidates, use_chain, strict=True)]
        scheduled = [
            (record, self._decode_span(record, count, chain))
            for record, count, chain in zip(records, plan.max_drafts, chains, strict=True)
        ]
        return scheduled, plan

    def _prompt_rows(self) -> int:
        """Return rows of prompts still to be computed: of running requests, and of waiting ones for
        which there are slots and pages."""
        rows = sum([r.prefill_end - r.start for r in self.running if not r.is_decoding])
        room = self.pool.available * self.pool.page_size
        for request in itertools.islice(self.waiting, len(self._slots)):
            room -= len(request.tokens) + self.limits.lookahead
            rows += len(request.tokens) if room >= 0 else 0
        return rows

    def _candidate(self, record: RunningRequest, max_drafts: int) -> Candidate:
        request = record.request
        host = record.host_proposer
        chain = DraftChain()
        if max_drafts and host is not None:
            chain = self._advice.of("Drafting", lambda: host.propose(request, max_drafts), chain)
        on_device = max_drafts > 0 and record.device_method is not None
        return Candidate(
            request=request,
            max_drafts=max_drafts if on_device else len(chain.tokens),
            on_device=on_device,
            slot=record.slot,
            chain=chain,
        )

    def _decode_span(self, record: RunningRequest, count: int, chain: DraftChain | None) -> Span:
        """Make the span of a request's newest token and `count` drafts: of the chain, if there is
        one, or the device's."""
        drafts_on_device = chain is None and record.device_method is not None
        drafts: tuple[int, ...] = () if chain is None else chain.tokens[:count]
        newest = TAIL
        if record.host_proposer is not None and not drafts_on_device:
            newest = record.request.tokens[-1]
        num_drafts = count if drafts_on_device else len(drafts)
        return Span(
            slot=record.slot,
            start=record.start,
            max_start=record.lease.length + record.lease.open,
            tokens=(newest, *drafts),
            num_drafts=num_drafts,
            method=record.device_method if drafts_on_device and count else None,
            num_logits=1 + num_drafts,
        )

    def _prefill_span(self, record: RunningRequest, token_budget: int) -> Span:
        request = record.request
        start = record.start
        end = min(record.prefill_end, start + token_budget)
        if self.states is not None and record.states is not None:
            end = self.states.span_end(record.states, start, end, record.prefill_end)
        span = Span(
            slot=record.slot,
            start=start,
            max_start=start,
            tokens=tuple(request.tokens[start:end]),
            num_logits=int(end == record.prefill_end),
        )
        if not request.wants_prompt_logprobs:
            return span
        return span._replace(
            scored_tokens=tuple(request.tokens[start + 1 : min(end + 1, request.num_prompt)]),
            top_logprobs=request.sampling.prompt_logprobs or 0,
        )

    def _positions_to_reserve(self, record: RunningRequest, span: Span) -> int:
        """Return the positions to reserve: a drafting request always gets a whole block."""
        drafting = record.is_decoding and (record.request.num_drafts or record.lease.observed)
        return self.limits.lookahead if drafting else span.num_rows

    def _reserve(self, chosen: Scheduled) -> Scheduled:
        """Reserve pages for all of them. If pages run out, the newest running request of the lowest
        priority, and none that is overdue if there are others, is preempted; while the pages of a
        finishing request are still in use, the newest chosen requests skip this step. Prefixes
        that are brought back for waiting requests give way first."""
        while not reserve_all([(r.lease, self._positions_to_reserve(r, s)) for r, s in chosen]):
            if self.host is not None and self.host.give_back():
                continue
            if self._set_aside:
                chosen = chosen[:-1]
                continue
            victim = max(reversed(self.running), key=lambda record: _place(record.request))
            victim.request.num_preemptions += 1
            self.stats.preemptions += 1
            self._requeue(victim)
            chosen = [(r, s) for r, s in chosen if r is not victim]
        return chosen

    def _admit_waiting(self, solo: Request | None, token_budget: int) -> Scheduled:
        """Admit waiting requests in order, as far as slots, pages and rows allow. A request whose
        prefix is being computed by another, or fetched from host memory, waits for it."""
        admitted: Scheduled = []
        fetching: list[Request] = []
        scanned = itertools.islice(self.waiting, _MAX_SCANNED)
        computing = [record for record in self.running if record.lease.length < record.prefill_end]
        for request in [solo] if solo is not None else list(scanned):
            if token_budget <= 0 or not self._slots or request.status is not Status.WAITING:
                break
            num_cached = self._num_cached(request)
            if not request.is_overdue and self._is_prefix_in_progress(
                request, num_cached, computing
            ):
                continue
            if solo is None and self._is_fetching(request, num_cached):
                if request.is_overdue:
                    break
                fetching.append(request)
                continue
            admission = self._admit(request, num_cached, token_budget)
            if admission is None and self.host is not None and self.host.give_back(keep=fetching):
                admission = self._admit(request, num_cached, token_budget)
            if admission is None:
                break
            admitted.append(admission)
            computing.append(admission[0])
            token_budget -= admission[1].num_rows
        return admitted

    def _is_fetching(self, request: Request, num_cached: int) -> bool:
        """Whether a waiting request's prefix is being brought back from host memory."""
        if self.host is None or not self.prefix_caching or request.wants_prompt_logprobs:
            return False
        num_positions = len(request.tokens) + self.limits.lookahead
        return self.host.is_fetching(
            request,
            start=num_cached,
            num_positions=min(num_positions, self.limits.max_model_len),
        )

    def _admit(
        self, request: Request, num_cached: int, token_budget: int
    ) -> tuple[RunningRequest, Span] | None:
        """Admit a waiting request if there are pages for all its tokens and one block more.
        num_cached: positions that a prefix hit could cover."""
        lease = Lease(
            self.pool,
            self.limits.max_model_len,
            request.page_keys,
            margin=0 if self.states is None else self.states.margin,
        )
        try:
            record, span = self._lease_pages(request, lease, token_budget)
        except BaseException:
            lease.abandon()
            raise
        if not lease.reserved:
            lease.release()
            return None
        self._slots.pop()
        num_fetched = 0 if self.host is None else self.host.end(request)
        if self.states is not None and record.states is not None:
            self.states.hold(record.states)
        self._count_passed(request)
        self.waiting.remove(request)
        self.running.append(record)
        request.status = Status.RUNNING
        if request.num_cached is None:
            request.num_cached = record.start
            request.queue_time = time.monotonic() - request.arrived_at
            self.stats.prefix_queries += len(request.tokens)
            request.num_host_cached = min(num_fetched, record.start)
            self.stats.prefix_hits += record.start - request.num_host_cached
            if record.start and logger.isEnabledFor(logging.DEBUG):
                line = "cached request=%s prompt=%d device=%d host=%d"
                host = request.num_host_cached
                logger.debug(line, request.id, request.num_prompt, record.start - host, host)
            if self.host is not None:
                self.stats.host_queries += len(request.tokens) - record.start + num_fetched
                self.stats.host_hits += request.num_host_cached
            self.stats.state_hits += record.states is not None and record.start > 0
        if self.shadow is not None and lease.observed:
            self.shadow.charge_rows(num_cached - record.start)
        return record, span

    def _count_passed(self, admitted: Request) -> None:
        """Count for each waiting request that arrived before `admitted` that it was passed once
        more, and move the requests that are now overdue to the front."""
        if self.waiting[0] is admitted and _place(self.waiting[-1]) == _place(admitted):
            return  # it is the first; the others have its priority and arrived later
        overdue: list[Request] = []
        for request in self.waiting:
            if request.order < admitted.order:
                was_overdue = request.is_overdue
                request.num_passed += 1
                if request.is_overdue and not was_overdue:
                    overdue.append(request)
        for request in overdue:
            self.waiting.remove(request)
            at = bisect_right(self.waiting, _place(request), key=_place)
            self.waiting.insert(at, request)

    def _num_cached(self, request: Request) -> int:
        """Return the positions of a request that a prefix hit could cover."""
        if not self.prefix_caching or request.wants_prompt_logprobs:
            return 0
        keys = self.pool.usable_keys(request.page_keys, request.tokens)
        if self.states is None:
            return self.pool.page_size * self.pool.num_usable(keys)
        state = self.states.find(self.pool, keys)
        return 0 if state is None else state.length

    def _lease_pages(
        self, request: Request, lease: Lease, token_budget: int
    ) -> tuple[RunningRequest, Span]:
        """Return the record of a waiting request and its first span, whose positions are reserved
        if there are pages for all its tokens and one block more."""
        start = 0
        states: SequenceStates | None = None
        lease.observed = self.shadow is not None and self.shadow.draw(request)
        if request.num_assumed:
            start = lease.assume(request.num_assumed)
            states = None if self.states is None else self.states.assume()
        elif self.prefix_caching and self.states is not None:
            states = self.states.begin(request, lease)
            start = lease.length
        elif self.prefix_caching and not request.wants_prompt_logprobs:
            start = lease.adopt(request.tokens)
        record = RunningRequest(
            request=request,
            slot=self._slots[-1],
            lease=lease,
            start=start,
            prefill_end=len(request.tokens),
            states=states,
        )
        if request.num_drafts:
            record.host_proposer, record.device_method = self.drafters[request.method]
        span = self._prefill_span(record, token_budget)
        num_positions = record.prefill_end - start + self.limits.lookahead
        positions = self._positions_to_reserve(record, span)
        if lease.fits(num_positions, positions):
            reserved = reserve_all([(lease, positions)])
            assert reserved, "pages that were available are not"
        return record, span

    def _is_prefix_in_progress(
        self, request: Request, num_cached: int, computing: Sequence[RunningRequest]
    ) -> bool:
        """Whether a request that is computing its prompt computes half or more of the positions
        that this one needs."""
        if not computing or not self.prefix_caching or request.wants_prompt_logprobs:
            return False
        keys = self.pool.usable_keys(request.page_keys, request.tokens)
        size = self.pool.page_size
        other_keys = [r.request.page_keys[: (r.prefill_end - 1) // size] for r in computing]
        # A key stands for all the tokens up to its page's end: equal ones are a common prefix's.
        shared = [sum(map(eq, keys, theirs)) * size for theirs in other_keys]
        if self.states is not None:
            return self.states.is_in_progress(request, num_cached, computing, shared)
        end = max(shared)
        if 2 * (end - num_cached) < len(request.tokens) - num_cached:
            return False
        if not self.pool.has_windows:
            return True
        # Pages of a window that have been returned since then are not computed again.
        lease = computing[shared.index(end)].lease
        lease.expect([end])
        return end > lease.length

    def _requeue(self, record: RunningRequest) -> None:
        """Take back a running request's pages; it starts over from its tokens, first in line of its
        priority."""
        self._wait_first(record.request)
        self._retire(record)

    def _suspend(self, record: RunningRequest) -> None:
        """Let a running request wait, first in line of its priority; it keeps its slot and pages,
        and the next plan resumes it."""
        self._wait_first(record.request)
        self._put_aside(record, Residence.SUSPENDED)

    def _resume(self, record: RunningRequest) -> None:
        self._set_aside.remove(record)
        self.waiting.remove(record.request)
        self.running.append(record)
        record.residence = Residence.RUNNING
        record.request.status = Status.RUNNING
        record.pages_sent = 0

    def _wait_first(self, request: Request) -> None:
        request.status = Status.WAITING
        at = bisect_left(self.waiting, _place(request), key=_place)
        self.waiting.insert(at, request)

    def _put_aside(self, record: RunningRequest, residence: Residence) -> None:
        if record in self.running:
            self.running.remove(record)
            self._set_aside.append(record)
        record.residence = residence

    def _retire(self, record: RunningRequest) -> None:
        """Release a request's slot and pages once no step of it is in flight."""
        self._put_aside(record, Residence.LEAVING)
        if not record.in_flight and record in self._set_aside:
            if self.states is not None:
                self.states.release(record)
            record.lease.release()
            self._set_aside.remove(record)
            self._slots.append(record.slot)
