"""Modules with the parameters of decoder layers; `strobe.models.ops` computes with them.

Legend: T rows, H hidden size, Hq / Hkv query and key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.models.config_readers.rope import RopeConfig
from strobe.models.linear import Linear
from strobe.models.model_config import DecoderConfig

Rope = tuple[Tensor, Tensor]
"""(cos, sin) [T, 1, D] of the rows' positions, the first half of sin negated; see `rotate`."""

_FOLDED = (torch.float32, torch.bfloat16)
"""Dtypes in which norms on a CPU use `RMSNorm.folded`."""


def unit_rms(x: Tensor, eps: float, floor: Tensor | None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension, of size n.

    With floor = sqrt(n eps) in float32 return x / sqrt(|x|^2 + floor^2) in float32, which the
    caller multiplies by sqrt(n): the same with half the operations.
    """
    if floor is None:
        return F.rms_norm(x, x.shape[-1:], None, eps)
    return x / torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32).hypot_(floor)


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019). offset: `fold` adds it to the weight in fp32,
    as in Qwen3.5."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.offset = offset
        self.folded: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of_stream(cls, config: DecoderConfig) -> RMSNorm:
        """Make a norm of the residual stream."""
        return cls(config.hidden_size, config.rms_norm_eps, config.norm_offset)

    def fold(self, scale: float = 1.0) -> None:
        """Finish loading: add the offset, multiply by `scale`, and on a CPU cache sqrt(n) * weight
        and sqrt(n eps) in float32."""
        if self.offset or scale != 1.0:
            weight = (self.offset + self.weight.data.float()) * scale
            self.weight.data = weight
            self.offset = 0.0
        if self.weight.device.type == "cpu" and self.weight.dtype in _FOLDED:
            size = self.weight.shape[0]
            gain = self.weight.data.float() * size**0.5
            self.folded = gain, torch.tensor((size * self.eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.folded is not None and x.dtype in _FOLDED:
            gain, floor = self.folded
            y = unit_rms(x, self.eps, floor).mul_(gain)
            return y if x.dtype == torch.float32 else y.to(x.dtype)
        if x.dtype != self.weight.dtype:
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryTable(nn.Module):
    """Rotary position embedding of pairs half a head apart (Su et al., 2021)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, rope: RopeConfig, positions: int):
        super().__init__()
        exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        frequencies = torch.tensor(rope.inverse_frequencies(head_dim), **exact)
        angle = torch.outer(torch.arange(positions, **exact), frequencies)
        scale = (frequencies > 0).double() * (rope.scale - 1.0) + 1.0
        cos = angle.cos() * scale
        sin = angle.sin() * scale
        self.register_buffer("cos", torch.cat([cos, cos], -1).float(), persistent=False)
        self.register_buffer("sin", torch.cat([-sin, sin], -1).float(), persistent=False)
        self.dtype = torch.float32

    def forward(self, positions: Tensor) -> Rope:
        """positions [T] int64, less than the table's length -> angles in `dtype`."""
        cos = self.cos.index_select(0, positions)
        sin = self.sin.index_select(0, positions)
        return cos.to(self.dtype)[:, None], sin.to(self.dtype)[:, None]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair (x_i, x_{i + D/2}) by its angle. x [T, heads, D]."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    """Grouped-query attention. One linear layer computes q, k and v, and before q the heads of an
    output gate, if the config has one."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        query_scale: float = 1.0,
        value_norm: bool = False,
    ):
        """layer: index among the layers with attention. query_scale: factor of the queries after
        their norm. value_norm: divide values by their root mean square."""
        super().__init__()
        shape = config.shape_of(layer)
        bias = config.attention_bias
        self.layer = layer
        self.eps = config.rms_norm_eps
        self.q_heads = config.num_heads
        self.kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.own_values = shape.own_values
        self.gate_heads = config.num_heads if config.output_gate else 0
        self.query_scale = query_scale
        self.value_norm = value_norm
        self.first_key = (self.gate_heads + self.q_heads) * self.head_dim  # output of qkv_proj
        parts = {"q_proj": self.first_key, "k_proj": self.kv_heads * self.head_dim}
        parts |= {"v_proj": parts["k_proj"]} if shape.own_values else {}
        self.qkv_proj = Linear(config.hidden_size, parts, bias)
        self.o_proj = Linear(
            self.q_heads * self.head_dim,
            config.hidden_size,
            bias=bias and config.output_bias,
            split="inputs",
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, self.eps, config.norm_offset)
            self.k_norm = RMSNorm(self.head_dim, self.eps, config.norm_offset)
        self.order = shape.rope.order(self.head_dim)
        self.value_scale = config.value_scale
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None
        self.folded: tuple[Tensor, Tensor | None] | None = None

    def fold(self) -> None:
        """Finish loading: reorder the heads of queries and keys for rope, scale the values' outputs
        by `value_scale`, and cache the norms."""
        first_value = self.first_key + self.kv_heads * self.head_dim
        if self.order is not None:
            rows = torch.arange(self.qkv_proj.out_features).unflatten(0, (-1, self.head_dim))
            heads = slice(self.gate_heads, first_value // self.head_dim)
            rows[heads] = rows[heads][:, self.order]
            self.qkv_proj.reorder(rows.flatten())
        if self.value_scale != 1.0:
            self.qkv_proj.multiply(first_value, self.value_scale)
        for norm, factor in ((self.q_norm, self.query_scale), (self.k_norm, 1.0)):
            if norm is not None:
                if self.order is not None:
                    norm.weight.data = norm.weight.data[self.order]
                norm.fold(factor)
        self.folded = self.norms()

    def norms(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the factors of each head of q and k [Hq + Hkv, D], and the floor of `unit_rms`."""
        if self.folded is not None or self.q_norm is None or self.k_norm is None:
            return self.folded
        q = self.q_norm
        k = self.k_norm
        (of_q, floor), (of_k, _) = (norm.folded or (norm.weight, None) for norm in (q, k))
        return torch.cat([of_q.expand(self.q_heads, -1), of_k.expand(self.kv_heads, -1)]), floor
