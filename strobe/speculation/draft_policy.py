"""How many drafts a step makes and verifies: the interface of draft policies. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strobe.request import Request
from strobe.step import Plan, StepResult


class DraftChain(NamedTuple):
    """Drafts of prompt lookup, and the length of the match that led to them."""

    tokens: tuple[int, ...] = ()
    match_length: int = 0


class Candidate(NamedTuple):
    """A decoding request that may verify up to `max_drafts` drafts in this step. on_device: the
    device can propose them; chain: the host has proposed these. slot: as in its spans."""

    request: Request
    max_drafts: int
    on_device: bool = True
    slot: int = 0
    chain: DraftChain = DraftChain()


class BatchLoad(NamedTuple):
    """Prompt rows still to be computed by requests that run or could start now, and positions of
    the decoding requests together."""

    prompt_rows: int = 0
    context_tokens: int = 0


class DraftPlan(NamedTuple):
    """max_drafts: of each candidate, 0 to its own. num_verified: number of the device's drafts to
    verify, over all candidates, chosen there by `confidence` as in `Plan`; None: all. use_chain:
    whether a candidate's drafts are its chain's; None: where it has one."""

    max_drafts: list[int]
    num_verified: int | None = None
    confidence: tuple[tuple[float, ...], ...] = ()
    use_chain: list[bool] | None = None


def with_required_drafts(plan: DraftPlan, candidates: Sequence[Candidate]) -> DraftPlan:
    """Return a plan in which the requests that always draft verify all drafts that they may. All
    other drafts of the plan are then verified, too: the device would choose among them all."""
    required = [i for i, c in enumerate(candidates) if c.request.always_drafts]
    if not required:
        return plan
    max_drafts = list(plan.max_drafts)
    use_chain = [bool(candidate.chain.tokens) for candidate in candidates]
    if plan.use_chain is not None:
        use_chain = list(plan.use_chain)
    for i in required:
        candidate = candidates[i]
        chain_length = len(candidate.chain.tokens)
        is_chosen = use_chain[i] and max_drafts[i] > 0
        use_chain[i] = chain_length > 0 and (is_chosen or not candidate.on_device)
        limit = chain_length if use_chain[i] else candidate.max_drafts
        max_drafts[i] = min(limit, candidate.max_drafts)
    return DraftPlan(max_drafts=max_drafts, use_chain=use_chain)


class DraftPolicy:
    """The policy without a choice: every request verifies as many drafts as it may."""

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        """Return what the candidates verify in this step."""
        return DraftPlan(max_drafts=[candidate.max_drafts for candidate in candidates])

    @property
    def confidence_by_place(self) -> tuple[tuple[int, int, float, float], ...]:
        """Drafts of the block, position in it, and the slope and intercept of the logistic function
        of the evidence that comes closest to a draft's chance to be right there."""
        return ()

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Learn from a step, in the order of plans."""
