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
    taps = kernels.shape[1]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap in range(taps):
        weights = kernels[:, tap].float().repeat_interleave(x.shape[1] // kernels.shape[2], 1)
        shifted = torch.roll(x, tap, 0).float()
        shifted = torch.where((places >= tap)[:, None], shifted, 0.0)
        total += (base[tap].float() + weights) * shifted
    y = total.to(x.dtype)
    return y if residual is None else residual + y
