"""The GEMMs of linear.py in plain torch: computed in fp32, with results in the model's dtype.

Legend: M rows of x, K columns, W [N, K] row-major (gated: [2N, K], gate rows then up rows), V the
vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.kernels.gemm_table import GROUP, Weight
from strobe.kernels.operands import PLAIN, Epilogue, Input
from strobe.kernels.reference_rowwise import rms_norm, silu_mul


def _quantized(x: Tensor) -> Tensor:
    """Round x [M, K] to e4m3 with a scale per group of columns, and return it in fp32."""
    rows, columns = x.shape
    groups = F.pad(x.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    fp8 = (groups * (448.0 / top)).to(torch.float8_e4m3fn)
    return (fp8.float() * (top * (1.0 / 448.0))).view(rows, -1)[:, :columns]


def linear(x: Input, weight: Weight, epilogue: Epilogue = PLAIN) -> Tensor:
    """x [M, K], weight [N, K] -> [M, N]: residual + act(norm(x) Wᵀ + bias); `Gemms.linear`."""
    rows = x.rows if x.norm is None else rms_norm(x.rows, x.norm.weight, x.norm.eps)
    wide = rows.float() if weight.scale is None else _quantized(rows)
    y = wide @ weight.data.float().t()
    if weight.scale is not None:
        y *= weight.scale
    if epilogue.bias is not None:
        y += epilogue.bias.float()
    if epilogue.gated:
        y = silu_mul(y.to(rows.dtype), gelu=epilogue.activation == "gelu_tanh")
    if epilogue.residual is not None:
        y = epilogue.residual.float() + y
    y = y.to(rows.dtype)
    return y if epilogue.out is None else epilogue.out.copy_(y)


def head_argmax(x: Input, weight: Weight) -> Tensor:
    """x [R, K], weight [V, K] -> [R] int64: torch.argmax of the logits in the model's dtype."""
    return linear(x, weight).argmax(-1)
