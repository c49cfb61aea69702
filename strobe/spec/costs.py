"""What steps cost on this device: measured by rows, and followed while the engine runs. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_FAST, _SLOW = 0.1, 0.02  # of a step's error, what is taken for the pace and for a wrong table


class Costs:
    """Milliseconds of a step: what its drafter's rows cost, what its target's rows cost, and what
    reading the K/V of its requests costs, by their positions; and the pace, what steps take now
    over what the table says."""

    def __init__(
        self, draft: Mapping[int, float], verify: Mapping[int, float], context: float = 0.0
    ):
        """Milliseconds by rows of the drafter's blocks and by rows of the target, each for two
        numbers of rows at least; and for each position of all requests together."""
        self._draft, self._verify, self.context = _Curve(draft), _Curve(verify), context
        self.pace = 1.0

    def ms(self, draft: Any, verify: Any, context: int = 0) -> Any:
        """Of steps with so many rows of each, and so many positions of all requests together; the
        drafter may have none."""
        drafting = self._draft.at(draft) * (np.asarray(draft) > 0)
        return self.pace * (drafting + self._verify.at(verify) + self.context * context)

    def observe(self, draft: int, verify: int, context: int, ms: float, steps: int = 1) -> None:
        """So many such steps took so long each."""
        # A pause, as for a capture, says nothing about steps.
        found = min(max(ms / float(self.ms(draft, verify, context)), 0.5), 2.0)
        by = (found - 1) * (1 - (1 - _SLOW) ** steps)
        self._verify.move(verify, by * float(self.ms(draft, verify, context)) / self.pace)
        self.pace *= found ** (1 - (1 - _FAST) ** steps)

    def as_dict(self) -> dict[str, Any]:
        """The table as it stands."""
        return {
            "draft": self._draft.as_dict(),
            "verify": self._verify.as_dict(),
            "context": self.context,
        }


class _Curve:
    """Points, straight lines between them, and the last line on beyond."""

    def __init__(self, points: Mapping[int, float]):
        assert len(points) > 1, "a curve of less than two points"
        self.rows = np.array(sorted(points), dtype=np.float64)
        # More rows never cost less: what a measurement says against that is noise.
        self.costs = np.maximum.accumulate([points[n] for n in sorted(points)])

    def at(self, rows: Any) -> Any:
        (a, b), (low, high) = self.rows[-2:], self.costs[-2:]
        beyond = np.maximum(np.asarray(rows) - b, 0.0) * (high - low) / (b - a)
        return np.interp(rows, self.rows, self.costs) + beyond

    def move(self, rows: int, by: float) -> None:
        """Move the nearest point; more rows go on costing no less."""
        at = int(np.abs(self.rows - rows).argmin())
        self.costs[at] = max(self.costs[at] + by, 1e-3)
        self.costs[at + 1 :] = np.maximum(self.costs[at + 1 :], self.costs[at])
        self.costs[:at] = np.minimum(self.costs[:at], self.costs[at])

    def as_dict(self) -> dict[str, float]:
        return {str(int(n)): round(float(c), 4) for n, c in zip(self.rows, self.costs, strict=True)}
