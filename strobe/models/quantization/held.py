"""Linear layers that hold their weight in the format of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strobe.models.linear import Format, Linear

Index = tuple[int | slice, ...]
"""Of a part of a weight [E, N, K]; see `WeightPart`."""


def hold(
    linear: Linear,
    format: Format,
    *,
    values: tuple[int, ...],
    scale: tuple[int, ...],
    scale_dtype: torch.dtype,
) -> None:
    """Make a layer on the meta device hold bytes of shape `values` and scales in `format`, whatever
    weight_dtype says."""
    device = linear.weight.device
    data = torch.empty(values, dtype=torch.uint8, device=device)
    linear.weight = nn.Parameter(data, requires_grad=False)
    linear.scale = torch.empty(scale, dtype=scale_dtype, device=device)
    linear.format = format
    linear.fixed = True


def fill_bytes(values: Tensor, generator: torch.Generator) -> None:
    """Fill uint8 values at random, without the codes of NaN in e4m3."""
    values.random_(0, 256, generator=generator).bitwise_and_(0xF7)


def scale_at(at: Index) -> Index:
    """Return the index of a part in scales [E, G, N], whose last dimension is the rows."""
    return at if len(at) < 2 else (at[0], slice(None), *at[1:])
