"""Sums over scored blocks, and tokens per step with their intervals. Imports no torch.

Blocks of one answer resemble each other, so intervals come from the answers: the tokens per step
are a ratio of sums over answers, with the variance of such a ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple, TypeAlias

import numpy as np

from strobe.speculation.acceptance import Floats
from strobe.step import ScoredBlock

Interval: TypeAlias = tuple[float, float]

MIN_ANSWERS = 5
"""Number of answers from which intervals are reported."""
_NORMAL = 1.96
"""Standard errors of a normal distribution's interval of 95 %."""


class Estimate(NamedTuple):
    """A figure and its interval of 95 %, None for too few answers."""

    value: float
    interval: Interval | None

    def times(self, factor: float) -> Estimate:
        """Return the product with a figure that is known."""
        if self.interval is None:
            return Estimate(factor * self.value, None)
        low, high = self.interval
        return Estimate(factor * self.value, (factor * low, factor * high))

    def rounded(self) -> list[float] | None:
        """Return the interval as JSON has it."""
        return None if self.interval is None else [round(end, 3) for end in self.interval]


def _one_zero() -> Floats:
    return np.zeros(1)


@dataclass
class BlockSums:
    """Blocks of some answers, as they would be if only K drafts of each were verified. Arrays are
    by K, from 0 to the largest block's number of drafts. starts: positions before the blocks;
    squared_* and products: sums over answers of the products of their own sums."""

    answers: int = 0
    blocks: int = 0
    starts: int = 0
    squared_blocks: int = 0
    drafts: Floats = field(default_factory=_one_zero)
    accepted: Floats = field(default_factory=_one_zero)
    squared_accepted: Floats = field(default_factory=_one_zero)
    products: Floats = field(default_factory=_one_zero)

    def add(self, blocks: Sequence[ScoredBlock]) -> None:
        """Add the blocks of one answer."""
        self._widen(max([block.num_drafts for block in blocks]))
        limits = np.arange(len(self.drafts))[:, None]
        drafts = np.minimum(limits, [block.num_drafts for block in blocks]).sum(1)
        accepted = np.minimum(limits, [block.num_accepted for block in blocks]).sum(1)
        self.answers += 1
        self.blocks += len(blocks)
        self.starts += sum([block.start for block in blocks])
        self.squared_blocks += len(blocks) ** 2
        self.drafts += drafts
        self.accepted += accepted
        self.squared_accepted += accepted * accepted
        self.products += len(blocks) * accepted

    def _widen(self, num_drafts: int) -> None:
        """Make room for blocks of so many drafts; more than there were so far change no sum."""
        missing = num_drafts + 1 - len(self.drafts)
        if missing <= 0:
            return
        self.drafts = np.pad(self.drafts, (0, missing), mode="edge")
        self.accepted = np.pad(self.accepted, (0, missing), mode="edge")
        self.squared_accepted = np.pad(self.squared_accepted, (0, missing), mode="edge")
        self.products = np.pad(self.products, (0, missing), mode="edge")

    @property
    def max_drafts(self) -> int:
        """Drafts of the largest block."""
        return len(self.drafts) - 1

    @property
    def mean_start(self) -> float:
        """Positions before a block, on average."""
        return self.starts / self.blocks

    def tokens_per_step(self, num_drafts: int | None = None) -> Estimate:
        """Return the tokens per step if up to `num_drafts` drafts are verified; None: all."""
        k = self.max_drafts if num_drafts is None else num_drafts
        ratio = float(self.accepted[k]) / self.blocks
        if self.answers < MIN_ANSWERS:
            return Estimate(1 + ratio, None)
        squares = float(self.squared_accepted[k]) - 2 * ratio * float(self.products[k])
        squares += ratio * ratio * self.squared_blocks
        variance = self.answers / (self.answers - 1) * max(squares, 0.0) / self.blocks**2
        reach = _standard_errors(self.answers - 1) * sqrt(variance)
        return Estimate(1 + ratio, (max(1.0, 1 + ratio - reach), 1 + ratio + reach))


def _standard_errors(freedom: int) -> float:
    """Return the standard errors of an interval of 95 % by Student's distribution: its expansion
    in 1 / degrees of freedom, to 0.01 from 4 on (Abramowitz and Stegun, 26.7.5)."""
    z = _NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
