"""Decoder layers through kernels, for a GPU: what `layers.py` defines, in fewer launches.

Per layer: norm and q, k, v in one product; their norms, rotation and the K/V store; attention; the
output product onto the residual stream; norm, gate, up and their product; the down product onto the
residual stream. Legend as in `layers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from strobe.kernels.linear import Products, Scaled, Weight
from strobe.kernels.rowwise import context_store, qk_norm_rope_store, rms_norm
from strobe.kernels.steps import gather_rows
from strobe.models.config import DecoderConfig
from strobe.models.layers import Attend, DecoderLayer, RMSNorm, RotaryTable

Norm = tuple[Tensor, float]


class PagedAttention(Protocol):
    """The attention of one forward, its store within reach: kv(layer) [slots, 2, Hkv, D] and where
    the rows go in it; over(layer, q [T, Hq, D], sinks [Hq] or None) -> [T, Hq * D], of rows that
    are stored already."""

    slots: Tensor

    def kv(self, layer: int) -> Tensor: ...

    def over(self, layer: int, q: Tensor, sinks: Tensor | None) -> Tensor: ...


def weight_of(linear: nn.Linear) -> Weight:
    """A product's weight and, if it is in FP8, its scale per row."""
    scale = getattr(linear, "scale", None)
    assert linear.bias is None
    return Weight(linear.weight, scale)


def norm_of(norm: RMSNorm) -> Norm:
    return norm.weight, norm.eps


def weight_or_none(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


class _Layer(NamedTuple):
    attention_norm: Norm
    qkv: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    out: Weight
    mlp_norm: Norm
    gate_up: Weight
    down: Weight


class FusedDecoder:
    """A stack of decoder layers, run by kernels."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        config: DecoderConfig,
        rope: RotaryTable,
        products: Products,
    ):
        self.config, self.rope, self.products = config, rope, products
        self.layers = [
            _Layer(
                norm_of(layer.input_layernorm),
                weight_of(layer.self_attn.qkv_proj),
                weight_or_none(layer.self_attn.q_norm),
                weight_or_none(layer.self_attn.k_norm),
                layer.self_attn.sinks,
                weight_of(layer.self_attn.o_proj),
                norm_of(layer.post_attention_layernorm),
                weight_of(cast(nn.Linear, layer.mlp.gate_up_proj)),
                weight_of(cast(nn.Linear, layer.mlp.down_proj)),
            )
            for layer in layers
        ]

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """ids [T], embedding [V, H] -> [T, H]."""
        return gather_rows(embedding, ids)

    def __call__(
        self, x: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, H], which may be overwritten -> (residual stream [T, H], features [T, len(capture)
        * H] or None), as the models' forward says."""
        linear, add, size = self.products.linear, self.products.add, x.shape[1]
        features = x.new_empty(x.shape[0], len(capture) * size) if capture else None
        place = (
            dict(zip(capture, features.split(size, 1), strict=True)) if features is not None else {}
        )
        if 0 in place:
            place[0].copy_(x)
        scratch: Tensor | None = x
        scaled: Scaled | None = None  # x as the next norm wants it, where a product left it so
        for i, layer in enumerate(self.layers):
            qkv = linear(x, layer.qkv, norm=layer.attention_norm, scaled=scaled)
            mixed = self._attend(i, layer, qkv, positions, cast(PagedAttention, attend))
            if scratch is None:  # x is a captured feature and must stay
                scratch = torch.empty_like(x, memory_format=torch.contiguous_format)
            x, scaled = add(mixed, layer.out, x, then=layer.mlp_norm[0], out=scratch)
            inner = linear(x, layer.gate_up, norm=layer.mlp_norm, scaled=scaled, gated=True)
            kept = place.get(i + 1)
            out = x if kept is None else kept
            if i + 1 < len(self.layers):
                then = self.layers[i + 1].attention_norm[0]
                x, scaled = add(inner, layer.down, x, then=then, out=out)
            else:
                x = linear(inner, layer.down, residual=x, out=out)
            scratch = x if kept is None else None
        return x, features

    def head(self, x: Tensor, norm: RMSNorm, weight: Tensor) -> Tensor:
        """Residual stream [R, H] -> logits [R, V]."""
        return self.products.linear(rms_norm(x, *norm_of(norm)), Weight(weight, None))

    def pick(self, x: Tensor, norm: RMSNorm, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        """Residual stream [R, H] -> the most probable tokens [R]; no logits are kept. scale: of
        each row of a head in FP8."""
        return self.products.head_argmax(rms_norm(x, *norm_of(norm)), Weight(weight, scale))

    def _attend(
        self, index: int, layer: _Layer, qkv: Tensor, positions: Tensor, attend: PagedAttention
    ) -> Tensor:
        config, rope = self.config, self.rope
        q = qk_norm_rope_store(
            qkv,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
            rope.cos,
            rope.sin,
            positions,
            attend.slots,
            attend.kv(index),
            config.num_heads,
            config.num_kv_heads,
        )
        return attend.over(index, q, layer.sinks)


class FusedContext:
    """A drafter's context keys and values of all layers, from the target's features."""

    def __init__(
        self,
        fc: nn.Linear,
        hidden_norm: RMSNorm,
        products_kv: Weight,
        key_norms: Tensor,
        decoder: FusedDecoder,
    ):
        """products_kv: every layer's key and value rows [L * 2 * Hkv * D, H]; key_norms [L, D]."""
        self.fc, self.norm = weight_of(fc), norm_of(hidden_norm)
        self.kv, self.key_norms, self.decoder = products_kv, key_norms, decoder

    def store(self, features: Tensor, positions: Tensor, slots: Tensor, data: Tensor) -> None:
        """features [T, n * H], positions, slots [T] -> data [L, slots, 2, Hkv, D]."""
        decoder = self.decoder
        context = decoder.products.linear(features, self.fc)
        rows = decoder.products.linear(context, self.kv, norm=self.norm)
        eps, rope = decoder.config.rms_norm_eps, decoder.rope
        context_store(rows, self.key_norms, eps, rope.cos, rope.sin, positions, slots, data)
