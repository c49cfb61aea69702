"""How many drafts each request verifies in a step, decided once per plan. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strobe.request import Request
from strobe.step import Plan, StepResult


class DraftChain(NamedTuple):
    """Drafts of the host's, and how many tokens it found them by."""

    tokens: tuple[int, ...] = ()
    match_length: int = 0


class Candidate(NamedTuple):
    """A request that may verify up to `max_drafts` drafts in this step. on_device: the device can
    make some; chain: the host has made these. slot: as in its spans."""

    request: Request
    max_drafts: int
    on_device: bool = True
    slot: int = 0
    chain: DraftChain = DraftChain()


class BatchLoad(NamedTuple):
    """What else there is to do: requests that decode in this step, rows of prompts that are still
    to be computed, and requests that wait; context_tokens: positions of those that decode,
    together."""

    num_decoding: int
    prompt_rows: int
    num_waiting: int
    context_tokens: int = 0


class DraftPlan(NamedTuple):
    """What a step verifies: by candidate the most drafts, 0 to its own `max_drafts`; and
    `num_verified` of all that the device makes, chosen there by `confidence`, both as in `Plan`.
    use_chain: whether a candidate's drafts are of its chain; None: where it has one."""

    max_drafts: list[int]
    num_verified: int | None = None
    confidence: tuple[tuple[float, float], ...] = ()
    use_chain: list[bool] | None = None


class DraftPolicy:
    """A policy: by itself, every request verifies as many drafts as it may."""

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        """What the candidates, which decode in this step, verify."""
        return DraftPlan([candidate.max_drafts for candidate in candidates])

    @property
    def confidence_by_place(self) -> tuple[tuple[int, int, float, float], ...]:
        """The fit of drafts' chances: drafts of the block, place in it, slope and intercept."""
        return ()

    def observe(self, plan: Plan, result: StepResult) -> None:
        """What became of a step, in the order of plans."""
