# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Weights of experts packed into bytes, and their values in registers.

E2M1 (MXFP4): groups of 32 values share a power of two. Two groups are 32 bytes: byte j holds value
j of the first in its low bits and of the second in its high bits. Four groups' exponents, plus 127,
are a word. E4M3 (FP8): a value is a byte; values share a scale by rows, or by rows and groups.

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

    E2M1: data [E, N, K / 2], scale [E, K / 128, N] int32, K rounded up to whole units and words.
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
def _e8m0(word, i: tl.constexpr):
    """Return the power of two of byte i of words of exponents."""
    bits = ((word >> (8 * i)) & 255) << 23
    return tl.maximum(bits, 1 << 22).to(tl.float32, bitcast=True)  # 2^-127 is subnormal


@triton.jit
def e2m1_unit(DTYPE: tl.constexpr):
    """Return the factor that products with the values of `e2m1` lack."""
    return 2.0**64 if DTYPE == tl.bfloat16 and not INTERPRETED else 1.0  # noqa: SIM300


@triton.jit
def _power(word, i: tl.constexpr):
    """Return the power of two of byte i of words of exponents, times 2^62, in bfloat16: values are
    multiplied by up to 2^192, and bfloat16 ends at 2^127."""
    bits = (((word >> (8 * i)) & 255) + 62) << 7
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e2m1(packed, word, i: tl.constexpr, DTYPE: tl.constexpr):
    """Return the values in the low and in the high bits of bytes, divided by `e2m1_unit`. word: of
    each row, whose bytes i and i + 1 are the exponents; in bfloat16 up to 2^65."""
    if not INTERPRETED and tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 one, two, low, high, bits, zero;
            mov.b32 zero, 0x80008000;
            prmt.b32 one, $4, 0, 0x1404;  // bytes 0 and 1 in the high halves
            prmt.b32 two, $4, 0, 0x3424;
            shl.b32 low, one, 4;
            shr.b32 bits, one, 6;
            and.b32 bits, bits, 0x01C001C0;
            lop3.b32 bits, one, 0x80008000, bits, 0xEA;
            fma.rn.bf16x2 $2, bits, $7, zero;
            shr.b32 bits, low, 6;
            and.b32 bits, bits, 0x01C001C0;
            lop3.b32 bits, low, 0x80008000, bits, 0xEA;
            fma.rn.bf16x2 $0, bits, $5, zero;
            shl.b32 low, two, 4;
            shr.b32 bits, two, 6;
            and.b32 bits, bits, 0x01C001C0;
            lop3.b32 bits, two, 0x80008000, bits, 0xEA;
            fma.rn.bf16x2 $3, bits, $8, zero;
            shr.b32 bits, low, 6;
            and.b32 bits, bits, 0x01C001C0;
            lop3.b32 bits, low, 0x80008000, bits, 0xEA;
            fma.rn.bf16x2 $1, bits, $6, zero;
            }
            """,
            "=r,=r,=r,=r,r,r,r,r,r",
            [packed, _power(word, i)[:, None], _power(word, i + 1)[:, None]],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        bits = packed.to(tl.uint32)
        low = (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True)
        high = (((bits & 128) << 24) | ((bits & 112) << 18)).to(tl.float32, bitcast=True)
        low = low * 2.0**126 * _e8m0(word, i)[:, None]
        high = high * 2.0**126 * _e8m0(word, i + 1)[:, None]
        if not INTERPRETED:
            low, high = low.to(DTYPE), high.to(DTYPE)
    return low, high


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
