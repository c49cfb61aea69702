"""Chances of drafts to count: of this step's drafts by their own evidence, and of a request's next
block by its blocks so far. Imports no torch.

A draft counts if it and all drafts before it are right. Its chance is the product of one rate per
position, read from a table by *evidence*: (m M^3)^(1/8), where m is the draft's margin and M its
block's mean margin. A block is made at once, and after a wrong draft the drafter is seldom sure, so
later margins tell about a draft, too. The evidence of a chain of prompt lookup is half the length
of its match.

Legend: n blocks, K positions of drafts, B knots of evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strobe.speculation.policy_config import PolicyConfig

KNOTS = 13  # of evidence: 0, 0.5, ..., 6; a margin is at most 40, which gives 6.3


def evidence(margins: Any, drafts: Any) -> Any:
    """Return the evidence [n, K] of margins [n, K], given the number of drafts in each row [n]."""
    exists = np.arange(margins.shape[1]) < drafts[:, None]
    means = ((margins * exists).sum(1) / np.maximum(drafts, 1))[:, None]
    return np.nan_to_num(np.maximum(margins * means**3, 0.0)) ** 0.125


def monotone(right: Any, seen: Any) -> Any:
    """Return the rates [..., B] that never fall along B and have the smallest squared error against
    right / seen, weighted by `seen`: the largest mean over first knots i of the smallest mean, over
    last knots j, of knots i to j."""
    ends_right, ends_seen = np.cumsum(right, -1), np.cumsum(seen, -1)
    sums = ends_right[..., None, :] - (ends_right - right)[..., None]
    means = sums / np.maximum(ends_seen[..., None, :] - (ends_seen - seen)[..., None], 1e-9)
    ordered = np.tri(right.shape[-1], dtype=bool).T  # i <= j
    smallest = np.where(ordered, means, np.inf)[..., ::-1]
    smallest = np.minimum.accumulate(smallest, -1)[..., ::-1]
    return np.where(ordered, smallest, -np.inf).max(-2)


class DraftChances:
    """Rates of right drafts by the block's width, position and evidence. Where few drafts were
    seen, a rate follows the rates of all widths and positions together."""

    def __init__(self, widths: Sequence[int], config: PolicyConfig, prior: float = 1.0):
        """prior: weight, in drafts, of the rates of all widths and positions together."""
        self.widths, self.config, self.prior = tuple(widths), config, prior
        self.counts = np.zeros((2, len(self.widths), self.widths[-1], KNOTS))
        """Right drafts, and drafts whose verdict was seen; older ones weigh less."""
        self._rates: Any = None

    def table(self, width: int) -> Any:
        """Return the rates [K, B] of blocks of the width with this index."""
        if self._rates is None:
            right, seen = self.counts.sum((1, 2))
            mean = (right.sum() + 8 * self.config.first_rate) / (seen.sum() + 8)
            pooled = self.prior * monotone(right + mean / 2, seen + 0.5)
            self._rates = monotone(self.counts[0] + pooled, self.counts[1] + self.prior)
        return self._rates[width, : self.widths[width]]

    def chances(self, width: int, evidence: Any) -> Any:
        """Return each draft's chance to count [n, K]."""
        table, positions = self.table(width), np.arange(evidence.shape[1])
        knots, upper = self._knots(evidence)
        low, high = table[positions, knots], table[positions, knots + 1]
        return np.cumprod(low + (high - low) * upper, 1)

    def fade(self, half_lives: float) -> None:
        """Reduce the weight of all counts."""
        self.counts *= 0.5**half_lives
        self._rates = None

    def observe(self, width: int, evidence: Any, verified: Any, accepted: Any) -> None:
        """Learn from blocks: evidence [n, K], drafts verified [n] and accepted [n]. A position has
        a verdict if it was verified and all drafts before it were right."""
        positions = np.broadcast_to(np.arange(evidence.shape[1]), evidence.shape)
        seen = (positions <= accepted[:, None]) & (positions < verified[:, None])
        knots, upper = [part[seen] for part in self._knots(evidence)]
        right, positions = (positions < accepted[:, None])[seen], positions[seen]
        for at, weight in ((knots, 1 - upper), (knots + 1, upper)):
            np.add.at(self.counts[0, width], (positions, at), weight * right)
            np.add.at(self.counts[1, width], (positions, at), weight)
        self._rates = None

    def logistic_fits(self) -> list[tuple[int, int, float, float]]:
        """Return, for each width and position: drafts of the block, position, and the slope and
        intercept of the logistic function of the evidence that meets the rates at 1 and 3."""
        fits: list[tuple[int, int, float, float]] = []
        for i, width in enumerate(self.widths):
            rates = self.table(i)[:, [2, 6]].clip(1e-3, 1 - 1e-3)
            for k, (low, high) in enumerate(np.log(rates / (1 - rates)).tolist()):
                fits.append((width, k, (high - low) / 2, (3 * low - high) / 2))
        return fits

    @staticmethod
    def _knots(evidence: Any) -> tuple[Any, Any]:
        """Return the knot below each evidence, and the weight of the next knot."""
        at = 2.0 * np.asarray(evidence)
        knots = np.minimum(at.astype(np.int64), KNOTS - 2)
        return knots, np.minimum(at - knots, 1.0)


class AcceptanceForecast:
    """Chances of each request's next block: the mean of its own blocks, shrunk to a prior, which is
    the mean of other requests' blocks."""

    def __init__(self, slots: int, width: int, config: PolicyConfig):
        self.config, self.step = config, 0
        self.priors = np.tile(config.first_rate ** np.arange(1.0, width + 1), (2, 1))
        """Chances [2, K] of a request's first block, and of a later one."""
        self._seen = np.ones(2)  # weights of the blocks in each prior; older ones weigh less
        self._means, self._surprises = np.zeros((2, slots, width))
        """By slot: mean of the blocks; the newest block less what was expected of it."""
        self._when = np.full(slots, -1)  # step of the newest block, -1 for none
        self._trust = np.array([config.own_weight, 1.0])
        """Beyond the prior: products of means with the blocks that followed, and of means with
        themselves. Their ratio is the slope by which a mean predicts the next block."""

    def advance(self) -> None:
        """Begin the next step."""
        self.step += 1
        self._seen *= 0.5 ** (1 / self.config.prior_memory)

    def clear(self, slot: int) -> None:
        """Forget the request that had this slot."""
        self._when[slot] = -1

    def expected(self, slots: Any) -> Any:
        """Return the expected chances [n, K] of the next blocks."""
        prior = self.priors[(self._when[slots] >= 0).astype(np.int64)]
        return prior + self._weights(slots)[:, None] * (self._means[slots] - prior)

    def sample(self, slots: Any) -> Any:
        """Return two possible next blocks of each request [n, 2, K], above and below expectation
        by up to as much as its newest block was: a mean hides that some drafts are near certain."""
        expected, spread = self.expected(slots), len(slots) / (len(slots) + self.config.spread)
        bound = np.minimum(expected, 1 - expected)
        difference = spread * np.clip(self._surprises[slots], -bound, bound)
        return np.stack((expected + difference, expected - difference), 1)

    def observe(self, slots: Any, chances: Any) -> None:
        """Take in the chances [n, k] of this step's blocks, k <= K. Positions beyond a block keep
        their expected rate."""
        config, own, expected = self.config, self._weights(slots), self.expected(slots)
        k = chances.shape[1]
        rest = expected[:, k:] / np.maximum(expected[:, k - 1 : k], 1e-6)
        blocks = np.concatenate((chances, chances[:, -1:] * rest), 1)
        known, fade = self._when[slots] >= 0, self._fade(slots)
        mean, block = [(x - self.priors[1]).sum(1)[known] for x in (self._means[slots], blocks)]
        mean *= fade[known]
        self._trust *= (1 - config.own_gain) ** len(mean)
        self._trust += config.own_gain * np.array([mean @ block, mean @ mean])
        for i, prior in enumerate(self.priors):
            weights = (1 - own) * (known == i)
            self._seen[i] += weights.sum()
            prior += weights @ (blocks - prior) / self._seen[i]
        gain = np.where(known, 1 - (1 - config.block_gain) * fade, 1.0)[:, None]
        self._means[slots] += gain * (blocks - self._means[slots])
        self._surprises[slots] = blocks - expected
        self._when[slots] = self.step

    def _weights(self, slots: Any) -> Any:
        """Return the weight of each request's own mean [n]."""
        slope = np.clip(self._trust[0] / self._trust[1], 0.0, self.config.max_own_weight)
        return slope * self._fade(slots) * (self._when[slots] >= 0)

    def _fade(self, slots: Any) -> Any:
        """Return the weights [n] of means, by the time without a block since."""
        return 0.5 ** ((self.step - self._when[slots]) / self.config.rest_memory)
