"""Drafters that know the answers, and draft policies that follow a rule or chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from strobe.engine.engine import Engine
from strobe.kernels.evidence import KNOTS
from strobe.request import Request
from strobe.runner.decode_state import DecodeState
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.speculation.proposer import Drafts
from strobe.step import Span
from tests.support.tiny_checkpoints import VOCAB


class Lengths(DraftPolicy):
    """A policy that limits each request on its own: length(request, max_drafts) -> num_verified."""

    def __init__(self, length: Callable[[Request, int], int]):
        self.length = length

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        return DraftPlan([self.length(c.request, c.max_drafts) for c in candidates])


class RandomRows(DraftPolicy):
    """A policy that changes at random each step: all drafts, some of each request's, or a number of
    rows in all, chosen by a random confidence."""

    def __init__(self, seed: str):
        self.rng = random.Random(seed)

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        rng, kind = self.rng, self.rng.randrange(4)
        limits = [c.max_drafts if kind < 2 else rng.randint(0, c.max_drafts) for c in candidates]
        chained = [
            bool(c.chain.tokens) and (not c.on_device or rng.random() < 0.5) for c in candidates
        ]
        if kind % 2 == 0:
            return DraftPlan(limits, use_chain=chained)
        rates = tuple([tuple([rng.random() for _ in range(KNOTS)]) for _ in range(max(limits))])
        return DraftPlan(limits, rng.randint(0, sum(limits) + 2), rates, chained)


def cursor(state: DecodeState, slot: int) -> tuple[int, int]:
    """Return (positions with K/V, last token) of a slot, as the device has them."""
    length, tail = state.cursor[slot].tolist()
    return length, tail


class Scripted:
    """A proposer that knows the answers and proposes them as changed by `mangle`.

    answers: a request's whole sequence, prompt included, as the target alone would generate it.
    mangle(request, start, drafts): the drafts to propose, where `drafts` are the right ones after
    position `start`. It reads the device's lengths, so it works with any number of steps in flight.
    """

    engine: Engine

    def __init__(
        self,
        state: DecodeState,
        num_drafts: int,
        mangle: Callable[[Request, int, list[int]], list[int]],
    ):
        self.state, self.num_drafts, self.mangle = state, num_drafts, mangle
        self.capture: tuple[int, ...] = ()
        self.margins = False  # none that an adaptive policy should learn from
        self.answers: dict[Request, list[int]] = {}

    def requests(self, spans: Sequence[Span]) -> list[Request]:
        """Return the requests of these spans."""
        running = {record.slot: record.request for record in self.engine.scheduler.running}
        return [running[span.slot] for span in spans]

    def propose(self, spans: Sequence[Span]) -> Drafts:
        rows: list[list[int]] = []
        for span, request in zip(spans, self.requests(spans), strict=True):
            start, _ = cursor(self.state, span.slot)
            answer = self.answers.get(request, [])
            true = answer[start + 1 : start + 1 + self.num_drafts]
            true = true + [0] * (self.num_drafts - len(true))
            rows.append(self.mangle(request, start, true))
        drafts = torch.tensor(rows, device=self.state.device)
        margins = (drafts * 7 % 13).float()
        size = len(rows), self.num_drafts
        return Drafts(drafts.view(size), margins.view(size))

    def widths_for(self, max_drafts: int) -> tuple[list[int], list[int]]:
        return [max_drafts], [1 + max_drafts]

    def observe(self, batch: Any, hidden: Any) -> None:
        pass


def oracle(request: Request, start: int, drafts: list[int]) -> list[int]:
    """All drafts right."""
    return drafts


def adversary(request: Request, start: int, drafts: list[int]) -> list[int]:
    """All drafts wrong."""
    return [(token + 1) % VOCAB for token in drafts]


def wavering(request: Request, start: int, drafts: list[int]) -> list[int]:
    """Right except at one position, which changes from step to step."""
    wrong = (start * 7 + request.num_prompt * 3) % (len(drafts) + 2)
    return [(t + 1) % VOCAB if i == wrong else t for i, t in enumerate(drafts)]
