"""Chances of drafts to count: of this step's drafts by their own evidence, and of a request's next
block by its blocks so far. Imports no torch.

A draft counts if it and all drafts before it are right. Its chance is the product of one rate per
position, read from a table by *evidence*: (m M^3)^(1/8), where m is the draft's margin and M its
block's mean margin. All drafts of a block come from one forward, and after a wrong draft the
drafter is seldom sure, so later margins tell about a draft, too. The evidence of a chain of prompt
lookup is half the length of its match. `strobe.kernels.evidence` has the terms that the device
shares.

Legend: n blocks, K positions of drafts, B knots of evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from strobe.kernels.evidence import KNOTS, KNOTS_PER_UNIT, evidence
from strobe.speculation.policy_config import PolicyConfig

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_IN_ORDER = np.tri(KNOTS, dtype=np.bool_).T  # [first knot, last knot]


def margin_evidence(margins: Floats, drafts: Ints) -> Floats:
    """Return the evidence [n, K] of margins [n, K]. drafts [n]: number of drafts in each row."""
    exists = np.arange(margins.shape[1]) < drafts[:, None]
    return evidence(margins, exists, np.maximum(drafts, 1), sqrt=np.sqrt)


def knot_weights(evidence: Floats) -> Floats:
    """Return the weights [n, K, B] of the knots next to each evidence [n, K], to interpolate."""
    at = np.minimum(KNOTS_PER_UNIT * evidence, KNOTS - 1)[..., None]
    return np.maximum(1.0 - np.abs(at - np.arange(KNOTS)), 0.0)


def monotone(counts: Floats) -> Floats:
    """Return, for counts [2, ..., B] of right and of seen drafts, the rates [..., B] that never
    fall along B and have the smallest squared error against right / seen, weighted by `seen`: the
    largest mean over first knots i of the smallest mean, over last knots j, of knots i to j."""
    ends = np.cumsum(counts, -1)
    size = counts.shape[-1]
    right, seen = ends[..., None, :] - (ends - counts)[..., None]
    in_order = _IN_ORDER[:size, :size]
    means = np.divide(right, seen, out=np.full(right.shape, np.inf), where=in_order)
    smallest = np.minimum.accumulate(means[..., ::-1], -1)[..., ::-1]
    return (smallest * in_order).max(-2)


class DraftChances:
    """Rates of right drafts by the block's width, position and evidence. Where few drafts were
    seen, a rate follows the rates of all widths and positions together."""

    def __init__(self, widths: Sequence[int], config: PolicyConfig, prior: float = 1.0):
        """prior: weight, in drafts, of the rates of all widths and positions together."""
        self.widths = tuple(widths)
        self.config = config
        self.prior = prior
        self.counts = np.zeros((2, len(self.widths), self.widths[-1], KNOTS))
        """Right drafts, and drafts whose verdict was seen; older ones weigh less."""
        self._tables = dict[int, Floats]()
        self._changed = 0.0
        """Tables by width, and the weight that came and went since they were filled."""

    def table(self, width: int) -> Floats:
        """Return the rates [K, B] of blocks of the width with this index. They follow the counts
        once 2 % of their weight has come or gone."""
        if self._changed > 0.02 * self.counts[1].sum():
            self._tables = {}
            self._changed = 0.0
        if width not in self._tables:
            pooled = self.counts.sum((1, 2))
            right, seen = pooled.sum(1).tolist()
            weight = self.config.first_weight
            mean = (right + weight * self.config.first_rate) / (seen + weight)
            pooled += [[mean / 2], [0.5]]
            prior = self.prior * np.stack((monotone(pooled), np.ones(KNOTS)))
            counts = self.counts[:, width, : self.widths[width]] + prior[:, None]
            self._tables[width] = monotone(counts)
        return self._tables[width]

    def chances(self, width: int, weights: Floats) -> Floats:
        """Return each draft's chance to count [n, K], by the weights [n, K, B] of its evidence."""
        rates = self.table(width)[: weights.shape[1]]
        return np.einsum("nkb,kb->nk", weights, rates).cumprod(1)

    def fade(self, half_lives: float) -> None:
        """Reduce the weight of all counts."""
        self._changed += (1 - 0.5**half_lives) * self.counts[1].sum()
        self.counts *= 0.5**half_lives

    def observe(self, width: int, weights: Floats, verified: Ints, accepted: Ints) -> None:
        """Learn from blocks: weights [n, K, B] of the evidence, drafts verified [n] and accepted
        [n]. A position has a verdict if it was verified and all drafts before it were right."""
        ends = np.array((accepted, np.minimum(accepted + 1, verified)))
        verdicts = np.arange(weights.shape[1]) < ends[..., None]
        counts = np.einsum("cnk,nkb->ckb", verdicts, weights)
        self.counts[:, width, : weights.shape[1]] += counts
        self._changed += counts[1].sum()

    def logistic_fits(self) -> list[tuple[int, int, float, float]]:
        """Return, for each width and position: drafts of the block, position, and the slope and
        intercept of the logistic function of the evidence that meets the rates at 1 and 3."""
        fits: list[tuple[int, int, float, float]] = []
        for i, width in enumerate(self.widths):
            rates = self.table(i)[:, [KNOTS_PER_UNIT, 3 * KNOTS_PER_UNIT]].clip(1e-3, 1 - 1e-3)
            for k, (low, high) in enumerate(np.log(rates / (1 - rates)).tolist()):
                fits.append((width, k, (high - low) / 2, (3 * low - high) / 2))
        return fits


class AcceptanceForecast:
    """Chances of each request's next block: the mean of its own blocks, shrunk to a prior, which is
    the mean of other requests' blocks."""

    def __init__(self, slots: int, width: int, config: PolicyConfig):
        self.config = config
        self.step = 0
        self.priors = np.tile(config.first_rate ** np.arange(1.0, width + 1), (2, 1))
        """Chances [2, K] of a request's first block, and of a later one."""
        self._seen = np.ones(2)  # weights of the blocks in each prior; older ones weigh less
        self._means, self._surprises = np.zeros((2, slots, width))
        """By slot: mean of the blocks; the newest block less what was expected of it."""
        self._when = np.full(slots, -np.inf)  # step of the newest block, -inf for none
        self._covariance = config.own_weight
        self._variance = 1.0
        """Beyond the prior: products of means with the blocks that followed, and of means with
        themselves. Their ratio is the slope by which a mean predicts the next block."""

    def advance(self) -> None:
        """Begin the next step."""
        self.step += 1
        self._seen *= 0.5 ** (1 / self.config.prior_memory)

    def clear(self, slot: int) -> None:
        """Forget the request that had this slot."""
        self._when[slot] = -np.inf

    def expected(self, slots: Ints) -> Floats:
        """Return the expected chances [n, K] of the next blocks."""
        return self._expected(slots)[0]

    def sample(self, slots: Ints, expected: Floats) -> Floats:
        """Return two possible next blocks of each request [n, 2, K], above and below expectation
        by up to as much as its newest block was: a mean hides that some drafts are near certain."""
        bound = np.minimum(expected, 1 - expected)
        difference = np.clip(self._surprises[slots], -bound, bound)
        difference *= len(slots) / (len(slots) + self.config.spread)
        return np.stack((expected + difference, expected - difference), 1)

    def observe(self, slots: Ints, chances: Floats) -> None:
        """Take in the chances [n, k] of this step's blocks, k <= K. Positions beyond a block keep
        their expected rate."""
        config = self.config
        k = chances.shape[1]
        expected, fade, own = self._expected(slots)
        blocks = expected * (chances[:, -1:] / np.maximum(expected[:, k - 1 : k], 1e-6))
        blocks[:, :k] = chances
        known = fade > 0
        means = self._means[slots]
        prior = self.priors[1].sum()
        mean = fade * (means.sum(1) - prior)
        block = blocks.sum(1) - prior
        decay = (1 - config.own_gain) ** int(known.sum())
        self._covariance = decay * self._covariance + config.own_gain * float(mean @ block)
        self._variance = decay * self._variance + config.own_gain * float(mean @ mean)
        weights = np.array((~known, known)) * (1 - own)
        totals = weights.sum(1)
        self._seen += totals
        self.priors += (weights @ blocks - totals[:, None] * self.priors) / self._seen[:, None]
        gain = 1 - (1 - config.block_gain) * fade
        self._means[slots] = means + gain[:, None] * (blocks - means)
        self._surprises[slots] = blocks - expected
        self._when[slots] = self.step

    def _expected(self, slots: Ints) -> tuple[Floats, Floats, Floats]:
        """Return the expected chances [n, K], the weights [n] of means by the time without a block
        since, 0 without any block, and the weights [n] of means against the prior."""
        fade = 0.5 ** ((self.step - self._when[slots]) / self.config.rest_memory)
        slope = max(self._covariance / self._variance, 0.0)
        own = fade * min(slope, self.config.max_own_weight)
        prior = self.priors[(fade > 0).astype(np.intp)]
        return prior + own[:, None] * (self._means[slots] - prior), fade, own
