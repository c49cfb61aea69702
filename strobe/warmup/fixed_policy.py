"""A draft policy with a preset choice, to run any kind of step during warm-up."""

from __future__ import annotations

from collections.abc import Sequence

from strobe.speculation.adaptive import Choice
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.step import Plan, StepResult


class FixedDraftPolicy(DraftPolicy):
    """Always plans `choice`. rows: the last step's number of rows."""

    def __init__(self) -> None:
        self.choice, self.rows = Choice(), 0

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        max_drafts = [min(candidate.max_drafts, self.choice.most) for candidate in candidates]
        return DraftPlan(max_drafts, self.choice.drafts)

    def observe(self, plan: Plan, result: StepResult) -> None:
        self.rows = result.rows
