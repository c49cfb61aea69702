"""A budget that does as it is told, for steps of every kind."""

from __future__ import annotations

from collections.abc import Sequence

from strobe.speculation.adaptive import Choice
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.step import Plan, StepResult


class FixedDraftPolicy(DraftPolicy):
    """One choice, whatever it brings. rows: of the newest step."""

    def __init__(self) -> None:
        self.choice, self.rows = Choice(), 0

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        most = [min(one.max_drafts, self.choice.most) for one in candidates]
        return DraftPlan(most, self.choice.drafts)

    def observe(self, plan: Plan, result: StepResult) -> None:
        self.rows = result.rows
