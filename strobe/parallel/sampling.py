"""Sampling on several ranks: each chooses the tokens of its share of the rows.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strobe.parallel.group import Group, share
from strobe.sampling.logprobs import Scores
from strobe.sampling.state import LogitRows, Sampled, SamplingMode, SamplingState


class RankSampling(SamplingState):
    """The state on one of several ranks."""

    def __init__(self, group: Group, *args: Any, **options: Any):
        """args, options: of `SamplingState`."""
        super().__init__(*args, **options)
        self.group = group

    def sample(
        self, logits: Tensor, rows: LogitRows, mode: SamplingMode, masks: Tensor | None = None
    ) -> Sampled:
        """As `SamplingState.sample`, with the same results on every rank. logits: all columns
        [R, V], or this rank's."""
        count, own = len(logits), share(self.group.rank, self.group.size, len(logits))
        is_whole = logits.shape[1] == self.vocab_size
        logits = logits[own] if is_whole else self.group.swap(logits)[:, : self.vocab_size]
        slots, positions, drafts, span, rank = rows
        parts = [None if part is None else part[own] for part in (span, rank, masks)]
        rows = LogitRows(slots[own], positions[own], drafts, *parts[:2])
        tokens, scores, margins = super().sample(logits, rows, mode, parts[2])
        if scores is not None:
            scores = Scores(*[self._join(part, own, count) for part in scores])
        margins = None if margins is None else self._join(margins, own, count)
        return Sampled(self._join(tokens, own, count), scores, margins)

    def _join(self, part: Tensor, own: slice, count: int) -> Tensor:
        """Join the ranks' shares of a result. Of rows in two shares, the first rank's counts."""
        first, whole = self.group.rank * len(part), part.new_zeros(count, *part.shape[1:])
        whole[first : first + len(part)] = part[first - own.start :]
        return self.group.sum(whole)
