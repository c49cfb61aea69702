"""How likely drafts are to be right: a logistic fit of their evidence, by place in the block, over
the newest observations. Imports no torch.

A block is made at once, so margins behind a draft tell of it, too: had it been wrong, what follows
it would hardly be sure. So its evidence is half its own margin, half the mean of its block's.

Legend: n requests, K places of drafts, W observations that are kept of each place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WINDOW = 1024  # observations kept of each place: older ones tell of a text that has passed
FIRST = (0.0, 1.5)  # slope and intercept before anything is known: a chance of 0.82
NEAR = 5  # places by which all chances are lifted
ROUNDS = 5  # of a regression, which begins at the one before
_PRIOR = 8.0  # observations that the fit over all places together counts for at each place
_RIDGE = 1e-3
LIFT = 2.0  # variance, in logits, of how far a text's drafts are above or below the fit


def evidence(margins: Any, most: Any) -> Any:
    """margins [n, K], of which the first `most` [n] of each row are drafts' -> [n, K], the mean of
    each one and of its block's mean."""
    there = np.arange(margins.shape[1]) < most[:, None]
    means = (margins * there).sum(1) / np.maximum(most, 1)
    return (margins + means[:, None]) / 2


class Confidence:
    """P(draft k is right | those before it are) = sigmoid(slope[k] * evidence + intercept[k])."""

    def __init__(self, places: int):
        self._fit = np.tile(np.array(FIRST), (places, 1))
        self.weights = self._fit
        """Slopes and intercepts [K, 2], as newest drafts have turned out."""
        self._shared = np.array([FIRST])
        self._evidence = np.zeros((places, WINDOW))
        self._right = np.zeros((places, WINDOW))
        self._when = np.full((places, WINDOW), -np.inf)
        self.seen = np.zeros(places, dtype=np.int64)
        """Observations of each place so far."""

    def observe(self, evidence: Any, verified: Any, accepted: Any, clock: float = 0.0) -> None:
        """evidence [n, K], drafts verified [n] and accepted [n] of verify steps. A place tells
        something where it was verified and all before it were right; behind the first wrong draft,
        and behind the last one verified, nobody knows."""
        for k in range(min(evidence.shape[1], len(self.weights))):
            told = (accepted >= k) & (verified > k)
            values = evidence[told, k][-WINDOW:]
            at = (self.seen[k] + np.arange(len(values))) % WINDOW
            self._evidence[k, at] = values
            self._right[k, at] = accepted[told][-WINDOW:] > k
            self._when[k, at] = clock
            self.seen[k] += len(values)

    def fit(self, clock: float = 0.0, half: float = 1e9) -> None:
        """Fit slopes and intercepts anew: the penalised maximum of the likelihood of what is kept,
        where places lean on the fit of all places together as on `_PRIOR` observations more. An
        observation weighs half after `half` ticks of the clock, which is at `clock` now."""
        there = 0.5 ** ((clock - self._when) / half)
        count = there.sum()
        if count < 1e-3:
            return
        flat = self._evidence.reshape(1, -1), self._right.reshape(1, -1), there.reshape(1, -1)
        nothing = np.zeros((1, 2))
        self._shared, hessian = regress(*flat, self._shared, nothing, nothing + _RIDGE)
        strength = hessian * (_PRIOR / count) + _RIDGE
        given = self._evidence, self._right, there
        self._fit, _ = regress(*given, self._fit, self._shared, strength)
        self.weights = self._fit

    def lift(self, clock: float, half: float) -> None:
        """Move all intercepts by what makes the newest observations likeliest, drawn to 0: a text
        that margins do not tell from others shows within a few blocks. Halves as in `fit`."""
        evidence, right = self._evidence[:NEAR], self._right[:NEAR]
        there, by = 0.5 ** ((clock - self._when[:NEAR]) / half), 0.0
        known = self._fit[:NEAR, :1] * evidence + self._fit[:NEAR, 1:]
        for _ in range(ROUNDS):
            p = 1 / (1 + np.exp(-(known + by).clip(-30, 30)))
            slope = ((right - p) * there).sum() - by / LIFT
            by += float(np.clip(slope / ((p * (1 - p) * there).sum() + 1 / LIFT), -1, 1))
        self.weights = self._fit + np.array([0.0, by])

    def chances(self, evidence: Any) -> Any:
        """evidence [n, K] -> [n, K], that a draft counts: all up to it are right."""
        slopes, intercepts = self.weights[: evidence.shape[1]].T
        return np.cumprod(1 / (1 + np.exp(-(slopes * evidence + intercepts))), 1)


def regress(
    evidence: Any, right: Any, there: Any, start: Any, towards: Any, strength: Any
) -> tuple[Any, Any]:
    """Penalised logistic regressions of P rows at once: evidence, right, there [P, W] (whether the
    draft was right, what it weighs), from start [P, 2] on, drawn to `towards` [P, 2] with strength
    [P, 2] -> slopes, never below 0, and intercepts [P, 2], and what stands on the diagonal of the
    bound's second derivative [P, 2].

    Each round maximises a quadratic bound of the likelihood, and so never makes it worse, where
    Newton's method may leap away (Jaakkola and Jordan, Statistics and Computing 10, 2000, eq. 10).
    """
    found, diagonal = start, strength
    for _ in range(ROUNDS):
        z = (found[:, :1] * evidence + found[:, 1:]).clip(-30, 30)
        p = 1 / (1 + np.exp(-z))
        error = (right - p) * there
        weight = np.where(abs(z) < 1e-3, 0.25, (p - 0.5) / np.where(z == 0, 1.0, z)) * there
        pull = strength * (found - towards)
        slope, level = (np.stack(((error * evidence).sum(1), error.sum(1)), 1) - pull).T
        cross = (weight * evidence).sum(1)
        diagonal = np.stack(((weight * evidence**2).sum(1), weight.sum(1)), 1)
        a, b = (diagonal + strength).T
        det = a * b - cross**2
        step = np.stack(((b * slope - cross * level) / det, (a * level - cross * slope) / det), 1)
        # Where the slope would fall below 0 it is 0, and the intercept the best one for that.
        least = (found + step)[:, :1] < 0
        alone = (level + cross * found[:, 0]) / b
        found = np.where(least, np.stack((-found[:, 0], alone), 1) + found, found + step)
    return found, diagonal
