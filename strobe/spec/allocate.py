"""Which drafts of a step are verified: those most likely to count, over all requests together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strobe.transfer import upload


def chances(margins: Tensor, confidence: Sequence[tuple[float, float]]) -> Tensor:
    """margins [S, K] of drafts -> [S, K] float32, each one's chance to count: the product of a
    logistic function of each margin up to it, by place slope and intercept, so that it falls along
    a block. Places without confidence count as certain."""
    width = margins.shape[1]
    given = [*confidence[:width], *[(0.0, float("inf"))] * (width - len(confidence))]
    slopes, intercepts = upload(given, margins.device, torch.float32).unbind(1)
    return torch.sigmoid(margins * slopes + intercepts).cumprod(1)


def most_promising(
    margins: Tensor | None,
    confidence: Sequence[tuple[float, float]],
    most: Tensor,
    width: int,
    count: int,
) -> Tensor:
    """margins [S, K], most [S], K -> drafts to verify [S] int64, `count` in all or as many as there
    are: those with the largest chances, of each span the first. Among equal ones, and without
    margins, earlier places come first, then earlier spans."""
    spans = most.shape[0]
    if margins is None:
        margins = torch.zeros(spans, width, device=most.device)
    places = torch.arange(width, device=margins.device)
    there = places < most[:, None]
    keys = torch.where(there, chances(margins, confidence), -1.0)
    order = keys.T.flatten().sort(descending=True, stable=True).indices[:count]
    taken = torch.zeros(spans * width, dtype=torch.int64, device=margins.device)
    taken[order] = 1
    return (taken.view(width, spans).T * there).sum(1)
