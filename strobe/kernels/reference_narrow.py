"""Which drafts of a step are verified, in torch: the twin of `strobe.kernels.narrow.choose`.

Legend: S spans, K drafts per span, B knots of evidence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strobe.kernels.evidence import KNOTS_PER_UNIT, evidence


def choose(
    margins: Tensor, rates: Tensor, device_drafts: Tensor, drafts: Tensor, count: int
) -> Tensor:
    """Return the drafts to verify [S] int64, from margins [S, K], rates [K, B], and the numbers of
    drafts proposed on the device and in all [S] int64: all of the host's, and of the device's those
    whose chances are among the `count` largest."""
    return drafts - device_drafts + choose_drafts(margins, rates, device_drafts, count)


def chances(margins: Tensor, rates: Tensor, num_proposed: Tensor) -> Tensor:
    """Return each draft's chance to count [S, K], from margins [S, K], of which the first
    `num_proposed` [S] of a row exist, and rates [K, B], as `DraftChances.chances` does on the
    host."""
    exists = torch.arange(margins.shape[1], device=margins.device) < num_proposed[:, None]
    roots = evidence(margins, exists, num_proposed.clamp(min=1), sqrt=torch.sqrt)
    at = KNOTS_PER_UNIT * roots.nan_to_num()  # NaN is no evidence
    at = at.clamp(max=rates.shape[1] - 1)
    knots = at.long().clamp(max=rates.shape[1] - 2)
    rows = rates.expand(len(margins), -1, -1)
    low, high = [rows.gather(2, k[..., None])[..., 0] for k in (knots, knots + 1)]
    return (low + (high - low) * (at - knots)).cumprod(1)


def choose_drafts(margins: Tensor, rates: Tensor, num_proposed: Tensor, count: int) -> Tensor:
    """Return the number of drafts to verify in each span [S] int64: in all the `count` drafts with
    the largest chances, or as many as exist. Among equal ones earlier positions come first, then
    earlier spans."""
    spans, width = margins.shape
    exists = torch.arange(width, device=margins.device) < num_proposed[:, None]
    keys = torch.where(exists, chances(margins, rates, num_proposed), -1.0)
    order = keys.T.flatten().sort(descending=True, stable=True).indices[:count]
    chosen = torch.zeros(spans * width, dtype=torch.int64, device=margins.device)
    chosen[order] = 1
    return (chosen.view(width, spans).T * exists).sum(1)
