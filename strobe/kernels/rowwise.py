# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false
"""Row-wise kernels: norms, rotary embedding with K/V store, gated activation, fp8 quantization.

All compute in fp32 and round once, when they write. Threads read and write 16 bytes each. Many rows
are bound by memory and few by the launch, so the grid depends on the row count.

Legend: T rows, H hidden size, I intermediate size, Hq / Hkv heads, D head size, L layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from strobe.kernels.pdl import pdl_wait, supports_pdl

FEW_ROWS = 64
"""Up to this many rows are split into small programs, so that even 16 rows use every SM."""

FP8_MAX = tl.constexpr(448.0)  # the largest float8_e4m3fn
TINY = tl.constexpr(2.0**-126)  # the minimum scale of an fp8 row, whose inverse is finite

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round fp32 x to nearest in `dtype`; float8_e4m3fn saturates and keeps NaN."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED and (dtype == tl.float8e4nv or dtype == tl.bfloat16):
        # Triton's interpreter truncates to bfloat16 and loses the carry in float8, so round before
        # the conversion; below 2^-6 float8 has a fixed step of 2^-9.
        DROP = 20 if dtype == tl.float8e4nv else 16
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) & -(1 << DROP)
        near = bits.to(tl.float32, bitcast=True)
        if dtype == tl.float8e4nv:
            near = tl.where(tl.abs(x) < 2.0**-6, (x + 1.5 * 2**14) - 1.5 * 2**14, near)
        x = near
    return x.to(dtype)


@triton.jit
def row_part(SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's row, its columns, and which of them are below SIZE."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64), at, at < SIZE


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """silu(gate) * up in fp32, or with gelu (tanh) instead of silu: x sigmoid(2 y) with
    y = sqrt(2 / pi) (x + 0.044715 x^3)."""
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-inner)) * up


@triton.jit
def _norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at, inside = row_part(H, BLOCK)
    x = tl.load(x_ptr + row * x_stride + at, inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * weight
    tl.store(out_ptr + row * H + at, round_to(y, out_ptr.dtype.element_ty), inside)


@triton.jit
def _unit(x1, x2, eps, D: tl.constexpr):
    """Return 1 / rms of each head; x1 and x2 are its halves."""
    square = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
    return tl.rsqrt(square / D + eps)[:, None]


@triton.jit
def _angle(
    cos_ptr, sin_ptr, position, cos_stride, sin_stride, WIDTH: tl.constexpr, D: tl.constexpr
):
    """Load a position's cos and sin [1, D / 2]. In a table of width D, sin's first half is
    negated."""
    at = tl.arange(0, D // 2)
    cos = tl.load(cos_ptr + position * cos_stride + at).to(tl.float32)
    sin = tl.load(sin_ptr + position * sin_stride + (WIDTH - D // 2) + at).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def _qk_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, kv_ptr,
    qkv_stride, cos_stride, sin_stride, eps, k_scale, v_scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    NORM_Q: tl.constexpr, NORM_K: tl.constexpr, NORM_V: tl.constexpr, OWN_V: tl.constexpr,
    SCALED: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + row)
    cos, sin = _angle(cos_ptr, sin_ptr, position, cos_stride, sin_stride, WIDTH, D)
    pdl_wait(PDL)  # slots and angles, loaded above, are written by kernels that have finished
    # A row's heads of q, k and v are contiguous, and so are a slot's keys and values.
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    is_q = (head < Q_HEADS)[:, None]
    is_v = (head >= Q_HEADS + KV_HEADS)[:, None]
    half = tl.arange(0, D // 2)
    at = head[:, None] * D + half[None, :]
    inside = (head < Q_HEADS + 2 * KV_HEADS)[:, None]
    ptr = qkv_ptr + row * qkv_stride + at
    if not OWN_V:
        ptr -= tl.where(is_v, KV_HEADS * D, 0)  # values are the keys
    x1 = tl.load(ptr, inside, other=0.0).to(tl.float32)
    x2 = tl.load(ptr + D // 2, inside, other=0.0).to(tl.float32)
    y1 = x1
    y2 = x2
    if NORM_Q or NORM_K or NORM_V:
        unit = _unit(x1, x2, eps, D)
        if NORM_V:
            x1 = tl.where(is_v, x1 * unit, x1)
            x2 = tl.where(is_v, x2 * unit, x2)
        if NORM_Q:
            w1 = tl.load(q_weight_ptr + half).to(tl.float32)[None, :]
            w2 = tl.load(q_weight_ptr + D // 2 + half).to(tl.float32)[None, :]
            y1 = tl.where(is_q, x1 * unit * w1, y1)
            y2 = tl.where(is_q, x2 * unit * w2, y2)
        if NORM_K:
            w1 = tl.load(k_weight_ptr + half).to(tl.float32)[None, :]
            w2 = tl.load(k_weight_ptr + D // 2 + half).to(tl.float32)[None, :]
            y1 = tl.where(is_q, y1, x1 * unit * w1)
            y2 = tl.where(is_q, y2, x2 * unit * w2)
    z1 = tl.where(is_v, x1, y1 * cos - y2 * sin)
    z2 = tl.where(is_v, x2, y2 * cos + y1 * sin)
    if SCALED:
        scale = tl.where(is_v, v_scale, k_scale)
        z1 = tl.where(is_q, z1 * k_scale, tl.div_rn(z1, scale))
        z2 = tl.where(is_q, z2 * k_scale, tl.div_rn(z2, scale))
    tl.store(ptr, round_to(z1, qkv_ptr.dtype.element_ty), is_q)
    tl.store(ptr + D // 2, round_to(z2, qkv_ptr.dtype.element_ty), is_q)
    is_kv = inside & (head >= Q_HEADS)[:, None]
    ptr = kv_ptr + slot * (2 * KV_HEADS * D) + (at - Q_HEADS * D)
    tl.store(ptr, round_to(z1, kv_ptr.dtype.element_ty), is_kv)
    tl.store(ptr + D // 2, round_to(z2, kv_ptr.dtype.element_ty), is_kv)


@triton.jit
def _context_kernel(
    rows_ptr, weight_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, data_ptr,
    rows_stride, cos_stride, sin_stride, layer_stride, eps,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + row)
    cos, sin = _angle(cos_ptr, sin_ptr, position, cos_stride, sin_stride, WIDTH, D)
    pdl_wait(PDL)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    is_v = (head >= KV_HEADS)[:, None]
    half = tl.arange(0, D // 2)
    at = head[:, None] * D + half[None, :]
    inside = (head < 2 * KV_HEADS)[:, None]
    ptr = rows_ptr + row * rows_stride + layer * (2 * KV_HEADS * D) + at
    x1 = tl.load(ptr, inside, other=0.0).to(tl.float32)
    x2 = tl.load(ptr + D // 2, inside, other=0.0).to(tl.float32)
    y1 = x1
    y2 = x2
    if NORM:
        unit = _unit(x1, x2, eps, D)
        y1 = x1 * unit * tl.load(weight_ptr + layer * D + half).to(tl.float32)[None, :]
        y2 = x2 * unit * tl.load(weight_ptr + layer * D + D // 2 + half).to(tl.float32)[None, :]
    z1 = tl.where(is_v, x1, y1 * cos - y2 * sin)
    z2 = tl.where(is_v, x2, y2 * cos + y1 * sin)
    ptr = data_ptr + layer.to(tl.int64) * layer_stride + slot * (2 * KV_HEADS * D) + at
    tl.store(ptr, round_to(z1, data_ptr.dtype.element_ty), inside)
    tl.store(ptr + D // 2, round_to(z2, data_ptr.dtype.element_ty), inside)


@triton.jit
def _silu_mul_kernel(
    x_ptr, out_ptr, x_stride,
    SIZE: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at, inside = row_part(SIZE, BLOCK)
    gate = tl.load(x_ptr + row * x_stride + at, inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + SIZE + at, inside, other=0.0).to(tl.float32)
    y = gated(gate, up, GELU)
    tl.store(out_ptr + row * SIZE + at, round_to(y, out_ptr.dtype.element_ty), inside)


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    pdl_wait(PDL)
    row, at, inside = row_part(K, BLOCK)
    x = tl.load(x_ptr + row * x_stride + at, inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    scale = tl.where(largest > 0, tl.maximum(tl.div_rn(largest, FP8_MAX), TINY), 1.0)
    y = x * tl.div_rn(1.0, scale)
    tl.store(out_ptr + row * K + at, round_to(y, out_ptr.dtype.element_ty), inside)
    tl.store(scale_ptr + row, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] / rms(x) * weight [H] -> [T, H], rounded once at the end, as `F.rms_norm`."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    pdl = supports_pdl(x.device)
    _norm_kernel[(rows,)](
        x,
        weight,
        out,
        x.stride(0),
        eps,
        H=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        PDL=pdl,
        launch_pdl=pdl,
    )
    return out


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: Tensor,
    q_heads: int,
    kv_heads: int,
    *,
    own_values: bool = True,
    value_norm: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Apply per-head norms and rotary embedding to q and k, and store keys and values.

    qkv [T, (Hq + 2 Hkv) D]; weights [D] or None for no norm; cos, sin [P, D] in the layout of
    `RotaryTable`, or plain [P, D / 2]; positions, slots [T] int64, not written by the kernel
    launched just before; kv [slots, 2, Hkv, D], contiguous, of any float dtype (float8_e4m3fn
    saturates). own_values: if False, qkv has no v part, and the values are the keys before norm and
    rope. value_norm: store values / rms(values). k_scale, v_scale: what stored keys and values are
    divided by; q is multiplied by k_scale. If rows share a slot, any of them may win.
    Returns q [T, Hq, D], which overwrites the q part of qkv; its k and v parts stay unchanged.
    """
    rows = qkv.shape[0]
    width = kv.shape[-1]
    few_rows = rows <= FEW_ROWS
    group = max((512 if few_rows else 2048) // width, 1)
    pdl = supports_pdl(qkv.device)
    _qk_kernel[(rows, triton.cdiv(q_heads + 2 * kv_heads, group))](
        qkv,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        cos,
        sin,
        positions,
        slots,
        kv,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        eps,
        k_scale,
        v_scale,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        D=width,
        WIDTH=sin.shape[1],
        NORM_Q=q_weight is not None,
        NORM_K=k_weight is not None,
        NORM_V=value_norm,
        OWN_V=own_values,
        SCALED=(k_scale, v_scale) != (1.0, 1.0),
        GROUP=group,
        num_warps=1 if few_rows else 4,
        PDL=pdl,
        launch_pdl=pdl,
    )
    return qkv[:, : q_heads * width].unflatten(1, (q_heads, width))


def context_store(
    kv_rows: Tensor,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    data: Tensor,
) -> None:
    """Apply norm and rope to a drafter's context keys, and store keys and values of all layers.

    kv_rows [T, L * 2 * Hkv * D], per layer keys then values; k_weight [L, D] contiguous, or None;
    cos, sin, positions, slots as in `qk_norm_rope_store`; data [L, slots, 2, Hkv, D], each layer
    contiguous.
    """
    rows = kv_rows.shape[0]
    layers, _, _, kv_heads, width = data.shape
    few_rows = rows <= FEW_ROWS
    group = max((512 if few_rows else 2048) // width, 1)
    pdl = supports_pdl(kv_rows.device)
    _context_kernel[(rows, triton.cdiv(2 * kv_heads, group), layers)](
        kv_rows,
        kv_rows if k_weight is None else k_weight,
        cos,
        sin,
        positions,
        slots,
        data,
        kv_rows.stride(0),
        cos.stride(0),
        sin.stride(0),
        data.stride(0),
        eps,
        KV_HEADS=kv_heads,
        D=width,
        WIDTH=sin.shape[1],
        NORM=k_weight is not None,
        GROUP=group,
        num_warps=1 if few_rows else 4,
        PDL=pdl,
        launch_pdl=pdl,
    )


def parts_of(rows: int, size: int) -> tuple[int, int]:
    """Return the columns of a program that processes a part of a row, and the parts of a row."""
    block = min(1024 if rows <= FEW_ROWS else 4096, triton.next_power_of_2(size))
    return int(block), -(-size // int(block))


def silu_mul(gate_up: Tensor, *, gelu: bool = False) -> Tensor:
    """gate_up [T, 2 I], gates first -> silu(gate) * up [T, I], rounded once (torch also rounds
    silu(gate)). gelu: gelu (tanh) instead of silu."""
    rows = gate_up.shape[0]
    size = gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block, parts = parts_of(rows, size)
    pdl = supports_pdl(gate_up.device)
    _silu_mul_kernel[(rows, parts)](
        gate_up,
        out,
        gate_up.stride(0),
        SIZE=size,
        GELU=gelu,
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8,
        PDL=pdl,
        launch_pdl=pdl,
    )
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (x8 [T, K] float8_e4m3fn, scale [T] float32) with x8 * scale close to x.

    scale = max |x| / 448, at least 2^-126 so that its inverse is finite, and 1 for a row of zeros;
    x8 is x times the rounded inverse of the scale.
    """
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    pdl = supports_pdl(x.device)
    _quantize_kernel[(rows,)](
        x,
        out,
        scale,
        x.stride(0),
        K=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        PDL=pdl,
        launch_pdl=pdl,
    )
    return out, scale
