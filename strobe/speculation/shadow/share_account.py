"""The account of what shadow mode may cost. Imports no torch.

Every step earns credit, nearly the share of its seconds; scoring drafters spends it. An answer is
drawn for scoring only while the credit covers what such answers have cost so far, so the share
holds for all steps together, to within about one answer.
"""

from __future__ import annotations

RESERVE = 0.1
"""Part of the share left for costs that the account does not see: features that every step
captures, caches that a drafter displaces, an overdraft. On a CPU, steps in shadow mode took 0.8 %
longer while no answer was scored."""
MAX_CREDIT = 1.0
"""Seconds that can be saved up, unless a few answers cost more."""
OVERDRAFT = 0.25
"""Seconds below zero at which no further block is drafted until the debt is paid."""


class ShareAccount:
    """Seconds of credit, earned by steps and spent on scoring drafters."""

    def __init__(self, share: float):
        """share: of the steps' seconds that may be spent, scoring included."""
        self.share = share
        self.credit = 0.0
        self._spent = 0.0
        self._finished = 0
        """Seconds spent, and answers scored to their ends."""
        self._is_paused = False

    @property
    def mean_cost(self) -> float | None:
        """Seconds that an answer has cost on average; None before the first has ended."""
        return self._spent / self._finished if self._finished else None

    def earn(self, seconds: float) -> None:
        """Add the share of a step's seconds."""
        limit = max(MAX_CREDIT, 4 * (self.mean_cost or 0.0))
        self.credit = min(self.credit + (1 - RESERVE) * self.share * seconds, limit)

    def spend(self, seconds: float) -> None:
        """Take the seconds that scoring took."""
        self.credit -= seconds
        self._spent += seconds

    def finish(self) -> None:
        """Note that an answer has been scored to its end."""
        self._finished += 1

    def affords_answer(self, num_open: int) -> bool:
        """Whether one more answer may be scored. num_open: answers being scored."""
        if self.mean_cost is None:
            return self.credit > 0 and not num_open
        return self.credit > self.mean_cost * (num_open + 1) / 2

    def affords_block(self) -> bool:
        """Whether a further block may be drafted: not from OVERDRAFT until the debt is paid."""
        if self.credit < -OVERDRAFT:
            self._is_paused = True
        elif self.credit >= 0:
            self._is_paused = False
        return not self._is_paused
