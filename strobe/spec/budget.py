"""How many drafts each request verifies in a step, decided once per plan. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from strobe.request import Request
from strobe.step import Plan, StepResult

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Chain(NamedTuple):
    """Drafts of the host's, and how many tokens it found them by."""

    tokens: tuple[int, ...] = ()
    match: int = 0


class Candidate(NamedTuple):
    """A request that may verify up to `most` drafts in this step. on_device: the device can make
    some; chain: the host has made these. slot: as in its spans."""

    request: Request
    most: int
    on_device: bool = True
    slot: int = 0
    chain: Chain = Chain()


class Load(NamedTuple):
    """What else there is to do: requests that decode in this step, rows of prompts that are still
    to be computed, and requests that wait; context: positions of those that decode, together."""

    decoding: int
    prompt_rows: int
    waiting: int
    context: int = 0


class Allotment(NamedTuple):
    """What a step verifies: by candidate the most drafts, 0 to its own `most`; and `verified` of
    all that the device makes, chosen there by `confidence`, both as in `Plan`. chained: whether a
    candidate's drafts are of its chain; None: where it has one."""

    most: list[int]
    verified: int | None = None
    confidence: tuple[tuple[float, float], ...] = ()
    chained: list[bool] | None = None


class Budget:
    """A policy: by itself, every request verifies as many drafts as it may."""

    def allot(self, candidates: Sequence[Candidate], load: Load) -> Allotment:
        """What the candidates, which decode in this step, verify."""
        return Allotment([candidate.most for candidate in candidates])

    @property
    def confidence_by_place(self) -> tuple[tuple[int, int, float, float], ...]:
        """The fit of drafts' chances: drafts of the block, place in it, slope and intercept."""
        return ()

    def observe(self, plan: Plan, result: StepResult) -> None:
        """What became of a step, in the order of plans."""


class Advice(set[str]):
    """Parts that only advise and have raised, which costs no token."""

    def of(self, part: str, ask: Callable[[], T], default: T) -> T:
        """Return what the part advises, or the default where it raises, which is logged once."""
        try:
            return ask()
        except Exception:  # whatever it is, advice must cost no token
            if part not in self:
                self.add(part)
                logger.exception("%s failed; steps go on without its advice.", part)
            return default
