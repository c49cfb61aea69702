# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Weights of experts packed into bytes, and their values in registers.

E2M1 (MXFP4): groups of 32 values share a power of two. 64 values are 8 words; lane t of the four
that hold a row of a tensor core's operand reads words 2 t and 2 t + 1, its values of two groups.
Value 16 s + 8 h + 2 t + a of a group is in half a of its word, where the sign and the size of
s, h = 0, 0 are bits 15 and 8 to 6, as in a bfloat16 whose exponent is at most 3, those of 0, 1 are
bits 12 and 5 to 3, of 1, 0 bits 13 and 2 to 0, and of 1, 1 bits 14 and 11 to 9: see `mxfp4.py`.
Four groups' exponents, plus 127 + 62, are a word. E4M3 (FP8): a value is a byte; values share a
scale by rows, or by rows and groups.

The bits of a value, placed at the end of a float's exponent, are the value times a power of two,
also if it is subnormal; so a value takes a shift, a mask and a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.gemm import INTERPRETED


class PackedWeight(NamedTuple):
    """Weights [E, N, K] in bytes `data`. group: values that share a scale.

    E2M1: data [E, N, K / 2], scale [E, K / 128, N] int32, K rounded up to multiples of 64 and 128.
    E4M3: data [E, N, K], scale [E, K / group, N] float32, or [E, N] if all of a row share one.
    """

    data: Tensor
    scale: Tensor
    inputs: int
    group: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.data.shape[0], self.data.shape[1], self.inputs

    @property
    def kind(self) -> str:
        return "e2m1" if self.scale.dtype == torch.int32 else "e4m3"


@triton.jit
def e2m1(words, exponents, column):
    """Return the values of columns in float32, from the words that hold them."""
    half = words >> (column % 2 * 16)
    pair = column % 32 // 8
    size = (half >> tl.where(pair == 3, 9, 6 - 3 * pair)) & 7
    sign = (half >> tl.where(pair == 0, 15, 11 + pair)) & 1
    power = ((exponents >> (column // 32 % 4 * 8)) & 255) << 23
    value = ((sign << 31) | (size << 22)).to(tl.float32, bitcast=True) * 2.0**64
    return value * power.to(tl.float32, bitcast=True)


@triton.jit
def e4m3(packed, DTYPE: tl.constexpr):
    """Return the values of bytes."""
    if not INTERPRETED and tl.bfloat16 == DTYPE:
        value = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 one, two, bits, scale, zero;
            mov.b32 scale, 0x7B807B80;  // 2^120, twice
            mov.b32 zero, 0x80008000;
            prmt.b32 one, $2, 0, 0x1404;  // bytes 0 and 1 in the high halves
            prmt.b32 two, $2, 0, 0x3424;
            shr.b32 bits, one, 4;
            and.b32 bits, bits, 0x07F007F0;
            lop3.b32 bits, one, 0x80008000, bits, 0xEA;
            fma.rn.bf16x2 $0, bits, scale, zero;
            shr.b32 bits, two, 4;
            and.b32 bits, bits, 0x07F007F0;
            lop3.b32 bits, two, 0x80008000, bits, 0xEA;
            fma.rn.bf16x2 $1, bits, scale, zero;
            }
            """,
            "=r,=r,r",
            [packed],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        bits = packed.to(tl.uint32)
        bits = ((bits & 128) << 24) | ((bits & 127) << 20)
        value = bits.to(tl.float32, bitcast=True) * 2.0**120
        if not INTERPRETED:
            value = value.to(DTYPE)
    return value
