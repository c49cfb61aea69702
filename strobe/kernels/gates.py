# pyright: basic, reportCallIssue=false
"""Kernels for gates and the operations around them, which round once, when they write.

Legend: T rows, H hidden size. The torch twin is `strobe.kernels.reference_gates`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.reference_residual import Norm
from strobe.kernels.rowwise import parts_of, round_to, row_part


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
def _unit(x, eps, H: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) / H + eps)


@triton.jit
def _add_norm_kernel(
    x, y, weight, scale, out, next_weight, normed, x_stride, y_stride, eps, next_eps,
    H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at, inside = row_part(H, BLOCK)
    value = tl.load(y + row * y_stride + at, inside, 0.0).to(tl.float32)
    gain = tl.load(weight + at, inside, 0.0).to(tl.float32)
    total = _unit(value, eps, H) * gain
    total += tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    if scale is not None:
        total *= tl.load(scale).to(tl.float32)
    rounded = round_to(total, out.dtype.element_ty)
    tl.store(out + row * H + at, rounded, inside)
    if next_weight is not None:
        gain = tl.load(next_weight + at, inside, 0.0).to(tl.float32)
        after = _unit(rounded.to(tl.float32), next_eps, H) * gain
        tl.store(normed + row * H + at, round_to(after, out.dtype.element_ty), inside)


@triton.jit
def _add_norms_kernel(
    x, y, z, of_y, of_z, of_both, scale, out, x_stride, y_stride, z_stride, y_eps, z_eps, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at, inside = row_part(H, BLOCK)
    before = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    first = tl.load(y + row * y_stride + at, inside, 0.0).to(tl.float32)
    second = tl.load(z + row * z_stride + at, inside, 0.0).to(tl.float32)
    both = _unit(first, y_eps, H) * tl.load(of_y + at, inside, 0.0).to(tl.float32)
    both += _unit(second, z_eps, H) * tl.load(of_z + at, inside, 0.0).to(tl.float32)
    total = before + _unit(both, eps, H) * tl.load(of_both + at, inside, 0.0).to(tl.float32)
    total *= tl.load(scale).to(tl.float32)
    tl.store(out + row * H + at, round_to(total, out.dtype.element_ty), inside)


@triton.jit
def _cap_kernel(logits, stride, cap, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    row, at, inside = row_part(SIZE, BLOCK)
    x = tl.load(logits + row * stride + at, inside, 0.0).to(tl.float32)
    power = tl.exp(-2.0 * tl.abs(x) / cap)  # at most 1; a NaN stays one
    y = cap * (1.0 - power) / (1.0 + power)
    y = tl.where(x < 0, -y, y)
    tl.store(logits + row * stride + at, round_to(y, logits.dtype.element_ty), inside)


def gate(x: Tensor, logits: Tensor, extra: Tensor | None = None) -> Tensor:
    """x [T, N] * sigmoid(logits [T, N] or [T, 1]) + extra [T, N] -> [T, N]."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block, parts = parts_of(rows, size)
    pdl = supports_pdl(x.device)
    _gate_kernel[(rows, parts)](
        x,
        logits,
        extra,
        out,
        x.stride(0),
        logits.stride(0),
        0 if extra is None else extra.stride(0),
        SIZE=size,
        BROADCAST=logits.shape[1] == 1 < size,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def add_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor | None,
    then: Norm | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    """(x + y / rms(y) * weight [H]) * scale [1] -> [T, H]; x, y [T, H]. normed [T, H]: filled with
    the rounded sum after the norm `then`."""
    rows, size = y.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    pdl = supports_pdl(x.device)
    _add_norm_kernel[(rows,)](
        x,
        y,
        weight,
        scale,
        out,
        None if then is None else then.weight,
        normed,
        x.stride(0),
        y.stride(0),
        eps,
        0.0 if then is None else then.eps,
        H=size,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
    return out


def add_norm_twice(x: Tensor, y: Tensor, norm: Norm, then: Norm) -> tuple[Tensor, Tensor]:
    """x, y [T, H] -> the sum x + norm(y), and then(sum)."""
    normed = torch.empty(y.shape, dtype=x.dtype, device=x.device)
    total = add_norm(x, y, norm.weight, norm.eps, scale=None, then=then, normed=normed)
    return total, normed


def add_norms(
    x: Tensor, y: Tensor, z: Tensor, norms: tuple[Norm, Norm, Norm], scale: Tensor
) -> Tensor:
    """(x + norm(norm_y(y) + norm_z(z))) * scale [1] -> [T, H]; norms: of y, z and their sum."""
    of_y, of_z, of_both = norms
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    pdl = supports_pdl(x.device)
    _add_norms_kernel[(rows,)](
        x,
        y,
        z,
        of_y.weight,
        of_z.weight,
        of_both.weight,
        scale,
        out,
        x.stride(0),
        y.stride(0),
        z.stride(0),
        of_y.eps,
        of_z.eps,
        of_both.eps,
        H=size,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )
    return out


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """Return logits [R, V], now cap * tanh(logits / cap) unless cap is None."""
    if cap is not None:
        rows, size = logits.shape
        block, parts = parts_of(rows, size)
        pdl = supports_pdl(logits.device)
        _cap_kernel[(rows, parts)](
            logits,
            logits.stride(0),
            cap,
            SIZE=size,
            BLOCK=block,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return logits
