"""Which drafts of a step are verified: those most likely to count, over all requests together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strobe.runner.batch import Layout
from strobe.transfer import upload


def verified_drafts(
    layout: Layout,
    margins: Tensor | None,
    confidence: Sequence[tuple[float, float]],
    count: int,
    *,
    kernels: bool = False,
) -> Tensor:
    """The drafts of each span [S] that are verified: all of the host's, and of those that the
    device makes, whose margins are [S, K], the `count` most promising ones. kernels: by triton's,
    where the layout is padded."""
    made, width = layout.device_drafts, layout.shape.max_drafts
    if margins is None:
        margins = torch.zeros(len(made), width, device=made.device)
    weights = _weights(confidence, width, made.device)
    if kernels and layout.padded:
        from strobe.kernels.narrow import choose

        return choose(margins, weights, made, layout.drafts, count)
    return layout.drafts - made + most_promising(margins, weights, made, count)


def _weights(confidence: Sequence[tuple[float, float]], width: int, device: torch.device) -> Tensor:
    """[K, 2]; places without confidence count as certain."""
    given = [*confidence[:width], *[(0.0, float("inf"))] * (width - len(confidence))]
    return upload(given, device, torch.float32)


def chances(margins: Tensor, weights: Tensor, most: Tensor) -> Tensor:
    """margins [S, K] of drafts, of which the first `most` [S] of a row are there, weights [K, 2] ->
    [S, K] float32, each one's chance to count: the product of a logistic function of the evidence
    up to it (`strobe/speculation/confidence.py`), by place slope and intercept, so that it falls
    along a block."""
    there = torch.arange(margins.shape[1], device=margins.device) < most[:, None]
    means = (margins * there).sum(1) / most.clamp(min=1)
    slopes, intercepts = weights.unbind(1)
    return torch.sigmoid((margins + means[:, None]) / 2 * slopes + intercepts).cumprod(1)


def most_promising(margins: Tensor, weights: Tensor, most: Tensor, count: int) -> Tensor:
    """margins [S, K], weights [K, 2], most [S] -> drafts to verify [S] int64, `count` in all or as
    many as there are: those with the largest chances, of each span the first. Among equal ones
    earlier places come first, then earlier spans."""
    spans, width = margins.shape
    places = torch.arange(width, device=margins.device)
    there = places < most[:, None]
    keys = torch.where(there, chances(margins, weights, most), -1.0)
    order = keys.T.flatten().sort(descending=True, stable=True).indices[:count]
    taken = torch.zeros(spans * width, dtype=torch.int64, device=margins.device)
    taken[order] = 1
    return (taken.view(width, spans).T * there).sum(1)
