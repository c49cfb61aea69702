"""Gates, and the operations around them, in plain torch.

Legend: T rows, Hv value heads of Dv.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.kernels.reference_residual import Norm


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


def add_norm_twice(x: Tensor, y: Tensor, norm: Norm, then: Norm) -> tuple[Tensor, Tensor]:
    """x, y [T, H] -> the sum x + norm(y), and then(sum)."""
    total = x + norm(y)
    return total, then(total)


def add_norms(
    x: Tensor, y: Tensor, z: Tensor, norms: tuple[Norm, Norm, Norm], scale: Tensor
) -> Tensor:
    """(x + norm(norm_y(y) + norm_z(z))) * scale [1] -> [T, H]; norms: of y, z and their sum."""
    of_y, of_z, of_both = norms
    return (x + of_both(of_y(y) + of_z(z))) * scale


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap); the logits if cap is None."""
    return logits if cap is None else cap * torch.tanh(logits / cap)
