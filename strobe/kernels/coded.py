# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Products with weights that are stored in codes, whose values exist only in registers.

    _gemm_kernel        N / 64 x splits programs: x Wᵀ of a part of the columns
    _dequantize_kernel  the values of a weight in x's dtype, for many rows of x

A value is rounded once to x's dtype before it is multiplied, so that a product is that with the
dequantized weight. How the columns are split depends on the weight alone, so that a row's result
does not depend on the other rows. Legend: M rows of x, W [N, K], G groups of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.rowwise import INTERPRETED
from strobe.kernels.unpack import e4m3

MOST_ROWS = 128
"""Rows of x up to which values stay in registers."""
BLOCK_N = 64
BLOCK_K = 128
PROGRAMS = 264
"""At least so many programs, two for each multiprocessor, where K allows it."""


class Codes(NamedTuple):
    """A weight [N, K] in codes.

    kind: "int4" and "int8" (codes above `zero`), "s8" (signed bytes), "e2m1" and "e4m3". codes
    [N, bytes] uint8, of 4 bits two a byte, the first in the low bits. scale [N / rows, G], of
    `group` columns and `rows` rows each; in bytes if it is e4m3. zero: of the scale's shape;
    middle: where there is no zero. factor: of all values, or with `divides` their divisor; several
    belong to equal parts of the rows. index [K]: the group of each column, if groups are not
    neighbors.
    """

    kind: str
    codes: Tensor
    scale: Tensor
    inputs: int
    group: int
    rows: int = 1
    zero: Tensor | None = None
    middle: int = 0
    factor: Tensor | None = None
    divides: bool = False
    index: Tensor | None = None

    @property
    def halves(self) -> bool:
        """Whether a byte holds two codes."""
        return self.kind in ("int4", "e2m1")

    @property
    def factor_rows(self) -> int:
        """Rows that share a factor; 0 if all do."""
        if self.factor is None or self.factor.numel() == 1:
            return 0
        return len(self.codes) // self.factor.numel()

    def part(self, first: int, last: int) -> Codes:
        """Return rows first to last - 1, which do not divide what shares a scale or a factor."""
        rows = self.rows
        grid = slice(first // rows, -(-last // rows))
        factor = self.factor
        if self.factor_rows and factor is not None:
            factor = factor[first // self.factor_rows : last // self.factor_rows]
        return self._replace(
            codes=self.codes[first:last],
            scale=self.scale[grid],
            zero=None if self.zero is None else self.zero[grid],
            factor=factor,
        )


class CodedWeight(NamedTuple):
    """Weights whose outputs follow one another; see `Codes`."""

    parts: tuple[Codes, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(len(part.codes) for part in self.parts), self.parts[0].inputs))


class CodedExperts(NamedTuple):
    """Weights [E, N, K] of experts: `codes` of a weight [E * N, K]."""

    codes: Codes
    count: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, len(self.codes.codes) // self.count, self.codes.inputs

    @property
    def kind(self) -> str:
        return self.codes.kind

    def dense_experts(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return the values of experts first to last - 1 in dtype."""
        _, outputs, inputs = self.shape
        part = self.codes.part(first * outputs, last * outputs)
        return dequantized(part, dtype).view(last - first, outputs, inputs)


@triton.jit
def _values(
    code, n, k, inside, scale_ptr, zero_ptr, factor_ptr, index_ptr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    MIDDLE: tl.constexpr, DIVIDES: tl.constexpr, FACTOR_ROWS: tl.constexpr,
):  # fmt: skip
    """Return the values of codes [BN, BK] in float32, which are in rows n and columns k."""
    if index_ptr is not None:  # noqa: SIM108
        group = tl.load(index_ptr + k, mask=inside, other=0)
    else:
        group = k // GROUP
    place = n // ROWS * GROUPS + group
    scale = tl.load(scale_ptr + place, mask=inside, other=0)
    zero = 0
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + place, mask=inside, other=0).to(tl.float32)
    factor = load_factor(factor_ptr, n, FACTOR_ROWS)
    return decode(code, scale, zero, factor, KIND=KIND, MIDDLE=MIDDLE, DIVIDES=DIVIDES)


@triton.jit
def load_factor(factor_ptr, n, ROWS: tl.constexpr):
    """Return the factors of rows n, 1 if there is none. ROWS: those that share one; 0: all."""
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + (n // ROWS if ROWS else 0))
    return factor


@triton.jit
def decode(
    code, scale, zero, factor, KIND: tl.constexpr, MIDDLE: tl.constexpr, DIVIDES: tl.constexpr
):
    """Return the values of codes in float32. A zero of 0 and a factor of 1 change nothing."""
    if KIND == "e2m1":
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        value = bits.to(tl.float32, bitcast=True) * 2.0**126
    elif KIND == "e4m3":
        value = e4m3(code, tl.float32)
    elif KIND == "s8":
        value = tl.where(code >= 128, code - 256, code).to(tl.float32)
    else:
        value = code.to(tl.float32) - MIDDLE
    value = (value - zero) * scale_values(scale)
    return tl.div_rn(value, factor) if DIVIDES else value * factor


@triton.jit
def scale_values(stored):
    """Return scales in float32; bytes are e4m3."""
    if stored.dtype == tl.uint8:  # noqa: SIM108
        scale = e4m3(stored, tl.float32)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def _gemm_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, out_ptr,
    M, x_stride, out_stride, codes_stride, split_stride,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, MIDDLE: tl.constexpr,
    DIVIDES: tl.constexpr, FACTOR_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (j, s) writes columns j of the product over the split s of K, STEPS blocks long."""
    pdl_wait(PDL)
    rows = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)[:, None]
    split = tl.program_id(1)
    dtype = x_ptr.dtype.element_ty
    PER_BYTE: tl.constexpr = 2 if HALVES else 1
    BYTES: tl.constexpr = BLOCK_K // PER_BYTE
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        byte = (split * STEPS + step) * BYTES + tl.arange(0, BYTES)
        stored = (n[:, None] < N) & (byte * PER_BYTE < K)[None, :]
        spots = codes_ptr + n.to(tl.int64)[:, None] * codes_stride + byte[None, :]
        code = tl.load(spots, mask=stored, other=0).to(tl.int32)
        for place in tl.static_range(PER_BYTE):
            k = byte * PER_BYTE + place
            own = code if PER_BYTE == 1 else (code >> (4 * place)) & 15
            inside = (n[:, None] < N) & (k < K)[None, :]
            w = _values(
                own, row, k[None, :], inside, scale_ptr, zero_ptr, factor_ptr, index_ptr,
                KIND=KIND, GROUP=GROUP, ROWS=ROWS, GROUPS=GROUPS, MIDDLE=MIDDLE, DIVIDES=DIVIDES,
                FACTOR_ROWS=FACTOR_ROWS,
            )  # fmt: skip
            w = tl.where(inside, w, 0.0).to(dtype)
            there = (rows[:, None] < M) & (k < K)[None, :]
            x = tl.load(x_ptr + rows[:, None] * x_stride + k[None, :], mask=there, other=0.0)
            if INTERPRETED:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    spots = out_ptr + split * split_stride + rows[:, None] * out_stride + n[None, :]
    tl.store(spots, total, mask=(rows[:, None] < M) & (n < N)[None, :])


@triton.jit
def _dequantize_kernel(
    codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, out_ptr, codes_stride,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, MIDDLE: tl.constexpr,
    DIVIDES: tl.constexpr, FACTOR_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    inside = (n < N) & (k < K)
    byte = k // 2 if HALVES else k
    spots = codes_ptr + n.to(tl.int64) * codes_stride + byte
    code = tl.load(spots, mask=inside, other=0).to(tl.int32)
    if HALVES:
        code = (code >> (k % 2 * 4)) & 15
    value = _values(
        code, tl.minimum(n, N - 1), k, inside, scale_ptr, zero_ptr, factor_ptr, index_ptr,
        KIND=KIND, GROUP=GROUP, ROWS=ROWS, GROUPS=GROUPS, MIDDLE=MIDDLE, DIVIDES=DIVIDES,
        FACTOR_ROWS=FACTOR_ROWS,
    )  # fmt: skip
    tl.store(out_ptr + n.to(tl.int64) * K + k, value, mask=inside)


def coded_gemm(x: Tensor, weight: CodedWeight) -> Tensor:
    """x [M, K] -> x Wᵀ [M, N] in x's dtype."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    first = 0
    for part in weight.parts:
        last = first + len(part.codes)
        if x.shape[0] > MOST_ROWS:
            torch.mm(x, dequantized(part, x.dtype).t(), out=out[:, first:last])
        else:
            _multiply(x, part, out[:, first:last])
        first = last
    return out


def _multiply(x: Tensor, weight: Codes, out: Tensor) -> None:
    rows = x.shape[0]
    outputs = len(weight.codes)
    columns = triton.cdiv(outputs, BLOCK_N)
    blocks = triton.cdiv(weight.inputs, BLOCK_K)
    steps = triton.cdiv(blocks, min(triton.cdiv(PROGRAMS, columns), triton.cdiv(blocks, 4)))
    splits = triton.cdiv(blocks, steps)
    parts = out[None]
    if splits > 1:
        parts = x.new_empty((int(splits), rows, outputs), dtype=torch.float32)
    pdl = supports_pdl(x.device)
    _gemm_kernel[(columns, splits)](
        x, *pointers(weight), parts, rows, x.stride(0), parts.stride(1), weight.codes.stride(0),
        parts.stride(0), **constants(weight), BLOCK_M=max(triton.next_power_of_2(rows), 16),
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STEPS=steps, PDL=pdl, num_warps=4, num_stages=3,
        launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        out.copy_(parts.sum(0))


def dequantized(weight: Codes, dtype: torch.dtype) -> Tensor:
    """Return the values [N, K] in dtype, rounded once."""
    outputs = len(weight.codes)
    out = torch.empty(outputs, weight.inputs, dtype=dtype, device=weight.codes.device)
    pdl = supports_pdl(out.device)
    grid = (triton.cdiv(outputs, BLOCK_N), triton.cdiv(weight.inputs, BLOCK_K))
    _dequantize_kernel[grid](
        *pointers(weight), out, weight.codes.stride(0), **constants(weight), BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def pointers(weight: Codes) -> tuple[Tensor | None, ...]:
    """Return the tensors of a weight: codes, scale, zero, factor and index."""
    return weight.codes, weight.scale, weight.zero, weight.factor, weight.index


def constants(weight: Codes) -> dict[str, object]:
    """Return the constants of kernels that read a weight."""
    return {
        "N": len(weight.codes),
        "K": weight.inputs,
        "KIND": weight.kind,
        "HALVES": weight.halves,
        "GROUP": weight.group,
        "ROWS": weight.rows,
        "GROUPS": weight.scale.shape[1],
        "MIDDLE": weight.middle,
        "DIVIDES": weight.divides,
        "FACTOR_ROWS": weight.factor_rows,
    }
