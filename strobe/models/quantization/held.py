"""Linear layers that hold their weight in the format of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strobe.models.linear import Format, Linear

Index = tuple[int | slice, ...]
"""Of a part of a weight [E, N, K]; see `WeightPart`."""


def hold(
    linear: Linear,
    values: tuple[int, ...],
    scale: tuple[int, ...],
    scale_dtype: torch.dtype,
    format: Format,
) -> None:
    """Make a layer on the meta device hold bytes of shape `values` and scales in `format`, whatever
    weight_dtype says."""
    device = linear.weight.device
    data = torch.empty(values, dtype=torch.uint8, device=device)
    linear.weight = nn.Parameter(data, requires_grad=False)
    linear.scale = torch.empty(scale, dtype=scale_dtype, device=device)
    linear.format = format
    linear.fixed = True


def scale_at(at: Index) -> Index:
    """Return the index of a part in scales [E, G, N], whose last dimension is the rows."""
    return at if len(at) < 2 else (at[0], slice(None), *at[1:])


def fill_random(name: str, value: Tensor, generator: torch.Generator, uniform: bool) -> None:
    """Fill a parameter or the scales of a layer with random values for measurements of speed:
    normal, and 1 for norms; or uniform, all within 0.001 of 0."""
    if value.dtype == torch.uint8:
        value.random_(0, 256, generator=generator).bitwise_and_(0xF7)  # no NaN of E4M3
    elif value.dtype == torch.int32:
        value.view(torch.uint8).fill_(121 + 62)  # exponents of MXFP4, each 2^-6
    elif uniform and value.is_floating_point() and not name.endswith(".scale"):
        value.uniform_(-1e-3, 1e-3, generator=generator)
    elif value.ndim == 1 or not value.is_floating_point():
        value.fill_(1)
    elif name.endswith(".scale"):
        value.fill_(2.0**-13)  # of E4M3
    else:
        value.normal_(0.0, 0.02, generator=generator)
