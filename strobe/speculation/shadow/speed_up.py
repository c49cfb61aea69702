"""The speed-up that a drafter would bring, from scored blocks and measured costs of steps. Imports
no torch.

    speed-up(K, c) = tokens per step(K) * ms of a plain step(c) / ms of a step with drafts(K, c)

c requests at once verify up to K drafts each; the drafter drafts its whole block. Intervals cover
the tokens per step only: the costs count as known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from strobe.speculation.acceptance import Floats
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.shadow.block_sums import BlockSums, Estimate

PLAIN = "none"
"""The name of plain decoding, as a method."""


class DrafterCosts(NamedTuple):
    """Costs of plain steps, and of steps with a drafter, measured together. block_rows: of its
    block, 0 on the host."""

    steps: StepCosts
    block_rows: int = 0


class SpeedUp(NamedTuple):
    """The speed-up at a concurrency with the best number of drafts."""

    concurrency: int
    num_drafts: int
    tokens_per_step: float
    estimate: Estimate


class Recommendation(NamedTuple):
    """The drafter with the largest speed-up at a concurrency, PLAIN if all slow decoding down.
    rivals: those whose intervals reach its own, so that it is not sure."""

    concurrency: int
    best: str
    estimate: Estimate
    rivals: tuple[str, ...]


@dataclass(frozen=True)
class ShadowCosts:
    """Measured costs of one engine's steps with each drafter."""

    drafters: Mapping[str, DrafterCosts]
    max_num_seqs: int

    @property
    def concurrencies(self) -> list[int]:
        """The numbers of requests at once for which speed-ups are reported."""
        powers = [2**i for i in range(30) if 2**i < self.max_num_seqs]
        return [*powers, self.max_num_seqs]

    def speed_up(self, drafter: str, sums: BlockSums, concurrency: int) -> SpeedUp | None:
        """Return the speed-up of some answers; None if it is not known."""
        if drafter not in self.drafters or not sums.max_drafts:
            return None
        factors = self._plain_over_drafted(self.drafters[drafter], sums, concurrency)
        values = (1 + sums.accepted / sums.blocks) * factors
        best = 1 + int(np.argmax(values[1:]))
        estimate = sums.tokens_per_step(best)
        return SpeedUp(
            concurrency=concurrency,
            num_drafts=best,
            tokens_per_step=estimate.value,
            estimate=estimate.times(float(factors[best])),
        )

    def _plain_over_drafted(
        self, drafter: DrafterCosts, sums: BlockSums, concurrency: int
    ) -> Floats:
        """Return the ratio of a plain step's milliseconds to a step's with up to K drafts [K]."""
        context = round(concurrency * sums.mean_start)
        plain = StepWork(draft_rows=0, rows=concurrency, requests=concurrency, context=context)
        rows = concurrency * (1 + sums.drafts / sums.blocks)
        drafted = StepWork(
            draft_rows=concurrency * drafter.block_rows,
            rows=rows,
            requests=concurrency,
            context=context,
            drafting=concurrency if drafter.block_rows else 0,
            drafts=rows - concurrency,
        )
        return drafter.steps.ms(plain) / drafter.steps.ms(drafted)

    def recommend(self, sums: Mapping[str, BlockSums], concurrency: int) -> Recommendation | None:
        """Compare drafters on the same answers; None if no speed-up is known."""
        estimates = {PLAIN: Estimate(value=1.0, interval=(1.0, 1.0))}
        for name, own in sums.items():
            speed_up = self.speed_up(name, own, concurrency)
            if speed_up is not None:
                estimates[name] = speed_up.estimate
        if len(estimates) == 1:
            return None
        best = max(estimates, key=lambda name: estimates[name].value)
        return Recommendation(
            concurrency=concurrency,
            best=best,
            estimate=estimates[best],
            rivals=tuple(
                name
                for name, estimate in estimates.items()
                if name != best and not _is_above(estimates[best], estimate)
            ),
        )


def _is_above(estimate: Estimate, other: Estimate) -> bool:
    """Whether an estimate's interval lies above another one's."""
    if estimate.interval is None or other.interval is None:
        return False
    return estimate.interval[0] > other.interval[1]
