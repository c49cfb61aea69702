"""Log probabilities of the model itself: before temperature, processors and masks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """The model's log probabilities of A rows: of the next token [A] float32, its rank [A] int64
    from 1, and the values and ids of m named and the k most probable tokens [A, m + k]."""

    values: Tensor
    ranks: Tensor
    top_values: Tensor
    top_ids: Tensor


def score(logits: Tensor, tokens: Tensor, top: int, *named: Tensor) -> Scores:
    """logits [A, V], the token after each row [A] (below 0 counts as 0), number of top tokens,
    named tokens [A, m], if any -> Scores.

    Tokens of equal log probability share the better rank and are listed by ascending id.
    """
    log_probs = logits.float().log_softmax(-1)
    values = log_probs.gather(1, tokens.clamp(min=0)[:, None])
    ranks = (log_probs > values).sum(-1) + 1
    ids = log_probs.topk(top, -1).indices.sort(-1).values
    top_values = log_probs.gather(1, ids)
    order = top_values.sort(dim=-1, descending=True, stable=True).indices
    ids = torch.cat([*named, ids.gather(1, order)], 1)
    return Scores(
        values=values[:, 0], ranks=ranks, top_values=log_probs.gather(1, ids), top_ids=ids
    )


def concat(parts: list[Scores]) -> Scores:
    """Concatenate scores with the same number of top tokens."""
    if len(parts) == 1:
        return parts[0]
    return Scores(
        values=torch.cat([part.values for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        top_values=torch.cat([part.top_values for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
    )
