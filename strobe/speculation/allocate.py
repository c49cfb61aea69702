"""Selects the drafts of a step to verify: the likeliest ones, over all requests together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strobe.host.transfer import upload
from strobe.kernels.evidence import KNOTS
from strobe.runner.layout import Layout
from strobe.runner.step_ops.torch_step_ops import StepOps


def verified_drafts(
    layout: Layout,
    margins: Tensor | None,
    confidence: Sequence[Sequence[float]],
    count: int,
    ops: StepOps,
) -> Tensor:
    """Return the number of drafts to verify in each span [S]: all of the host's, and of the
    device's, whose margins are [S, K], the `count` with the largest chances by the rates in
    `confidence` [K][B]; positions without rates count as certain."""
    num_proposed = layout.device_drafts
    width = layout.shape.max_drafts
    if margins is None:
        margins = torch.zeros(len(num_proposed), width, device=num_proposed.device)
    rows = [*confidence[:width], *[(1.0,) * KNOTS] * (width - len(confidence))]
    table = upload(rows, num_proposed.device, torch.float32)
    return ops.choose(layout, margins, table, count)
