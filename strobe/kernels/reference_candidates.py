"""The candidates of block drafters in plain torch.

Legend: R rows, V vocabulary, S spans, K drafts per span, C candidates, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 64
"""Neighboring tokens whose largest logit a CPU compares first."""


def best_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits [R, V] -> the `count` largest [R, C] float32 in descending order, and their tokens
    [R, C] int64; the lowest first if equal. A NaN counts as -inf."""
    rows, size = logits.shape
    wide = logits.float()
    if logits.device.type == "cpu" and size > 4 * count * GROUP:
        padding = -size % GROUP
        padded = F.pad(wide, (0, padding), value=-torch.inf) if padding else wide
        grouped = padded.view(rows, -1, GROUP)
        largest = grouped.amax(2)
        if logits.dtype == torch.float32:
            best = _distinct_best(grouped, largest, count)
            if best is not None:
                return best
        if not largest.isnan().any():
            return _best_by_groups(grouped, largest, count)
    wide = wide.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    places = _largest_words(wide, torch.arange(size, device=wide.device), count)
    return wide.gather(1, places), places


def _distinct_best(grouped: Tensor, largest: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """As `_best_by_groups`, by fewer operations; None if there are NaN or equal logits among the
    C + 1 best. The values of these are right, since they are in C + 1 groups whose maxima no other
    group exceeds; so if the values differ, so do the tokens."""
    groups = largest.topk(count + 1, sorted=False).indices
    values = grouped.gather(1, groups[..., None].expand(-1, -1, GROUP)).flatten(1)
    best, places = values.topk(count + 1)
    if not (best[:, 1:] < best[:, :-1]).all():
        return None
    places = places[:, :count]
    tokens = groups.gather(1, places // GROUP) * GROUP + places % GROUP
    return best[:, :count], tokens


def _best_by_groups(grouped: Tensor, largest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `best_of`, for logits grouped [R, V / GROUP, GROUP] with these maxima [R, V / GROUP]. The
    C best tokens are in the C groups with the largest maxima, the lowest if equal."""
    groups = _largest_words(largest, torch.arange(largest.shape[1]), count)[..., None]
    values = grouped.gather(1, groups.expand(-1, -1, GROUP)).flatten(1)
    tokens = (groups * GROUP + torch.arange(GROUP)).flatten(1)
    best = _largest_words(values, tokens, count)
    return grouped.flatten(1).gather(1, best), best


def _largest_words(values: Tensor, numbers: Tensor, count: int) -> Tensor:
    """values [R, n] float32 without NaN, numbers [R, n] or [n] int64 below 2^31 -> those of the
    `count` largest values [R, C], descending; the lowest first if equal. A word orders by its
    value in the high half, and then by the complement of its number."""
    bits = torch.where(values == 0, 0.0, values).view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    words = (order << 32) | (0xFFFFFFFF - numbers)
    return 0xFFFFFFFF - (words.topk(count, sorted=True).values & 0xFFFFFFFF)


class EdgeTerms(NamedTuple):
    """The terms of candidates' scores, each after the candidate before it.

    unary [S, K, C] float32: their own scores; ids [S, K, C]: their tokens; anchor [S]: the token
    before slot 0. left [V, r], right [V', r]: vectors of the tokens before and of candidates;
    hidden [S, K, r]: factors of each slot, if any; scale: of the products; rows [S, K, C]: the
    candidates' rows of `right`, if not their ids. All but anchor are contiguous.
    """

    unary: Tensor
    ids: Tensor
    anchor: Tensor
    left: Tensor
    right: Tensor
    hidden: Tensor | None = None
    scale: float = 1.0
    rows: Tensor | None = None


def edges(terms: EdgeTerms) -> Tensor:
    """Return scores [S, K, C, C] float32 of a slot's candidates after each candidate before it:
    unary[s, k, c] + scale * <left[before] * hidden[s, k], right[rows[s, k, c]]>."""
    left = _rows(terms.left, before(terms.anchor, terms.ids))
    if terms.hidden is not None:
        left = left * terms.hidden[:, :, None]
    right = _rows(terms.right, terms.ids if terms.rows is None else terms.rows)
    return join(left, right, terms.unary, terms.scale)


def _rows(table: Tensor, numbers: Tensor) -> Tensor:
    """Return table[numbers]; on a CPU this is the faster way."""
    return table.index_select(0, numbers.flatten()).view(*numbers.shape, -1)


def before(anchor: Tensor, ids: Tensor) -> Tensor:
    """Return the tokens before each slot [S, K, C]: the anchor [S], then the candidates ids
    [S, K, C] of the slot before."""
    first = anchor[:, None, None].expand(-1, 1, ids.shape[2])
    return torch.cat([first, ids[:, :-1]], 1)


def join(left: Tensor, right: Tensor, unary: Tensor, scale: float = 1.0) -> Tensor:
    """Vectors left, right [S, K, C, r] of the candidates before and of the candidates -> their
    edges [S, K, C, C], as `edges` returns them."""
    left = left.float().flatten(0, 1)
    right = right.float().flatten(0, 1)
    product = torch.bmm(left, right.transpose(1, 2)).view(*unary.shape, -1)
    if scale != 1.0:
        product = product * scale
    return product + unary[:, :, None]
