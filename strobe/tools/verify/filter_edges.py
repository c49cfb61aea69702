"""Rows and temperatures at which a filter that keeps one token too many or too few shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strobe.tools.verify.reference import Logits
from strobe.tools.verify.runs import Answer

POSITIONS = 4
"""Tokens that are sampled after a row."""
RANKS = 4
MIN_GAP = 8.0
"""Minimum distance, in bounds, of the logits on both sides of a filter's edge, if a row has it."""
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class EdgeRow:
    """A row whose filtered sampling can be tested. prompt: the tokens before it; top: its RANKS
    largest logits, in descending order."""

    kind: str
    prompt: tuple[int, ...]
    top: tuple[float, ...]

    def gap(self, kept: int) -> float:
        """Return the logit of the last of the `kept` tokens minus the next one."""
        return self.top[kept - 1] - self.top[kept]

    def temperature(self, kept: int) -> float:
        """Return a temperature at which the first excluded token has half of the best token's
        probability or more."""
        return min(max((self.top[0] - self.top[kept]) / np.log(2.0), 1.0), MAX_TEMPERATURE)

    @staticmethod
    def of(answer: Answer, logits: Logits) -> list[EdgeRow]:
        """Return the rows of an answer after which POSITIONS tokens have room. logits: [n, V]."""
        prompt = answer.case.prompt
        count = max(len(answer.tokens) - POSITIONS, 1)
        logits = logits[:count]
        highest = -np.partition(-logits, RANKS, axis=1)[:, :RANKS]
        return [
            EdgeRow(
                kind=f"{answer.case.kind}, token {i + 1}",
                prompt=(*prompt, *answer.tokens[:i]),
                top=tuple(row),
            )
            for i, row in enumerate((-np.sort(-highest, axis=1)).tolist())
        ]


@dataclass(frozen=True)
class Filter:
    """A filter under test. kept: number of tokens that it keeps, None for all; fields: its
    settings, from a row's probabilities in descending order."""

    name: str
    kept: int | None
    fields: Callable[[NDArray[np.float64]], dict[str, Any]]

    def choose(self, rows: Sequence[EdgeRow], bound: float) -> tuple[EdgeRow, float]:
        """Return the row to sample, and the temperature. Rounding must not move the filter's edge,
        and the token after the edge must be probable: so one token too many or too few shows."""
        if self.kept is None:
            return rows[0], 0.0
        kept = self.kept
        clear = [row for row in rows if row.gap(kept) >= MIN_GAP * bound]
        if clear:
            row = min(clear, key=lambda row: row.temperature(kept))
        else:
            row = max(rows, key=lambda row: row.gap(kept))
        return row, row.temperature(kept)


def _top_p(ordered: NDArray[np.float64]) -> dict[str, Any]:
    return {"top_p": float(ordered[0] + ordered[1] / 2)}


def _min_p(ordered: NDArray[np.float64]) -> dict[str, Any]:
    return {"min_p": float(np.sqrt(ordered[2] * ordered[3]) / ordered[0])}


FILTERS = (
    Filter("unfiltered", None, lambda ordered: {}),
    Filter("top_p", 2, _top_p),
    Filter("top_k", 3, lambda ordered: {"top_k": 3}),
    Filter("min_p", 3, _min_p),
)
