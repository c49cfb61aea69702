"""A budget that does as it is told, for steps of every kind."""

from __future__ import annotations

from collections.abc import Sequence

from strobe.spec.adaptive import Choice
from strobe.spec.budget import Allotment, Budget, Candidate, Load
from strobe.step import Plan, StepResult


class Forced(Budget):
    """One choice, whatever it brings. rows: of the newest step."""

    def __init__(self) -> None:
        self.choice, self.rows = Choice(), 0

    def allot(self, candidates: Sequence[Candidate], load: Load) -> Allotment:
        most = [min(one.most, self.choice.most) for one in candidates]
        return Allotment(most, self.choice.drafts)

    def observe(self, plan: Plan, result: StepResult) -> None:
        self.rows = result.rows
