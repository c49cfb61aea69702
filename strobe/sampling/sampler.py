"""Logits to tokens for any rows: filters, then a race of what they leave by each row's own noise.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strobe.sampling.noise import Gumbel, gumbel, row_words

NO_TOKEN = -1
"""The token of a row whose largest logit is NaN: its request ends with an error."""

MIN_TEMPERATURE = 1e-30
"""The least temperature that is divided by, so that its reciprocal is a float32."""

MAX_MARGIN = 40.0
"""Of a token: beyond it a chance is as good as certain."""

ROUNDING_TOLERANCE = 1e-4
"""More than the rounding of any sum of weights, as a share of it."""


class RowParams(NamedTuple):
    """How each of R rows is sampled: temperature (0 is greedy), top_p, min_p [R] float32; top_k [R]
    int64, 0 is off; key, position [R] int64: the noise's key, and where the token will stand."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    key: Tensor
    position: Tensor


def argmax(logits: Tensor) -> Tensor:
    """logits [R, V] -> [R] int64, the first maximum of each row, NO_TOKEN where it is NaN. NumPy's
    is 6 times torch's on a CPU (512 x 2,048: 72 against 451 us)."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        values, ids = logits.numpy(), logits.numpy().argmax(-1)
        ids[np.isnan(values[np.arange(len(ids)), ids])] = NO_TOKEN
        return torch.from_numpy(ids)
    best, ids = logits.max(-1)
    return ids.masked_fill_(best.isnan(), NO_TOKEN)


def best_two(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [R, V] -> the first maximum of each row [R] int64, and its margin [R] float32: how far
    it is above the second largest, 0 to MOST_MARGIN."""
    ids = argmax(logits)
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        values, cells = logits.numpy(), (np.arange(len(ids)), ids.numpy())
        best = values[cells]
        values[cells] = -np.inf
        with np.errstate(invalid="ignore"):  # of infinities: no margin
            margins = torch.from_numpy(best - values.max(-1))
        values[cells] = best
    else:
        at = ids.clamp(min=0)[:, None]
        second = logits.scatter(1, at, float("-inf")).amax(-1)
        margins = logits.gather(1, at)[:, 0].float() - second.float()
    return ids, margins.nan_to_num_(0.0).clamp_(0.0, MAX_MARGIN)


def sort_descending(values: Tensor, sizes: Tensor) -> Tensor:
    """Each row of [R, V] from the largest on; on a CPU no more of them than the largest of sizes.
    NumPy sorts ten times as fast as torch there (512 x 2,048: 9 against 90 ms)."""
    if values.device.type != "cpu":
        return values.sort(-1, descending=True).values
    negated, max_size = (-values).numpy(), int(sizes.amax())
    if max_size < values.shape[1]:
        negated = np.partition(negated, max_size, -1)[:, :max_size]
    return -torch.from_numpy(np.sort(negated, -1))


def filter_mask(weights: Tensor, rows: RowParams) -> Tensor:
    """Unnormalised probabilities [R, V] float32 -> [R, V] bool, what top-k, top-p and min-p leave
    of them; ties at the edge stay.

    top-p counts mass within what top-k left (as z-lab's reference and transformers do); min-p is
    relative to the most probable token.
    """
    size = torch.where(rows.top_k > 0, rows.top_k, weights.shape[1])[:, None]
    ordered = sort_descending(weights, size)
    inside = ordered * (torch.arange(ordered.shape[1], device=weights.device) < size)
    reached = inside.cumsum(-1)
    nucleus = torch.where(rows.top_p < 1, rows.top_p * reached[:, -1], float("inf"))[:, None]
    count = (reached.sub_(inside) < nucleus).sum(-1, keepdim=True).clamp_min_(1)
    edge = ordered.gather(1, torch.minimum(count, size).sub_(1))
    return weights >= edge.maximum(rows.min_p[:, None] * ordered[:, :1])


def sample_rows(logits: Tensor, rows: RowParams, *, filtered: bool = True) -> Tensor:
    """logits [R, V] -> tokens [R] int64; filtered: some row filters.

    Greedy rows take their first maximum. The others take the first maximum of logit / temperature
    plus Gumbel noise over the tokens that the filters keep, which is distributed by these tokens'
    probabilities. Rows without probabilities (+inf, or nothing but -inf) give their first maximum,
    too, and rows with a NaN NO_TOKEN. The twin of `strobe.kernels.sampling.sample_rows`.
    """
    sample = sample_rows_numpy if logits.device.type == "cpu" else sample_rows_torch
    return sample(logits.float(), rows, filtered)


def sample_rows_torch(logits: Tensor, rows: RowParams, filtered: bool) -> Tensor:
    """sample_rows by operations that a graph can capture; logits in float32."""
    tokens = argmax(logits)
    top = logits.gather(1, tokens.clamp(min=0)[:, None])
    clamped = rows.temperature.clamp_min(MIN_TEMPERATURE)
    temperature = torch.where(rows.temperature > 0, clamped, 1.0)
    scores = (logits - top).mul_(temperature.reciprocal_()[:, None])
    if filtered:
        scores.masked_fill_(filter_mask(scores.exp(), rows).logical_not_(), float("-inf"))
    scores += gumbel(rows.key, rows.position, logits.shape[1])
    return torch.where(top[:, 0].isfinite() & (rows.temperature > 0), argmax(scores), tokens)


@np.errstate(over="ignore")
def sample_rows_numpy(logits: Tensor, rows: RowParams, filtered: bool) -> Tensor:
    """sample_rows for a CPU, a few rows at a time, in its cache; rows that are not sampled cost no
    more than their maximum. The token that wins the race of all is mostly one that the filters
    keep, and then wins theirs, too: only other rows are sorted, and race again."""
    values, words = logits.numpy(), row_words(rows.key, rows.position).numpy()
    top_p, min_p, top_k = rows.top_p.numpy(), rows.min_p.numpy(), rows.top_k.numpy()
    best = values.argmax(-1) if len(values) else np.empty(0, dtype=np.int64)
    tokens, top = best.copy(), values[np.arange(len(best)), best][:, None]
    tokens[np.isnan(top[:, 0])] = NO_TOKEN
    temperature = rows.temperature.numpy()[:, None]
    scale, noise = 1 / np.maximum(temperature, np.float32(MIN_TEMPERATURE)), Gumbel(logits.shape[1])
    min_sums = noise.at(words, best)  # what the best token comes to, whose score is 0
    racing = np.flatnonzero(np.isfinite(top) & (temperature > 0))
    ranked = (top_k[racing] > 0) & filtered
    doubtful = [racing[ranked]]
    for exact in (False, True):
        index = np.concatenate(doubtful) if exact else racing[~ranked]
        for first in range(0, len(index), noise.rows):
            places = index[first : first + noise.rows]
            scores: Any = (values[places] - top[places]) * scale[places]
            if exact:
                part = RowParams(*[column[torch.from_numpy(places)] for column in rows])
                scores[~filter_mask(torch.from_numpy(scores).exp(), part).numpy()] = -np.inf
            tokens[places] = winners = noise.race(scores, words[places], min_sums[places])
            if filtered and not exact:
                winner_scores = scores[np.arange(len(winners)), winners]
                below_top, below_places = winner_scores < 0, places[winner_scores < 0]
                limits = top_p[below_places], min_p[below_places]
                passed = _passes_filters(scores[below_top], winner_scores[below_top], *limits)
                doubtful.append(below_places[~passed])
    return torch.from_numpy(tokens)


def _passes_filters(scores: Any, winner_scores: Any, top_p: Any, min_p: Any) -> NDArray[np.bool_]:
    """[R, V] -> [R], whether top-p and min-p keep scores own [R], however `kept` rounds."""
    weights, weight = np.exp(scores), np.exp(winner_scores)
    above = (weights * (scores > winner_scores[:, None] - ROUNDING_TOLERANCE)).sum(-1) - weight
    nucleus = np.where(top_p < 1, top_p - ROUNDING_TOLERANCE, 2) * weights.sum(-1)
    return (above < nucleus) & (weight * (1 - ROUNDING_TOLERANCE) >= min_p)
