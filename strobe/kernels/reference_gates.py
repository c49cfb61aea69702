"""Gates and the operations around them, in plain torch.

Legend: T rows, Hv value heads of Dv.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gate(x: Tensor, logits: Tensor, extra: Tensor | None = None) -> Tensor:
    """x [T, N] * sigmoid(logits [T, N] or [T, 1]) + extra [T, N] -> [T, N]."""
    y = x * logits.sigmoid()
    return y if extra is None else extra + y


def delta_gates(ba: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """ba [T, 2 Hv], outputs for the rate and then for the time -> log decay and rate [T, Hv] of the
    gated delta rule, in fp32."""
    b, a = ba.chunk(2, -1)
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias), b.float().sigmoid()


def gated_norm(x: Tensor, logits: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, Hv, Dv] / rms(x) * weight [Dv] * silu(logits [T, Hv Dv]) -> [T, Hv Dv]."""
    x = F.rms_norm(x.float(), weight.shape, weight.float(), eps).flatten(1)
    return (x * F.silu(logits.float())).to(logits.dtype)
