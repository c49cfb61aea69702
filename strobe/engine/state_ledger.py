"""Where requests begin from a kept state of recurrent layers, and where they keep one. Imports no
torch.

begin      at admission: the longest kept state, and the borders of the prompt to keep states at
span_end   a prompt's spans end at borders
copies     of a plan: states to keep, then states to begin from
commit     index the states that a committed step has kept
release    a request ends or is preempted

The host may know a decoding request's length one step late. So each step that may have passed a
border has the copy, from the first one on, and the first one that has surely passed it is the one
whose commit indexes the state.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strobe.kv.kept_states import KeptState, KeptStates, SequenceStates, return_margin
from strobe.kv.lease import Lease
from strobe.kv.pages import PagePool
from strobe.request import Request
from strobe.step import Span, StateCopy

if TYPE_CHECKING:
    from strobe.engine.running_request import RunningRequest


class StateLedger:
    """The kept states of running requests. An answer keeps the state of its last border only."""

    def __init__(self, kept: KeptStates):
        self.kept = kept
        self._answering: set[int] = set()
        """Slots of the answers in progress that have a row."""

    @property
    def margin(self) -> int:
        """Positions before a sequence's length from which it may have to begin again."""
        return return_margin(self.kept.page_size)

    def find(
        self, pool: PagePool, keys: Sequence[bytes], *, observed: bool = False
    ) -> KeptState | None:
        """Return the longest kept state that a sequence with these pages can begin from: each page
        group has all that later rows see. observed: see `PagePool.lookup`."""
        end = pool.num_shared(keys, observed=observed)
        while (state := self.kept.find(keys[:end])) is not None:
            missing = pool.last_missing(
                keys, state.length // self.kept.page_size, observed=observed
            )
            if missing < 0:
                break
            end = missing
        return state

    def begin(self, request: Request, lease: Lease) -> SequenceStates:
        """Let a waiting request's lease adopt the longest prefix that has a state."""
        kept = self.kept
        pool = lease.pool
        keys = pool.usable_keys(request.page_keys, request.tokens)
        num_cached = pool.num_shared(keys, observed=lease.observed)
        end = len(request.tokens)
        revived: KeptState | None = None
        start = 0
        if not request.wants_prompt_logprobs:
            revived = self.find(pool, keys, observed=lease.observed)
            start = lease.adopt(request.tokens, 0 if revived is None else revived.length)
        borders = kept.borders(keys, start, end, num_cached * kept.page_size)
        lease.expect(borders)
        return SequenceStates(
            borders=borders,
            answer_border=kept.last_border(end - 1) + kept.interval,
            revived=revived,
        )

    def assume(self) -> SequenceStates:
        """Return the states of a request whose prompt counts as computed, to time steps: none is
        kept."""
        return SequenceStates(answer_border=sys.maxsize)

    def hold(self, states: SequenceStates) -> None:
        """Keep the state that an admitted request begins from until `release`."""
        if states.revived is not None:
            self.kept.hold(states.revived.row)

    def span_end(self, states: SequenceStates, start: int, end: int, prefill_end: int) -> int:
        """Return the end of a prompt's next span, which may have the positions up to `end`. It is
        the next border whose state is to be kept, else the last border up to `end`, so that the
        chunks are the same whatever the budget."""
        for border in states.borders:
            if start < border <= end:
                return border
        border = self.kept.last_border(end)
        return border if start < border and end < prefill_end else end

    def copies(self, chosen: Sequence[tuple[RunningRequest, Span]]) -> tuple[StateCopy, ...]:
        """Return the copies of recurrent states before a step: of those at borders that requests
        may have passed, and then into the slots of requests that begin from a kept one."""
        copies: list[StateCopy] = []
        for record, span in chosen:
            states = record.states
            assert states is not None
            if states.next_border <= span.max_start and self._has_row(record, states, span):
                assert states.row is not None
                border = states.next_border
                copies.append(
                    StateCopy(slot=record.slot, row=states.row, length=border, keeps=True)
                )
        for record, span in chosen:
            state = None if record.states is None else record.states.revived
            if state is not None and not record.pages_sent and span.start == state.length:
                copies.append(
                    StateCopy(slot=record.slot, row=state.row, length=state.length, keeps=False)
                )
        return tuple(copies)

    def _has_row(self, record: RunningRequest, states: SequenceStates, span: Span) -> bool:
        """Whether a request has a row for the state at its next border; it passes over borders
        whose state is kept already or has no row."""
        kept = self.kept
        if states.row is not None:
            if not states.borders or states.borders[0] == span.start:
                return True
            states.rows_in_flight[states.borders.pop(0)] = states.row
            states.row = None
        while states.borders and states.borders[0] <= span.start:
            border = states.borders[0]
            key = kept.key_before(border, record.request.page_keys)
            if border == span.start and not kept.is_kept(key):
                states.row = kept.take(key)
            if states.row is not None:
                return True
            states.borders.pop(0)
        if states.borders or states.answer_border > span.max_start:
            return False
        if record.slot in self._answering or len(self._answering) < kept.num_rows // 2:
            states.row = kept.take(before=states.answer_key)
        if states.row is None:
            states.answer_border += kept.interval
            return False
        self._answering.add(record.slot)
        return True

    def commit(self, record: RunningRequest, copy: StateCopy, start: int) -> bool:
        """Index the state that a committed step has kept; return whether it has. start: positions
        before the step."""
        states = record.states
        if states is None:
            return False
        is_earlier = states.rows_in_flight.get(copy.length) == copy.row
        is_next = states.row == copy.row and states.next_border == copy.length
        if not is_earlier and not is_next:
            return False
        if record.is_leaving or record.request.error is not None or start < copy.length:
            return False
        key = self.kept.key_before(copy.length, record.request.page_keys)
        self.kept.publish(copy.row, key)
        if is_earlier:
            del states.rows_in_flight[copy.length]
            return True
        states.row = None
        if states.borders:
            states.borders.pop(0)
            return True
        if states.answer_key is not None:
            self.kept.drop(states.answer_key)
        states.answer_key = key
        states.answer_border += self.kept.interval
        return True

    def end_revival(self, record: RunningRequest) -> None:
        """Let the kept state that a request began from be overwritten."""
        states = record.states
        if states is not None and states.revived is not None:
            self.kept.release(states.revived.row)
            states.revived = None

    def release(self, record: RunningRequest) -> None:
        """Give up the rows of a request that has no step in flight."""
        states = record.states
        if states is None:
            return
        self.end_revival(record)
        self._answering.discard(record.slot)
        for row in states.rows_in_flight.values():
            self.kept.give_up(row)
        states.rows_in_flight.clear()
        if states.row is not None:
            self.kept.give_up(states.row)
            states.row = None

    def is_in_progress(
        self,
        request: Request,
        num_cached: int,
        computing: Sequence[RunningRequest],
        shared: Sequence[int],
    ) -> bool:
        """Whether a request that is computing its prompt will keep a state that holds half of the
        positions that this one needs. If so, it also keeps one where the two prompts part.
        num_cached: where the request could begin now. shared: positions in common with each one
        that is computing."""
        ends: list[int] = []
        for record, positions in zip(computing, shared, strict=True):
            assert record.states is not None
            parting = self.kept.last_border(positions)
            coming = [*record.states.rows_in_flight, *record.states.borders]
            coming = [border for border in coming if border <= parting]
            ends.append(parting if parting > record.start else max(coming, default=0))
        end = max(ends)
        if 2 * (end - num_cached) < len(request.tokens) - num_cached or end == num_cached:
            return False
        record = computing[ends.index(end)]
        assert record.states is not None
        if end > record.start and end not in record.states.borders:
            insort(record.states.borders, end)
            record.lease.expect([end])
        return True
