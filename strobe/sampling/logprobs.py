"""Log probabilities as the model gave them: before temperature, processors and masks."""

from __future__ import annotations

import torch
from torch import Tensor

from strobe.step import Scores as Scores  # moves here once step.py is free of it


def score(logits: Tensor, tokens: Tensor, top: int) -> Scores:
    """logits [A, V], the token that followed each row [A], how many of the most probable to name.

    Equal log probabilities share the better rank; among them the lower id is named first.
    """
    found = logits.float().log_softmax(-1)
    values = found.gather(1, tokens[:, None])
    ranks = (found > values).sum(-1) + 1
    ids = found.topk(top, -1).indices.sort(-1).values
    best = found.gather(1, ids)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    return Scores(values[:, 0], ranks, best.gather(1, order), ids.gather(1, order))


def joined(parts: list[Scores]) -> Scores:
    """Several, one behind the other; all with the same number of top ones."""
    return parts[0] if len(parts) == 1 else Scores(*map(torch.cat, zip(*parts, strict=True)))
