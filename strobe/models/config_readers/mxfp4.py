"""Weights in MXFP4, as gpt-oss is published: values of 4 bits, with a power of two for every 32.

Format: OCP Microscaling Formats (MX) specification 1.0, E2M1 values with E8M0 scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Values that share a scale."""

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_SIZES, *(-size for size in _SIZES))
_BIAS = 127


def unpack(out: Tensor, blocks: Tensor, scales: Tensor) -> None:
    """blocks [E, N, K / 32, 16] uint8, two values in each, the first in the low bits; scales [E, N,
    K / 32] uint8, exponents plus 127 -> out [E, N, K] in its own dtype, on its device.

    One matrix at a time: what that takes beside `out` is small. Exact in bfloat16 and float32.
    """
    values = torch.tensor(_VALUES, dtype=torch.float32, device=out.device)
    for matrix, packed, exponents in zip(out, blocks, scales, strict=True):
        packed, exponents = packed.to(out.device), exponents.to(out.device)
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(2).int()
        unpacked = torch.ldexp(values[codes], exponents.int()[..., None] - _BIAS)
        matrix.copy_(unpacked.view(matrix.shape))
