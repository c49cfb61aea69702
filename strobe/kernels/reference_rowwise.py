"""The row-wise kernels in plain torch: computed in fp32, and rounded where the kernels round.

Legend: T rows, H hidden size, I intermediate size, Hq / Hkv heads, D head size, L layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to `dtype`; float8_e4m3fn saturates at its largest value, 448."""
    return x.clamp(-448.0, 448.0).to(dtype) if dtype == FP8 else x.to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] -> [T, H]."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + D/2}) of x [T, ..., D] by its position's angle, in fp32."""
    half = x.shape[-1] // 2
    shape = (x.shape[0], *(1,) * (x.ndim - 2), half)
    c = cos[positions, :half].float().view(shape)
    s = sin[positions, -half:].float().view(shape)
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


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
    """qkv [T, (Hq + 2 Hkv) D] -> q [T, Hq, D], written into qkv.

    k and v are stored in kv [slots, 2, Hkv, D]. cos, sin: [P, D] in the layout of `RotaryTable`, or
    plain [P, D / 2]. k_scale, v_scale: of stored keys and values; q is multiplied by k_scale.
    """
    width = kv.shape[-1]
    heads = qkv.unflatten(1, (-1, width))
    q = heads[:, :q_heads]
    k = heads[:, q_heads : q_heads + kv_heads]
    v = heads[:, -kv_heads:]
    v = F.rms_norm(v.float(), (width,), None, eps) if value_norm else v.float()
    parts: list[Tensor] = []
    for part, weight in ((q, q_weight), (k, k_weight)):
        x = part.float()
        if weight is not None:
            x = F.rms_norm(x, weight.shape, weight.float(), eps)
        parts.append(_rotate(x, cos, sin, positions))
    q.copy_(parts[0] * k_scale)
    keys = _cast(parts[1] / k_scale, kv.dtype)
    kv[slots] = torch.stack([keys, _cast(v / v_scale, kv.dtype)], 1)
    return q


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
    """Store kv_rows [T, L * 2 * Hkv * D] in slots of every layer of data [L, slots, 2, Hkv, D]."""
    layers, _, _, kv_heads, width = data.shape
    rows = kv_rows.view(-1, layers, 2, kv_heads, width).float()
    keys = rows[:, :, 0]
    if k_weight is not None:
        keys = F.rms_norm(keys, (width,), None, eps) * k_weight.float()[:, None]
    keys = _rotate(keys, cos, sin, positions)
    data[:, slots] = _cast(torch.stack([keys, rows[:, :, 1]], 2).transpose(0, 1), data.dtype)


def silu_mul(gate_up: Tensor, *, gelu: bool = False) -> Tensor:
    """gate_up [T, 2 I], gates first -> silu(gate) * up [T, I]; gelu: gelu (tanh), not silu."""
    gate, up = gate_up.float().chunk(2, -1)
    # In fp32, 1 + tanh loses all digits far below 0.
    gate = F.gelu(gate.double(), approximate="tanh").float() if gelu else F.silu(gate)
    return (gate * up).to(gate_up.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (x8 [T, K] float8_e4m3fn, scale [T] float32 = max |x| / 448, 1 for zeros)."""
    largest = x.float().abs().amax(-1)
    scale = torch.where(largest > 0, (largest / 448.0).clamp_min(2.0**-126), 1.0)
    return _cast(x.float() * (1.0 / scale)[:, None], FP8), scale
