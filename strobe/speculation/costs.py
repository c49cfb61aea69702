"""Milliseconds of a step: fitted to the steps that warm-up ran, corrected by every later step.
Imports no torch.

    ms = pace * (draft(drafter's rows) + verify(rows) + request * requests + context * positions)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from strobe.speculation.policy_config import PolicyConfig
from strobe.step import Plan, StepResult

_MANY_ROWS = 2**24  # a curve's last line goes on up to there


class StepWork(NamedTuple):
    """Rows of the drafter's blocks, rows of the target, number of decoding requests, and positions
    of all their contexts together. Rows may be arrays."""

    draft_rows: Any
    rows: Any
    requests: int = 1
    context: int = 0

    @classmethod
    def of(cls, plan: Plan, result: StepResult, slots: int) -> StepWork | None:
        """Return the work of a step in which all requests decode, else None. slots: rows of the
        drafter's block."""
        spans = plan.spans
        if not all(span.num_logits and span.num_context_rows == 1 for span in spans):
            return None
        drafting = sum([span.method is not None for span in spans])
        return cls(slots * drafting, result.rows, len(spans), sum([span.start for span in spans]))


class StepCosts:
    """Two curves, milliseconds by rows of the drafter's blocks and by rows of the target; the
    milliseconds of each request and of each position of context; and the pace, the factor by which
    all steps take longer now than at the start."""

    def __init__(
        self,
        draft: Mapping[int, float],
        verify: Mapping[int, float],
        request: float = 0.0,
        context: float = 0.0,
    ):
        """draft, verify: for at least two numbers of rows each."""
        self._draft, self._verify = _curve(draft), _curve(verify)
        self.request, self.context, self.pace = request, context, 1.0

    @classmethod
    def fit(cls, timed: Sequence[tuple[StepWork, float]], *, lines: bool) -> StepCosts | None:
        """Return the costs with the smallest relative errors for these steps and milliseconds, or
        None if there are too few. lines: n rows cost a + b * n, as on a CPU; otherwise each number
        of rows has its own cost."""
        ms = np.array([ms for _, ms in timed])
        works = np.array([work for work, _ in timed], dtype=np.float64).reshape(-1, 4).T
        rows = [np.unique(n[n > 0]) for n in works[:2]]
        if min(map(len, rows)) < 2:
            return None
        knots = [n[[0, -1]] if lines else n for n in rows]
        terms = np.concatenate([*map(_shares, works, knots), works[2:]])
        used = np.ones(len(terms), dtype=bool)
        while True:
            costs = np.zeros(len(terms))
            costs[used] = np.linalg.lstsq((terms[used] / ms).T, np.ones(len(ms)), rcond=None)[0]
            if costs[-2:].min() >= 0:
                break
            used[int(costs[-2:].argmin()) - 2] = False  # a rate below 0 is noise
        values = np.split(np.maximum(costs[:-2], 1e-3), [len(knots[0])])
        # Every measured number of rows is a point, so that `observe` can correct it alone.
        points = [np.interp(*args).tolist() for args in zip(rows, knots, values, strict=True)]
        curves = [dict(zip(n.tolist(), y, strict=True)) for n, y in zip(rows, points, strict=True)]
        return cls(curves[0], curves[1], float(costs[-2]), float(costs[-1]))

    def ms(self, work: StepWork) -> Any:
        """Return the milliseconds of such a step."""
        drafting = np.interp(work.draft_rows, *self._draft) * (np.asarray(work.draft_rows) > 0)
        rates = self.request * work.requests + self.context * work.context
        return self.pace * (drafting + np.interp(work.rows, *self._verify) + rates)

    def observe(self, work: StepWork, ms: float, config: PolicyConfig) -> None:
        """Correct the pace, and the target's curve at the nearest number of rows, by shares of the
        error about a step. A step that took far too long, as for a capture, counts as twice as
        long as expected."""
        expected = float(self.ms(work))
        ratio = min(max(ms / expected, 0.5), 2.0)
        rows, costs = self._verify
        nearest = int(np.abs(rows - work.rows).argmin())
        error = (ratio - 1) * expected / self.pace
        cost = costs[nearest] = max(costs[nearest] + config.table_gain * error, 1e-3)
        np.maximum(costs[nearest:], cost, out=costs[nearest:])  # more rows never cost less
        np.minimum(costs[:nearest], cost, out=costs[:nearest])
        self.pace *= ratio**config.pace_gain

    def as_dict(self) -> dict[str, Any]:
        """Return the curves, without their far ends, and the rates."""
        curves = {
            name: {str(int(n)): round(float(ms), 4) for n, ms in curve.T[:-1]}
            for name, curve in (("draft", self._draft), ("verify", self._verify))
        }
        return {**curves, "request": self.request, "context": self.context}


def _curve(points: Mapping[int, float]) -> Any:
    """Return rows and milliseconds [2, N]. Fewer milliseconds for more rows are noise."""
    rows = np.array([*sorted(points), _MANY_ROWS], dtype=np.float64)
    costs = np.maximum.accumulate([points[n] for n in sorted(points)])
    slope = (costs[-1] - costs[-2]) / (rows[-2] - rows[-3])
    return np.stack((rows, [*costs, costs[-1] + slope * (_MANY_ROWS - rows[-2])]))


def _shares(rows: Any, knots: Any) -> Any:
    """Return the weight of each knot in the cost of each step's rows [knots, steps]; 0 for no
    rows."""
    return np.array([np.interp(rows, knots, unit) * (rows > 0) for unit in np.eye(len(knots))])
