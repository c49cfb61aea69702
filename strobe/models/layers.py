"""Layers shared by targets and drafters, written for ragged rows.

Legend: T rows, H hidden size, Hq / Hkv query and key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.models.config import DecoderConfig
from strobe.models.rope import RopeConfig
from strobe.models.weight_mapping import Pieces, stacked

Attend = Callable[..., Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D]; sinks [Hq] come fifth, to
layers that have some.

Stores the rows' keys and values and attends over what each row may see. Models know nothing else
about caches, masks or batches: the engine passes one of these, training passes another.
"""

Rope = tuple[Tensor, Tensor]
"""(cos, sin) [T, 1, D] of the rows' positions, the first half of sin negated; see `rotate`."""


def unit_rms(x: Tensor, eps: float, floor: Tensor | None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension of size n.

    With floor = sqrt(n eps) it is x / sqrt(|x|^2 + floor^2), and the caller multiplies by sqrt(n):
    the same in half the operations, without the fp32 sums that lower precisions need.
    """
    if floor is None:
        return F.rms_norm(x, x.shape[-1:], None, eps)
    return x / torch.linalg.vector_norm(x, 2, -1, True).hypot_(floor)


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.fused: tuple[Tensor, Tensor] | None = None

    def fuse(self) -> None:
        """After loading, on a CPU in fp32: keep sqrt(n) * weight and sqrt(n eps)."""
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32:
            size = self.weight.shape[0]
            self.fused = self.weight * size**0.5, torch.tensor((size * self.eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return unit_rms(x, self.eps, self.fused[1]).mul_(self.fused[0])


def add_linear(residual: Tensor, x: Tensor, linear: nn.Linear) -> Tensor:
    """residual + linear(x), the addition inside the product."""
    out = torch.addmm(residual, x, linear.weight.t())
    return out if linear.bias is None else out + linear.bias


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap); None leaves them as they are."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


class RotaryTable(nn.Module):
    """Rotary position embedding of pairs half a head apart (Su et al., 2021)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, rope: RopeConfig, positions: int):
        super().__init__()
        speeds = torch.tensor(rope.speeds(head_dim), dtype=torch.float64, device="cpu")
        angle = torch.outer(torch.arange(positions, dtype=torch.float64, device="cpu"), speeds)
        scale = (speeds > 0).double() * (rope.scale - 1.0) + 1.0
        cos, sin = angle.cos() * scale, angle.sin() * scale
        self.register_buffer("cos", torch.cat([cos, cos], -1).float(), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], -1).float(), persistent=False)
        self.dtype = torch.float32

    def forward(self, positions: Tensor) -> Rope:
        """positions [T] int64, each below the table's length -> angles in `dtype`."""
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        if self.dtype != torch.float32:
            cos, sin = cos.to(self.dtype), sin.to(self.dtype)
        return cos[:, None], sin[:, None]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn each pair (x_i, x_{i + D/2}) by its angle. x [T, heads, D]."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    """Grouped-query attention, its queries and keys normed per head where the config says so; q, k
    and v are one product."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.q_heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        bias, width = config.attention_bias, config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * width
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * width, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(width, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(width, config.rms_norm_eps) if config.qk_norm else None
        self.order, self.value_scale = config.rope.order(width), config.value_scale
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None
        self.fused: tuple[Tensor, Tensor | None] | None = None

    def pieces(self) -> Pieces:
        """What the product is made of in a checkpoint."""
        q, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        return stacked("qkv_proj", self.qkv_proj, rows)

    def fold(self) -> None:
        """After loading: put the heads of queries and keys in rope's order, and values' scale into
        their product."""
        heads = self.q_heads + self.kv_heads
        weight, scale = self.qkv_proj.weight, getattr(self.qkv_proj, "scale", None)
        for value in [weight, self.qkv_proj.bias, scale]:
            if value is None:
                continue
            rows = value.data.unflatten(0, (-1, self.head_dim))
            if self.order is not None:  # what is in FP8 moves as bytes
                moved = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
                moved[:heads] = moved[:heads, self.order]
            if self.value_scale != 1.0 and (scale is None or value is not weight):
                rows[heads:] *= self.value_scale
        for norm in (self.q_norm, self.k_norm):
            if norm is not None and self.order is not None:
                norm.weight.data = norm.weight.data[self.order]

    def fuse(self) -> None:
        """After loading: lay the two norms' weights side by side, one row per head."""
        if self.q_norm is not None and self.k_norm is not None:
            scale, floor = self._norms(self.q_norm, self.k_norm)
            self.fused = scale.contiguous(), floor

    def _norms(self, q: RMSNorm, k: RMSNorm) -> tuple[Tensor, Tensor | None]:
        """What each head of q and k is multiplied with [Hq + Hkv, D], and the norms' floor."""
        parts = [(n.weight, None) if n.fused is None else n.fused for n in (q, k)]
        heads = self.q_heads, self.kv_heads
        rows = [part[0].expand(n, -1) for part, n in zip(parts, heads, strict=True)]
        return torch.cat(rows), parts[0][1]

    def forward(self, x: Tensor, residual: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """x, residual [T, H] -> residual + attention(x)."""
        q_heads, heads = self.q_heads, self.q_heads + self.kv_heads
        qkv = self.qkv_proj(x).view(x.shape[0], heads + self.kv_heads, self.head_dim)
        qk = qkv[:, :heads]
        if self.q_norm is not None and self.k_norm is not None:
            scale, floor = self.fused or self._norms(self.q_norm, self.k_norm)
            qk = unit_rms(qk, self.eps, floor) * scale
        qk = rotate(qk, rope)
        sinks = () if self.sinks is None else (self.sinks,)
        out = attend(self.layer, qk[:, :q_heads], qk[:, q_heads:], qkv[:, heads:], *sinks)
        return add_linear(residual, out, self.o_proj)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = nn.Linear(size, 2 * inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def pieces(self) -> Pieces:
        """What the product is made of in a checkpoint."""
        rows = self.gate_up_proj.out_features // 2
        return stacked("gate_up_proj", self.gate_up_proj, {"gate_proj": rows, "up_proj": rows})

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [T, H] -> residual + mlp(x)."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return add_linear(residual, F.silu(gate) * up, self.down_proj)


class DecoderLayer(nn.Module):
    """mlp: what stands for an MLP, as experts do: (x, residual [T, H]) -> [T, H]."""

    def __init__(self, config: DecoderConfig, layer: int, mlp: nn.Module | None = None):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp or MLP(config)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        x = self.self_attn(self.input_layernorm(x), x, rope, attend)
        return self.mlp(self.post_attention_layernorm(x), x)
