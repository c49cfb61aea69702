"""Sampling on several ranks: each chooses the tokens of its share of the rows.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strobe.parallel.group import Group, share
from strobe.sampling.candidates import Candidates, HeadOutputs
from strobe.sampling.logprobs import Scores
from strobe.sampling.sampling_state import (
    FindCandidates,
    LogitRows,
    Sampled,
    SampleRows,
    SamplingMode,
)


class RankRows:
    """Divides rows of logits between the ranks; see `strobe.sampling.sampling_state.SharesRows`."""

    def __init__(self, group: Group, vocab_size: int):
        self.group = group
        self.vocab_size = vocab_size

    def sample(
        self,
        sample: SampleRows,
        logits: Tensor,
        rows: LogitRows,
        mode: SamplingMode,
        masks: Tensor | None,
    ) -> Sampled:
        """Sample this rank's share of the rows, and join the ranks' results, which are the same on
        every rank. logits: all columns [R, V], or this rank's."""
        own, own_logits = self._own(logits, self.vocab_size)
        own_masks = None if masks is None else masks[own]
        own_results = sample(own_logits, rows.select(own), mode, own_masks)
        return _unpack(self._join(_pack(own_results), own, len(logits)), own_results)

    def candidates(self, find: FindCandidates, outputs: HeadOutputs, rows: LogitRows) -> Candidates:
        """As `sample`, for the candidates of drafts."""
        own, raw = self._own(outputs.raw, outputs.width)
        values, places = find(outputs.with_raw(raw), rows.select(own))
        packed = torch.cat([values, places.float()], 1)  # places below 2^24 are exact
        values, places = self._join(packed, own, len(outputs.raw)).chunk(2, 1)
        return Candidates(values.contiguous(), places.long())

    def _own(self, rows: Tensor, width: int) -> tuple[slice, Tensor]:
        """Return this rank's share of rows, and their `width` columns. rows: all columns [R,
        width], or this rank's."""
        own = share(self.group.rank, self.group.size, len(rows))
        is_whole = rows.shape[1] == width
        return own, rows[own] if is_whole else self.group.swap(rows)[:, :width]

    def _join(self, part: Tensor, own: slice, count: int) -> Tensor:
        """Join the ranks' shares of results. Of rows in two shares, the first rank's counts."""
        first = self.group.rank * len(part)
        whole = part.new_zeros(count, part.shape[1])
        whole[first : first + len(part)] = part[first - own.start :]
        return self.group.sum(whole)


def _pack(results: Sampled) -> Tensor:
    """Return results as columns [R, C] float32, in which ids below 2^24 are exact."""
    columns = [results.tokens, results.margins, *(results.scores or ())]
    wide = [c if c.ndim == 2 else c[:, None] for c in columns if c is not None]
    return torch.cat([c.float() for c in wide], 1)


def _unpack(packed: Tensor, like: Sampled) -> Sampled:
    """Undo `_pack`."""
    tokens = packed[:, 0].long()
    packed = packed[:, 1:]
    margins = scores = None
    if like.margins is not None:
        margins = packed[:, 0].contiguous()
        packed = packed[:, 1:]
    if like.scores is not None:
        values = packed[:, 0]
        ranks = packed[:, 1].long()
        top_values, top_ids = packed[:, 2:].chunk(2, 1)
        scores = Scores(values=values, ranks=ranks, top_values=top_values, top_ids=top_ids.long())
    return Sampled(tokens=tokens, scores=scores, margins=margins)
