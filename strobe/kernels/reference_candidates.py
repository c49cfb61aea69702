"""The candidates of block drafters in plain torch.

Legend: R rows, V vocabulary, S spans, K drafts per span, C candidates, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def best_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits [R, V] -> the `count` largest [R, C] float32 in descending order, and their tokens
    [R, C] int64; the lowest first if equal. A NaN counts as -inf."""
    if logits.device.type != "cpu":
        return _best_by_words(logits, count)
    values, ids = logits.float().topk(count)
    # torch chooses among equal logits, and orders them, as it likes; a NaN is above all numbers.
    unsure = (logits >= values[:, -1:]).sum(1) > count
    unsure |= (values[:, 1:] == values[:, :-1]).any(1) | values.isnan().any(1)
    if unsure.any():
        values[unsure], ids[unsure] = _best_by_words(logits[unsure], count)
    return values, ids


def _best_by_words(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `best_of`, by words that order logits and then tokens."""
    wide = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = torch.where(wide == 0, 0.0, wide).view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    last = logits.shape[1] - 1
    words = (order << 32) | (last - torch.arange(last + 1, device=logits.device))
    ids = last - (words.topk(count, sorted=True).values & 0xFFFFFFFF)
    return wide.gather(1, ids), ids


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
    left = terms.left[before(terms.anchor, terms.ids)]
    if terms.hidden is not None:
        left = left * terms.hidden[:, :, None]
    right = terms.right[terms.ids if terms.rows is None else terms.rows]
    return join(left, right, terms.unary, terms.scale)


def before(anchor: Tensor, ids: Tensor) -> Tensor:
    """Return the tokens before each slot [S, K, C]: the anchor [S], then the candidates ids
    [S, K, C] of the slot before."""
    first = anchor[:, None, None].expand(-1, 1, ids.shape[2])
    return torch.cat([first, ids[:, :-1]], 1)


def join(left: Tensor, right: Tensor, unary: Tensor, scale: float = 1.0) -> Tensor:
    """Vectors left, right [S, K, C, r] of the candidates before and of the candidates -> their
    edges [S, K, C, C], as `edges` returns them."""
    product = left.float() @ right.float().transpose(-1, -2)
    return product * scale + unary[:, :, None]
