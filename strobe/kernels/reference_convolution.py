"""DFlash2's dynamic convolutions in plain torch. Legend as in `strobe.kernels.convolution`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def convolve(
    x: Tensor, base: Tensor, kernels: Tensor, places: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Return y [T, H] (+ residual [T, H]), y[t, c] = sum over o < O of
    (base[o, c] + kernels[t, o, c // G]) * x[t - o, c], without taps beyond the block's first row.

    x [T, H], base [O, H], kernels [T, O, H / G]; places [T]: of rows in their blocks."""
    taps = whole_kernels(base, kernels)
    return add_taps(x, taps, missing_rows(places, len(taps)), residual)


def whole_kernels(base: Tensor, kernels: Tensor) -> tuple[Tensor, ...]:
    """base [..., H], kernels [T, ... * H / G] -> each tap's weights of all rows and channels [T, H]
    in float32. The channels of a group read one column, which is not repeated for them.

    On a CPU even views take time, and casts to the same dtype."""
    rows = kernels.shape[0]
    size = base.shape[-1]
    taps = base.numel() // size
    columns = kernels.reshape(rows, taps, -1, 1)
    channels = base.view(taps, columns.shape[2], -1)
    if columns.dtype != torch.float32:
        columns = columns.float()
    if channels.dtype != torch.float32:
        channels = channels.float()
    return (columns + channels).view(rows, taps, size).unbind(1)


def missing_rows(places: Tensor, taps: int) -> list[Tensor | None]:
    """places [T] -> for each tap o after the first, which rows from row o on have no row o places
    before in their block [T - o, 1]; on a CPU None if all have one."""
    missing = [(places[tap:] < tap)[:, None] for tap in range(1, taps)]
    if places.device.type != "cpu":
        return [*missing]
    return [rows if rows.any() else None for rows in missing]


def add_taps(
    x: Tensor,
    taps: Sequence[Tensor],
    missing: Sequence[Tensor | None],
    residual: Tensor | None = None,
) -> Tensor:
    """Return what `convolve` does, from each tap's weights [T, H], of `whole_kernels`, and
    `missing_rows`."""
    y = taps[0] * x
    for tap, rows in enumerate(missing, start=1):
        earlier = taps[tap][tap:] * x[:-tap]
        if rows is not None:
            earlier.masked_fill_(rows, 0.0)
        y[tap:].add_(earlier)
    if y.dtype != x.dtype:
        y = y.to(x.dtype)
    return y if residual is None else residual + y
