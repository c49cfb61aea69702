# pyright: basic, reportCallIssue=false
"""Kernels for gates and the operations around them, which round once, when they write.

Legend: T rows, H hidden size, Hv value heads of Dv. The torch twin is
`strobe.kernels.reference_gates`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.rowwise import parts_of, round_to, row_part

_HEADS = 4
"""Heads per program of the norm."""


@triton.jit
def _gate_kernel(
    x, logits, extra, out, x_stride, logits_stride, extra_stride,
    SIZE: tl.constexpr, BROADCAST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at, inside = row_part(SIZE, BLOCK)
    if BROADCAST:
        logit = tl.load(logits + row * logits_stride).to(tl.float32)
    else:
        logit = tl.load(logits + row * logits_stride + at, inside, 0.0).to(tl.float32)
    y = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32) / (1.0 + tl.exp(-logit))
    if extra is not None:
        y += tl.load(extra + row * extra_stride + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, round_to(y, out.dtype.element_ty), inside)


@triton.jit
def _delta_kernel(
    ba, a_log, dt_bias, decay, rate, stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, head, inside = row_part(HEADS, WIDTH)
    b = tl.load(ba + row * stride + head, inside, 0.0).to(tl.float32)
    time = tl.load(ba + row * stride + HEADS + head, inside, 0.0).to(tl.float32)
    time += tl.load(dt_bias + head, inside, 0.0).to(tl.float32)
    # log(1 + e^t) without overflow
    time = tl.maximum(time, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(time)))
    scale = tl.exp(tl.load(a_log + head, inside, 0.0).to(tl.float32))
    tl.store(decay + row * HEADS + head, -scale * time, inside)
    tl.store(rate + row * HEADS + head, 1.0 / (1.0 + tl.exp(-b)), inside)


@triton.jit
def _gated_norm_kernel(
    x, logits, weight, out, logits_stride, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.program_id(1) * GROUP + tl.arange(0, GROUP), tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (at < SIZE)[None, :]
    place = head[:, None] * SIZE + at[None, :]
    value = tl.load(x + row * (HEADS * SIZE) + place, inside, 0.0).to(tl.float32)
    logit = tl.load(logits + row * logits_stride + place, inside, 0.0).to(tl.float32)
    scale = tl.load(weight + at, at < SIZE, 0.0).to(tl.float32)[None, :]
    unit = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
    y = value * unit * scale * (logit / (1.0 + tl.exp(-logit)))
    tl.store(out + row * (HEADS * SIZE) + place, round_to(y, out.dtype.element_ty), inside)


@triton.jit
def _add_norm_kernel(
    x, y, weight, scale, out, x_stride, y_stride, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at, inside = row_part(H, BLOCK)
    value = tl.load(y + row * y_stride + at, inside, 0.0).to(tl.float32)
    gain = tl.load(weight + at, inside, 0.0).to(tl.float32)
    total = value * tl.rsqrt(tl.sum(value * value, 0) / H + eps) * gain
    total += tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    if scale is not None:
        total *= tl.load(scale).to(tl.float32)
    tl.store(out + row * H + at, round_to(total, out.dtype.element_ty), inside)


def gate(x: Tensor, logits: Tensor, extra: Tensor | None = None) -> Tensor:
    """x [T, N] * sigmoid(logits [T, N] or [T, 1]) + extra [T, N] -> [T, N]."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block, parts = parts_of(rows, size)
    pdl = supports_pdl(x.device)
    _gate_kernel[(rows, parts)](
        x, logits, extra, out, x.stride(0), logits.stride(0),
        0 if extra is None else extra.stride(0), SIZE=size,
        BROADCAST=logits.shape[1] == 1 < size, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def delta_gates(ba: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """ba [T, 2 Hv], outputs for the rate and then for the time -> log decay and rate [T, Hv] of the
    gated delta rule, in fp32."""
    rows, heads = ba.shape[0], ba.shape[1] // 2
    decay, rate = torch.empty((2, rows, heads), dtype=torch.float32, device=ba.device)
    pdl = supports_pdl(ba.device)
    _delta_kernel[(rows,)](
        ba, a_log, dt_bias, decay, rate, ba.stride(0), HEADS=heads,
        WIDTH=triton.next_power_of_2(heads), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return decay, rate


def gated_norm(x: Tensor, logits: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, Hv, Dv] / rms(x) * weight [Dv] * silu(logits [T, Hv Dv]) -> [T, Hv Dv]."""
    rows, heads, size = x.shape
    out = torch.empty((rows, heads * size), dtype=logits.dtype, device=x.device)
    pdl = supports_pdl(x.device)
    x = x.contiguous()
    _gated_norm_kernel[(rows, triton.cdiv(heads, _HEADS))](
        x, logits, weight, out, logits.stride(0), eps, HEADS=heads, SIZE=size, GROUP=_HEADS,
        BLOCK=triton.next_power_of_2(size), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, scale: Tensor | None) -> Tensor:
    """(x + y / rms(y) * weight [H]) * scale [1] -> [T, H]; x, y [T, H]."""
    rows, size = y.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    pdl = supports_pdl(x.device)
    _add_norm_kernel[(rows,)](
        x, y, weight, scale, out, x.stride(0), y.stride(0), eps, H=size, BLOCK=block, PDL=pdl,
        num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
    )  # fmt: skip
    return out
