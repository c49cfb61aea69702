"""Candidates of sampled drafts: the tokens that lead the race in which a row's token is drawn.

A drafter that chooses among a few tokens of each row agrees with its target more often if the
target's token is one of them. At temperature 0 the most probable tokens hold it; above, those with
the largest sums of score and noise do, since the target draws with the same noise.

Legend: R rows, V vocabulary, V' rows of a drafter's output layer, n of which may be a rank's own, C
candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strobe.kernels.reference_candidates import best_of
from strobe.sampling.noise import gumbel, gumbel_at
from strobe.sampling.sampler import MIN_TEMPERATURE, RowParams, filter_mask

NUM_SORTED = 1024
"""Weights of a row that a CPU sorts first to find what top-p keeps."""


class HeadOutputs(NamedTuple):
    """A drafter's output layer applied to some rows.

    raw [R, n]: its outputs; width: V'; finish: turns raw outputs into logits, which may overwrite
    them, None if they are logits; tokens [V']: ids of the layer's rows, None if they are 0 to V' -
    1."""

    raw: Tensor
    width: int
    finish: Callable[[Tensor], Tensor] | None
    tokens: Tensor | None

    def with_raw(self, raw: Tensor) -> HeadOutputs:
        """Return the same for other rows."""
        return self._replace(raw=raw)

    def logits(self) -> Tensor:
        """Return the logits [R, n]; raw outputs stay as they are."""
        return self.raw if self.finish is None else self.finish(self.raw.clone())


class Candidates(NamedTuple):
    """values [R, C] float32: the candidates' raw outputs, NaN if fewer than C tokens pass the
    filters; places [R, C] int64: their rows of the output
    layer."""

    values: Tensor
    places: Tensor


def race_candidates(
    logits: Tensor, rows: RowParams, count: int, tokens: Tensor | None, *, filtered: bool
) -> tuple[Tensor, Tensor]:
    """logits [R, V'] -> columns [R, C] int64 of the `count` tokens with the largest sums in the
    race of `strobe.sampling.sampler.sample_rows`, in descending order, and which of them take part
    [R, C] bool.

    tokens: see `HeadOutputs`. filtered: whether some row has a filter. Rows that draw nothing,
    among them greedy ones and those with a NaN, get their largest logits. The twin of
    `strobe.kernels.race_candidates`.
    """
    logits = logits.float()
    top = logits.amax(1, keepdim=True)
    draws = (rows.temperature > 0)[:, None] & top.isfinite()
    scale = rows.temperature.clamp_min(MIN_TEMPERATURE).reciprocal_()
    sums = (logits - top).mul_(scale[:, None])
    if filtered:
        sums.masked_fill_(_kept(sums.exp(), rows).logical_not_(), -torch.inf)
    sums += _noise(rows, logits.shape[1], tokens)
    keys, columns = best_of(torch.where(draws, sums, logits), count)
    return columns, keys > -torch.inf


def _kept(weights: Tensor, rows: RowParams) -> Tensor:
    """Return what `filter_mask` does, up to rounding. A CPU, where sorting is slow, sorts only the
    NUM_SORTED largest weights of each row, if these decide."""
    if weights.device.type != "cpu" or weights.shape[1] <= NUM_SORTED:
        return filter_mask(weights, rows)
    ordered = _largest(weights)
    has_top_k = rows.top_k > 0
    has_top_p = rows.top_p < 1
    size = torch.where(has_top_k, rows.top_k, NUM_SORTED)
    inside = ordered * (torch.arange(NUM_SORTED) < size[:, None])
    reached = inside.cumsum(1)
    mass = torch.where(has_top_k, reached[:, -1], weights.sum(1))
    nucleus = torch.where(has_top_p, rows.top_p * mass, torch.inf)
    if ((size > NUM_SORTED) | (has_top_p & (nucleus > reached[:, -1]))).any():
        return filter_mask(weights, rows)
    count = (reached - inside < nucleus[:, None]).sum(1).clamp_(min=1)
    edge = ordered.gather(1, torch.minimum(count, size)[:, None] - 1)
    edge = torch.where((has_top_k | has_top_p)[:, None], edge, 0.0)
    return weights >= edge.maximum(rows.min_p[:, None] * ordered[:, :1])


def _largest(weights: Tensor) -> Tensor:
    """weights [R, V] on a CPU -> the NUM_SORTED largest of each row, descending."""
    negated = np.partition(-weights.numpy(), NUM_SORTED, -1)[:, :NUM_SORTED]
    return -torch.from_numpy(np.sort(negated, -1))


def _noise(rows: RowParams, size: int, tokens: Tensor | None) -> Tensor:
    if tokens is None:
        return gumbel(rows.key, rows.position, size)
    return gumbel_at(rows.key, rows.position, tokens.expand(len(rows.key), -1))
