"""Which drafts of a step are verified: those most likely to count, over all requests together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strobe.host.transfer import upload
from strobe.runner.layout import Layout
from strobe.speculation.acceptance import KNOTS


def verified_drafts(
    layout: Layout,
    margins: Tensor | None,
    confidence: Sequence[Sequence[float]],
    count: int,
    *,
    kernels: bool = False,
) -> Tensor:
    """Return how many drafts of each span [S] are verified: all of the host's, and of the device's,
    whose margins are [S, K], the `count` with the largest chances by the rates in `confidence`
    [K][B]; positions without rates count as certain. kernels: use triton's if the layout is
    padded."""
    num_proposed = layout.device_drafts
    width = layout.shape.max_drafts
    if margins is None:
        margins = torch.zeros(len(num_proposed), width, device=num_proposed.device)
    rows = [*confidence[:width], *[(1.0,) * KNOTS] * (width - len(confidence))]
    table = upload(rows, num_proposed.device, torch.float32)
    if kernels and layout.padded:
        from strobe.kernels.narrow import choose

        return choose(
            margins, rates=table, device_drafts=num_proposed, drafts=layout.drafts, count=count
        )
    return layout.drafts - num_proposed + choose_drafts(margins, table, num_proposed, count)


def chances(margins: Tensor, rates: Tensor, num_proposed: Tensor) -> Tensor:
    """Return each draft's chance to count [S, K], from margins [S, K], of which the first
    `num_proposed` [S] of a row exist, and rates [K, B], as `DraftChances.chances` does on the
    host."""
    exists = torch.arange(margins.shape[1], device=margins.device) < num_proposed[:, None]
    mean = ((margins * exists).sum(1) / num_proposed.clamp(min=1))[:, None]
    power = (margins * mean * mean * mean).nan_to_num().clamp(min=0)
    at = 2 * power.sqrt().sqrt().sqrt()  # twice the evidence
    knots = at.long().clamp(max=rates.shape[1] - 2)
    rows = rates.expand(len(margins), -1, -1)
    low, high = [rows.gather(2, k[..., None])[..., 0] for k in (knots, knots + 1)]
    return (low + (high - low) * (at - knots).clamp(max=1)).cumprod(1)


def choose_drafts(margins: Tensor, rates: Tensor, num_proposed: Tensor, count: int) -> Tensor:
    """Return how many drafts of each span are verified [S] int64, `count` in all or as many as
    exist: those with the largest chances. Among equal ones earlier positions come first, then
    earlier spans."""
    spans, width = margins.shape
    exists = torch.arange(width, device=margins.device) < num_proposed[:, None]
    keys = torch.where(exists, chances(margins, rates, num_proposed), -1.0)
    order = keys.T.flatten().sort(descending=True, stable=True).indices[:count]
    chosen = torch.zeros(spans * width, dtype=torch.int64, device=margins.device)
    chosen[order] = 1
    return (chosen.view(width, spans).T * exists).sum(1)
