"""What steps cost on this device: measured by rows, and followed while the engine runs. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_FAST, _SLOW = 0.1, 0.02  # of a step's error, what is taken for the pace and for a wrong table


class Work(NamedTuple):
    """A step's: rows of the drafter's blocks, rows of requests that decode, these requests, the
    positions of all their contexts together, and rows of others beside them. Rows may be arrays."""

    draft: Any
    rows: Any
    requests: int = 1
    context: int = 0
    beside: int = 0


class Costs:
    """Milliseconds of a step, and the pace: what steps take now over what the table says."""

    def __init__(
        self,
        draft: Mapping[int, float],
        verify: Mapping[int, float],
        request: float = 0.0,
        context: float = 0.0,
        context_row: float = 0.0,
    ):
        """Milliseconds by rows of the drafter's blocks and by rows of the target, each for two
        numbers of rows at least; beside those for each request, and for each position of its
        context once and with each further row of the request."""
        self._draft, self._verify = _Curve(draft), _Curve(verify)
        self.request, self.context, self.context_row = request, context, context_row
        self.pace = 1.0

    def ms(self, work: Work) -> Any:
        """Of such a step; its drafter may have no rows."""
        draft, rows, requests, context, beside = work
        drafting = self._draft.at(draft) * (np.asarray(draft) > 0)
        each = np.maximum(np.asarray(rows) / requests - 1, 0.0)
        reading = context * (self.context + self.context_row * each)
        return self.pace * (
            drafting + self._verify.at(rows + beside) + self.request * requests + reading
        )

    def observe(self, work: Work, ms: float, steps: int = 1) -> None:
        """So many such steps took so long each."""
        # A pause, as for a capture, says nothing about steps.
        found = min(max(ms / float(self.ms(work)), 0.5), 2.0)
        by = (found - 1) * (1 - (1 - _SLOW) ** steps)
        self._verify.move(work.rows, by * float(self.ms(work)) / self.pace)
        self.pace *= found ** (1 - (1 - _FAST) ** steps)

    def as_dict(self) -> dict[str, Any]:
        """The table as it stands."""
        parts = {"draft": self._draft.as_dict(), "verify": self._verify.as_dict()}
        names = ("request", "context", "context_row")
        return parts | {name: getattr(self, name) for name in names}


class _Curve:
    """Points, straight lines between them, and the last line on beyond."""

    def __init__(self, points: Mapping[int, float]):
        assert len(points) > 1, "a curve of less than two points"
        self.rows = np.array(sorted(points), dtype=np.float64)
        # More rows never cost less: what a measurement says against that is noise.
        self.costs = np.maximum.accumulate([points[n] for n in sorted(points)])

    def at(self, rows: Any) -> Any:
        rows = np.asarray(rows)
        (a, b), (low, high) = self.rows[-2:], self.costs[-2:]
        beyond = np.maximum(rows - b, 0.0) * (high - low) / (b - a)
        return np.interp(rows, self.rows, self.costs) + beyond

    def move(self, rows: int, by: float) -> None:
        """Move the nearest point, so that so many rows cost that much more; more rows go on costing
        no less."""
        a, b = self.rows[-2:]
        by /= 1 + max(rows - b, 0.0) / (b - a)  # beyond the last point its error grows
        at = int(np.abs(self.rows - rows).argmin())
        self.costs[at] = max(self.costs[at] + by, 1e-3)
        self.costs[at + 1 :] = np.maximum(self.costs[at + 1 :], self.costs[at])
        self.costs[:at] = np.minimum(self.costs[:at], self.costs[at])

    def as_dict(self) -> dict[str, float]:
        return {str(int(n)): round(float(c), 4) for n, c in zip(self.rows, self.costs, strict=True)}
