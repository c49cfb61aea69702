"""Which answers shadow mode scores, and the blocks of each drafter along them. Imports no torch.

draw       at admission: score this answer, if the account affords it
plan       the spans whose rows drafters read, and those after which they draft
receive    their drafts, which arrive with the step
resolve    compare them with the answer's tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from strobe.counters import EngineStats
from strobe.request import Request, Status
from strobe.speculation.shadow.chain import Chain
from strobe.speculation.shadow.share_account import ShareAccount
from strobe.step import Plan, ScoredBlock, ShadowWork, Span

if TYPE_CHECKING:
    from strobe.engine.running_request import RunningRequest
    from strobe.speculation.proposer import HostProposer


class DraftRows(Protocol):
    """Drafts of blocks on the host [S, K], complete with their step."""

    def tolist(self) -> list[list[int]]: ...


@dataclass(frozen=True)
class ScoredDrafter:
    """A drafter to score. num_drafts: of each block; host: drafts on the host, None on the
    device."""

    name: str
    num_drafts: int
    host: HostProposer | None = None


class ScoredAnswer:
    """An answer that is scored: its chain with each drafter."""

    def __init__(self, request: Request, drafters: Sequence[ScoredDrafter]):
        self.request = request
        self.chains = {drafter.name: Chain() for drafter in drafters}


class ShadowLedger:
    """Draws answers and scores each drafter's blocks along them."""

    def __init__(
        self,
        drafters: Sequence[ScoredDrafter],
        *,
        share: float,
        max_model_len: int,
        walk: Callable[[int, Sequence[int]], Sequence[int]] = lambda slot, drafts: drafts,
    ):
        """share: of the steps' seconds that scoring may take. walk(slot, drafts): drafts as the
        slot's grammar changes them before verification."""
        self.walk = walk
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.max_model_len = max_model_len
        self.account = ShareAccount(share)
        self.is_on = False
        """Whether answers are drawn: not during warm-up."""
        self.fault: str | None = None
        self.stats = EngineStats()
        self._answers: dict[Request, ScoredAnswer] = {}
        self._by_slot: dict[int, ScoredAnswer] = {}
        self._decided: WeakKeyDictionary[Request, bool] = WeakKeyDictionary()
        self._received: list[tuple[str, DraftRows, list[tuple[Chain, Span]]]] = []
        self._seconds_per_row = 0.0
        self._host_seconds = 0.0

    @property
    def num_open(self) -> int:
        """Answers being scored."""
        return len(self._answers)

    def draw(self, request: Request) -> bool:
        """Whether to score a request that is about to be admitted, which is decided once."""
        if request not in self._decided:
            is_drawn = self.is_on and self.account.affords_answer(self.num_open)
            self._decided[request] = is_drawn
            if is_drawn:
                self._answers[request] = ScoredAnswer(request, list(self.drafters.values()))
                self.stats.shadow_requests += 1
        return request in self._answers

    def stop(self, fault: str) -> None:
        """Score nothing any more, for this reason."""
        self.is_on = False
        self.fault = fault
        self._answers.clear()
        self._received.clear()

    def release(self, request: Request) -> None:
        """Forget an answer that has ended."""
        if self._answers.pop(request, None) is not None:
            self.account.finish()

    def charge_rows(self, rows: int) -> None:
        """Spend what so many rows took that a prefix hit would have saved."""
        self._spend(rows * self._seconds_per_row)

    def _spend(self, seconds: float) -> None:
        self.account.spend(seconds)
        self.stats.shadow_seconds += seconds

    def observe_step(self, seconds: float, rows: int, spent: float) -> None:
        """Count a step: its seconds, its rows, and the seconds of scoring that are now known."""
        self.stats.step_seconds += seconds
        if not self.is_on:
            return
        spent += self._host_seconds
        self._host_seconds = 0.0
        self.account.earn(seconds)
        self._spend(spent)
        if rows:
            rate = max(seconds - spent, 0.0) / rows
            self._seconds_per_row += 0.1 * (rate - self._seconds_per_row)

    def plan(self, scheduled: Sequence[tuple[RunningRequest, Span]]) -> ShadowWork | None:
        """Return what a step of these spans does for the answers that are scored. The host proposes
        its drafts here."""
        if not self._answers:
            return None
        with self._on_host():
            return self._plan(scheduled)

    def _plan(self, scheduled: Sequence[tuple[RunningRequest, Span]]) -> ShadowWork:
        self._close()
        observed: list[int] = []
        due: dict[str, list[int]] = {}
        can_draft = self.account.affords_block()
        for i, (record, span) in enumerate(scheduled):
            answer = self._answers.get(record.request)
            if answer is None:
                continue
            observed.append(i)
            self._by_slot[span.slot] = answer
            is_decoding = span.num_logits == 1 and span.num_rows == 1 == len(span.tokens)
            if not (is_decoding and record.start >= record.prefill_end and can_draft):
                continue
            for drafter in self.drafters.values():
                chain = answer.chains[drafter.name]
                if chain.is_due(span.start):
                    self._begin_on_host(drafter, chain, record)
                    due.setdefault(drafter.name, []).append(i)
        device = [(n, tuple(at)) for n, at in due.items() if self.drafters[n].host is None]
        return ShadowWork(observed=tuple(observed), proposals=tuple(device))

    def _begin_on_host(self, drafter: ScoredDrafter, chain: Chain, record: RunningRequest) -> None:
        if drafter.host is None:
            return
        drafts = drafter.host.propose(record.request, drafter.num_drafts).tokens
        chain.begin(record.start, self.walk(record.slot, drafts) if drafts else ())

    def receive(self, plan: Plan, proposed: Mapping[str, DraftRows]) -> None:
        """Take in the device's drafts of a plan that was launched; they are read later."""
        for name, members in () if plan.shadow is None else plan.shadow.proposals:
            spans = [plan.spans[i] for i in members]
            chains = [(self._by_slot[span.slot].chains[name], span) for span in spans]
            self._received.append((name, proposed[name], chains))

    def read(self) -> None:
        """Read the drafts that were received; their steps are done."""
        if not self._received:
            return
        with self._on_host():
            for name, rows, chains in self._received:
                count = self.drafters[name].num_drafts
                for row, (chain, span) in zip(rows.tolist(), chains, strict=False):
                    drafts = [max(token, 0) for token in row[:count]]
                    chain.begin(span.start, self.walk(span.slot, drafts))
            self._received.clear()

    def resolve(self, request: Request) -> list[ScoredBlock]:
        """Return the blocks that the answer's tokens so far decide."""
        answer = self._answers.get(request)
        if answer is None:
            return []
        with self._on_host():
            return self._resolve(answer)

    def _resolve(self, answer: ScoredAnswer) -> list[ScoredBlock]:
        request = answer.request
        ended = request.status is Status.FINISHED
        scored: list[ScoredBlock] = []
        for name, chain in answer.chains.items():
            resolved = chain.resolve(request.tokens, ended=ended)
            if resolved is None:
                continue
            block, num_accepted = resolved
            num_drafts = min(len(block.drafts), self.max_model_len - 1 - block.start)
            num_accepted = min(num_accepted, num_drafts)
            if block.is_exact:
                self.stats.shadow_blocks += 1
                scored.append(
                    ScoredBlock(
                        drafter=name,
                        start=block.start,
                        num_drafts=num_drafts,
                        num_accepted=num_accepted,
                    )
                )
        if ended:
            self.release(request)
        return scored

    @contextmanager
    def _on_host(self) -> Generator[None]:
        """Count the host's seconds of scoring."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._host_seconds += time.perf_counter() - started

    def _close(self) -> None:
        """Forget answers that ended from outside, as at a stop string."""
        for request in [r for r in self._answers if r.status is Status.FINISHED]:
            self.release(request)
