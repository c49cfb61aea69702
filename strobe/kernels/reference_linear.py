"""The GEMMs of linear.py in plain torch: computed in fp32, with results in the model's dtype.

Legend: M rows of x, K columns, W [N, K] row-major (gated: [2N, K], gate rows then up rows), V the
vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.kernels.gemm_table import GROUP, Weight
from strobe.kernels.reference_rowwise import rms_norm, silu_mul


def _quantized(x: Tensor) -> Tensor:
    """Round x [M, K] to e4m3 with a scale per group of columns, and return it in fp32."""
    rows, columns = x.shape
    groups = F.pad(x.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    fp8 = (groups * (448.0 / top)).to(torch.float8_e4m3fn)
    return (fp8.float() * (top * (1.0 / 448.0))).view(rows, -1)[:, :columns]


def linear(
    x: Tensor,
    weight: Weight,
    *,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K], weight [N, K] -> [M, N]: residual + act(norm(x) Wᵀ + bias); `Gemms.linear`."""
    if norm is not None:
        gain, eps = norm
        x = rms_norm(x, gain, eps)
    wide = x.float() if weight.scale is None else _quantized(x)
    y = wide @ weight.data.float().t()
    if weight.scale is not None:
        y *= weight.scale
    if bias is not None:
        y += bias.float()
    if gated:
        y = silu_mul(y.to(x.dtype), gelu=gelu)
    if residual is not None:
        y = residual.float() + y
    y = y.to(x.dtype)
    return y if out is None else out.copy_(y)


def head_argmax(x: Tensor, weight: Weight, *, norm: tuple[Tensor, float] | None = None) -> Tensor:
    """x [R, K], weight [V, K] -> [R] int64: torch.argmax of the logits in the model's dtype."""
    return linear(x, weight, norm=norm).argmax(-1)
