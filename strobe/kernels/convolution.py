# pyright: basic, reportCallIssue=false
"""DFlash2's dynamic convolutions over the rows of a block.

Legend: T rows, H hidden size, G channels that share a kernel, O taps. The torch twin is
`strobe.kernels.reference_convolution`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.rowwise import parts_of, round_to, row_part


@triton.jit
def _convolve_kernel(
    x, base, kernels, places, residual, out, x_stride, base_stride, kernels_stride,
    residual_stride,
    SIZE: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at, inside = row_part(SIZE, BLOCK)
    place = tl.load(places + row)
    y = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        weight = tl.load(base + tap * base_stride + at, inside, 0.0).to(tl.float32)
        spot = kernels + row * kernels_stride + tap * (SIZE // GROUP) + at // GROUP
        weight += tl.load(spot, inside, 0.0).to(tl.float32)
        source = x + (row - tap) * x_stride + at
        y += weight * tl.load(source, inside & (tap <= place), 0.0).to(tl.float32)
    if residual is not None:
        y = round_to(y, out.dtype.element_ty).to(tl.float32)
        y += tl.load(residual + row * residual_stride + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, round_to(y, out.dtype.element_ty), inside)


def convolve(
    x: Tensor, base: Tensor, kernels: Tensor, places: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Return y [T, H] (+ residual [T, H]), y[t, c] = sum over o < O of
    (base[o, c] + kernels[t, o, c // G]) * x[t - o, c], without taps beyond the block's first row.

    x [T, H], base [O, H], kernels [T, O, H / G], whose rows may have a stride; places [T]: of rows
    in their blocks."""
    rows, size = x.shape
    taps, groups = kernels.shape[1:]
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block, parts = parts_of(rows, size)
    pdl = supports_pdl(x.device)
    _convolve_kernel[(rows, parts)](
        x, base, kernels, places, residual, out, x.stride(0), base.stride(0), kernels.stride(0),
        0 if residual is None else residual.stride(0), SIZE=size, TAPS=taps,
        GROUP=size // groups, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
