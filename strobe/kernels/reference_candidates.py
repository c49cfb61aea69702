"""The candidates of block drafters in plain torch.

Legend: R rows, V vocabulary, S spans, K drafts per span, C candidates, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def best_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits [R, V] -> the `count` largest [R, C] float32 in descending order, and their tokens
    [R, C] int64; the lowest first if equal. A NaN counts as -inf."""
    wide = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = torch.where(wide == 0, 0.0, wide).view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    last = logits.shape[1] - 1
    words = (order << 32) | (last - torch.arange(last + 1, device=logits.device))
    ids = last - (words.topk(count, sorted=True).values & 0xFFFFFFFF)
    return wide.gather(1, ids), ids


def edges(
    unary: Tensor,
    ids: Tensor,
    anchor: Tensor,
    left: Tensor,
    right: Tensor,
    hidden: Tensor | None,
    scale: float = 1.0,
) -> Tensor:
    """Return scores [S, K, C, C] float32 of a slot's candidates after each candidate before it:
    unary[s, k, c] + scale * <left[before] * hidden[s, k], right[ids[s, k, c]]>.

    unary [S, K, C] float32, ids [S, K, C], anchor [S]: the token before slot 0; left, right [V, r];
    hidden [S, K, r]."""
    first = anchor[:, None, None].expand(-1, 1, ids.shape[2])
    before = left[torch.cat([first, ids[:, :-1]], 1)]
    if hidden is not None:
        before = before * hidden[:, :, None]
    product = before.float() @ right[ids].float().transpose(-1, -2)
    return product * scale + unary[:, :, None]
