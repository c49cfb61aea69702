"""How likely drafts are to count, by their own evidence and by their request's blocks so far.
Imports no torch.

A draft counts if it and all drafts before it are right. Its chance is the product of one rate a
position, read from a table by *evidence*: (m M^3)^(1/8) for a drafter's draft, of its margin m and
its block's mean margin M. A block is made at once, and after a wrong draft the drafter is seldom
sure, so margins after a draft tell about it, too. A chain of prompt lookup has half the length of
its match as evidence. Tables are fading counts, shrunk to what all positions together show, and
never fall as evidence grows.

Legend: n blocks, K positions of drafts, B knots of evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strobe.speculation.policy_config import PolicyConfig

KNOTS = 13  # of evidence, at 0, 0.5, ..., 6: margins end at 40, whose square root is 6.3


def evidence(margins: Any, made: Any) -> Any:
    """Return the evidence [n, K] of margins [n, K], of whose rows the first `made` [n] exist."""
    exists = np.arange(margins.shape[1]) < made[:, None]
    means = ((margins * exists).sum(1) / np.maximum(made, 1))[:, None]
    return np.nan_to_num(np.maximum(margins * means**3, 0.0)) ** 0.125


def extend(chances: Any, width: int) -> Any:
    """Return chances [n, width] given those of narrower blocks [n, K]: later drafts go on being
    right as the last one was."""
    known = chances.shape[1]
    if width <= known:
        return chances[:, :width]
    last = chances[:, -1:]
    rate = last / np.maximum(chances[:, -2:-1], 1e-6) if known > 1 else last
    return np.concatenate((chances, last * rate ** np.arange(1, width - known + 1)), 1)


def monotone(right: Any, seen: Any) -> Any:
    """Return rates [..., B] that never fall along B and are the closest to right / seen, weighted
    by `seen`: the largest, over first knots, of the smallest, over last knots, of means."""
    ends_right, ends_seen = np.cumsum(right, -1), np.cumsum(seen, -1)
    sums = ends_right[..., None, :] - (ends_right - right)[..., None]
    means = sums / np.maximum(ends_seen[..., None, :] - (ends_seen - seen)[..., None], 1e-9)
    ordered = np.tri(right.shape[-1], dtype=bool).T  # a mean of knots i to j, where i <= j
    smallest = np.where(ordered, means, np.inf)[..., ::-1]
    smallest = np.minimum.accumulate(smallest, -1)[..., ::-1]
    return np.where(ordered, smallest, -np.inf).max(-2)


class DraftChances:
    """Rates by width of the drafter's block, position and evidence."""

    def __init__(self, widths: Sequence[int], first_rate: float, prior: float):
        """first_rate: before anything is known. prior: weight, in drafts, of what all widths and
        positions show at an evidence."""
        self.widths, self.first_rate, self.prior = tuple(widths), first_rate, prior
        self.counts = np.zeros((2, len(self.widths), self.widths[-1], KNOTS))
        """Drafts that were right, and drafts whose verdict was seen."""
        self._rates, self._stale = np.full(self.counts.shape[1:], first_rate), False

    def table(self, width: int) -> Any:
        """Return the rates [K, B] of blocks of the width with this index."""
        if self._stale:
            right, seen = self.counts.sum((1, 2))
            mean = (right.sum() + 8 * self.first_rate) / (seen.sum() + 8)
            pooled = self.prior * monotone(right + mean / 2, seen + 0.5)
            self._rates = monotone(self.counts[0] + pooled, self.counts[1] + self.prior)
            self._stale = False
        return self._rates[width, : self.widths[width]]

    def chances(self, width: int, evidence: Any) -> Any:
        """Return each draft's chance to count [n, K]."""
        table, positions = self.table(width), np.arange(evidence.shape[1])
        knots, upper = self._knots(evidence)
        low, high = table[positions, knots], table[positions, knots + 1]
        return np.cumprod(low + (high - low) * upper, 1)

    def fade(self, half_lives: float) -> None:
        """Let counts weigh less."""
        self.counts *= 0.5**half_lives
        self._stale = True

    def observe(self, width: int, evidence: Any, verified: Any, accepted: Any) -> None:
        """Learn from blocks: evidence [n, K], drafts verified [n] and accepted [n]. A position
        tells something if it was verified and all before it were right."""
        positions = np.broadcast_to(np.arange(evidence.shape[1]), evidence.shape)
        seen = (positions <= accepted[:, None]) & (positions < verified[:, None])
        knots, upper = [part[seen] for part in self._knots(evidence)]
        right, positions = (positions < accepted[:, None])[seen], positions[seen]
        for at, weight in ((knots, 1 - upper), (knots + 1, upper)):
            np.add.at(self.counts[0, width], (positions, at), weight * right)
            np.add.at(self.counts[1, width], (positions, at), weight)
        self._stale = True

    def logistic_fits(self) -> list[tuple[int, int, float, float]]:
        """Return drafts of the block, position, and the slope and intercept of the logistic
        function of the evidence that comes closest to the rates there."""
        fits: list[tuple[int, int, float, float]] = []
        for i, width in enumerate(self.widths):
            rates = self.table(i).clip(1e-3, 1 - 1e-3)
            for k, logits in enumerate(np.log(rates / (1 - rates))):
                weights = np.sqrt(self.counts[1, i, k] + 0.1)
                slope, intercept = np.polyfit(np.arange(KNOTS) / 2, logits, 1, w=weights)
                fits.append((width, k, float(slope), float(intercept)))
        return fits

    @staticmethod
    def _knots(evidence: Any) -> tuple[Any, Any]:
        """Return the knot below each evidence and the share of the next one."""
        at = 2.0 * np.asarray(evidence)
        knots = np.minimum(at.astype(np.int64), KNOTS - 2)
        return knots, np.minimum(at - knots, 1.0)


class AcceptanceForecast:
    """Chances of each request's next block: the mean of its own blocks, shrunk to what requests
    about which little is known have brought."""

    def __init__(self, slots: int, width: int, config: PolicyConfig):
        self.config, self.step = config, 0
        self.priors = np.tile(config.first_rate ** np.arange(1.0, width + 1), (2, 1))
        """Chances [2, K] of a request's first block, and of a later one."""
        self._seen = np.ones(2)
        self._trust = np.array([config.own_weight, 1.0])
        """Products, beyond the prior, of requests' means with what came next, and with themselves.
        Their ratio is the slope by which a mean tells of the next block."""
        self._means, self._before, self._newest = np.zeros((3, slots, width))
        self._when = np.full(slots, -1)

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

    def sample(self, slots: Any, spread: float) -> tuple[Any, Any]:
        """Return blocks [n, K] that differ as next blocks will and are on average what is expected,
        and the expectations [n, K] by which to rank them. For requests that drafted just now these
        are of before their newest block, so that those ranked first look no better than they turn
        out to be. spread: 0 for expectations alone, 1 for blocks."""
        expected, when = self.expected(slots), self._when[slots]
        recent = ((when >= 0) & (when >= self.step - 1))[:, None]
        before = np.where(recent, self._before[slots], expected)
        newest = np.where(recent, self._newest[slots], expected)
        newest = (newest + expected.mean(0) - newest.mean(0)).clip(0.0, 1.0)
        return expected + spread * (newest - expected), expected + spread * (before - expected)

    def observe(self, slots: Any, chances: Any) -> None:
        """Take in the chances [n, K] of blocks made in the newest step."""
        config, expected, own = self.config, self.expected(slots), self._weights(slots)
        known, fade = self._when[slots] >= 0, self._fade(slots)
        beyond = [(part - self.priors[1]).sum(1)[known] for part in (self._means[slots], chances)]
        mean, came = beyond[0] * fade[known], beyond[1]
        self._trust *= (1 - config.own_gain) ** len(mean)
        self._trust += config.own_gain * np.array([mean @ came, mean @ mean])
        for i, prior in enumerate(self.priors):
            weights = (1 - own) * (known == i)
            if weights.any():
                self._seen[i] += weights.sum()
                prior += weights @ (chances - prior) / self._seen[i]
        gain = np.where(known, 1 - (1 - config.block_gain) * fade, 1.0)[:, None]
        self._means[slots] += gain * (chances - self._means[slots])
        self._before[slots], self._newest[slots] = expected, chances
        self._when[slots] = self.step

    def _weights(self, slots: Any) -> Any:
        """Return how much each request's own mean counts [n]."""
        slope = np.clip(self._trust[0] / self._trust[1], 0.0, self.config.max_own_weight)
        return slope * self._fade(slots) * (self._when[slots] >= 0)

    def _fade(self, slots: Any) -> Any:
        return 0.5 ** ((self.step - self._when[slots]) / self.config.rest_memory)
