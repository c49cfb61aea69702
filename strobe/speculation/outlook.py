"""What the next drafts of each request promise, by its own blocks and others'. Imports no torch.

Legend: n requests, K places of drafts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from strobe.request import Request
from strobe.speculation.draft_policy import Candidate

FEW = 16  # requests whose next blocks are taken to be like their mean, not like their newest
LATEST = 0.4  # what a block weighs among its request's, and
FIRST, RESTED = 0.05, 0.3  # what a request's first block weighs among those, or one after a rest
TURNS, SELDOM = 0.1, 0.01  # how likely a request turns in a step to be like a new one, at first
TOLD, GAP = 0.02, 0.5  # what a block weighs in that, and the drafts by which requests must differ


class Outlook:
    """Chances of requests' next blocks. steps: done so far."""

    def __init__(self, requests: int, first: Any):
        """requests: the most at once; first [K]: the chances of a request's first block."""
        self.fresh, self.rested, self.turns, self.steps = first, first, TURNS, 0
        """Chances of blocks that are their request's first, or its first after others rested; and
        how likely a request turns in a step to be like one of those."""
        self._who: list[weakref.ref[Request] | None] = [None] * requests
        self._rows = np.zeros((requests, 3, len(first)))
        """The mean of a request's blocks, the mean before the newest, and the newest."""
        self._when = np.full(requests, -1)

    def meet(self, candidates: Sequence[Candidate]) -> bool:
        """Whether one of them is new."""
        now = [(one, self._who[one.slot]) for one in candidates]
        new = [one for one, known in now if known is None or known() is not one.request]
        for one in new:
            self._who[one.slot] = weakref.ref(one.request)
            self._rows[one.slot], self._when[one.slot] = 0.0, -1
        return bool(new)

    def promise(self, slot: int) -> float:
        """How many drafts of its next block are expected to count."""
        return float(self._mixed(np.array([slot]), True)[0, 0].sum())

    def of(self, slots: Any, most: Any) -> tuple[Any, Any]:
        """slots [n], drafts of each at most [n] -> their order [n] by what their drafts promise,
        and chances [n, K] of such requests in such an order, by which a choice is made.

        Of few requests these are the means of their blocks. Of many the newest blocks' own, in the
        order of the means before: so they differ as blocks do, and the first ones are no better
        than those that stood first have turned out to be.
        """
        few = len(slots) <= FEW
        rows = self._mixed(slots, few)
        rows *= (np.arange(rows.shape[2]) < most[:, None])[:, None]
        order = np.argsort(-rows[:, 0].sum(1), kind="stable")
        if few:
            return order, rows[order, 0]
        return order, rows[np.argsort(-rows[:, 1].sum(1), kind="stable"), 2]

    def _mixed(self, slots: Any, few: bool) -> Any:
        """The rows [n, 3, K] of slots, with what a new request promises, as far as they may have
        turned into one like it."""
        rows, when = self._rows[slots], self._when[slots]
        since = self.steps - when + few
        if not few:
            rows[since > 0, 2] = rows[since > 0, 0]
        other = np.where((when < 0)[:, None, None], self.fresh, self.rested)
        return rows + self._turned(since, when)[:, None, None] * (other - rows).clip(0)

    def take(self, slots: Any, new: Any) -> None:
        """The chances [n, K] of blocks that were made in the newest step."""
        rows, when = self._rows[slots], self._when[slots]
        known, since = when >= 0, self.steps - when
        mean = np.where(known[:, None], rows[:, 0], new)
        gap, up = (self.rested - mean).sum(1), (new - mean).sum(1)
        if len(told := np.flatnonzero(known & (gap > GAP))):
            turned = ((up[told] / gap[told]).clip(0, 1) / since[told]).mean()
            share = 1 - (1 - TOLD) ** len(told)
            self.turns = max(self.turns + share * (float(turned) - self.turns), SELDOM)
        turned = self._turned(since, when)
        weight = LATEST + (1 - LATEST) * np.where(known & (since > 1), turned, 0.0)
        self._rows[slots, 0] = mean + weight[:, None] * (new - mean)
        self._rows[slots, 1] = np.where(known[:, None], mean, self.fresh)
        self._rows[slots, 2] = new
        self._when[slots] = self.steps
        self.fresh = _moved(self.fresh, new, FIRST * ~known)
        self.rested = _moved(self.rested, new, np.where(since > 1, RESTED, FIRST) * turned * known)

    def _turned(self, since: Any, when: Any) -> Any:
        """How likely requests are like a new one so many steps after their last block."""
        return np.where(when < 0, 1.0, 1 - (1 - self.turns) ** since)


def _moved(mean: Any, new: Any, weights: Any) -> Any:
    """A mean [K] after new rows [n, K] of these weights [n]."""
    if not weights.any():
        return mean
    share = 1 - np.prod(1 - weights)
    return mean + share * (weights @ new / weights.sum() - mean)
