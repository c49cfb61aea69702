"""DFlash2's dynamic convolutions in plain torch. Legend as in `strobe.kernels.convolution`."""

from __future__ import annotations

import torch
from torch import Tensor


def convolve(
    x: Tensor, base: Tensor, kernels: Tensor, places: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Return y [T, H] (+ residual [T, H]), y[t, c] = sum over o < O of
    (base[o, c] + kernels[t, o, c // G]) * x[t - o, c], without taps beyond the block's first row.

    x [T, H], base [O, H], kernels [T, O, H / G]; places [T]: of rows in their blocks."""
    _, taps, groups = kernels.shape
    # The channels of a group read one column, which is not repeated for them.
    weights = base.float().view(taps, groups, -1) + kernels.float()[..., None]
    weights = weights.flatten(2)
    total = weights[:, 0] * x
    for tap in range(1, taps):
        shifted = torch.where((places >= tap)[:, None], torch.roll(x, tap, 0), 0.0)
        total += weights[:, tap] * shifted
    y = total.to(x.dtype)
    return y if residual is None else residual + y
