"""The operations through triton's kernels, for a GPU; what these do not serve is plain torch.

Per layer of Qwen3: norm and q, k, v in one launch; their norms, rotation and the K/V store;
attention; o_proj onto the residual stream; norm, gate, up and activation; down_proj onto the
residual stream. Legend as in `torch_ops.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strobe.kernels.linear import Products, Scaled, Weight
from strobe.kernels.rowwise import context_store, qk_norm_rope_store, rms_norm
from strobe.kernels.steps import gather_rows
from strobe.kv.store import KVStore
from strobe.models.modules import Attention, RMSNorm, scale_of
from strobe.models.ops.forward import Residual, Rows
from strobe.models.ops.torch_ops import Activation, ContextWeights, Linear, TorchOps


class FusedResidual(Residual):
    """The residual stream in one buffer, overwritten, and captured features written in place."""

    __slots__ = ("_features", "_kept", "_next", "_place", "_places", "left")

    def __init__(self, value: Tensor, capture: tuple[int, ...] = ()):
        self.value, self._features = value, None
        self._places: dict[int, Tensor] = {}
        if capture:
            features = value.new_empty(value.shape[0], len(capture) * value.shape[1])
            self._places = dict(zip(capture, features.split(value.shape[1], 1), strict=True))
            self._features = features
        if 0 in self._places:
            self._places[0].copy_(value)
        self._place: Tensor | None = None  # of the feature that the layer ends with
        self._next: RMSNorm | None = None  # what reads the stream behind the layer
        self._kept: Tensor | None = None  # the last feature, which must stay as it is
        self.left: tuple[Tensor, RMSNorm, Scaled] | None = None

    def begin(self, done: int, norm: RMSNorm | None) -> None:
        self._place, self._next = self._places.get(done), norm

    def end(self, done: int) -> None:
        if self._place is not None and self.value is not self._place:
            self._place.copy_(self.value)

    def features(self) -> Tensor | None:
        return self._features

    def target(self, then: RMSNorm | None) -> tuple[Tensor, RMSNorm | None]:
        """Where the next sum goes, and the norm that reads it."""
        if then is None and self._place is not None:
            self._kept = self._place
            return self._place, self._next
        out = self.value
        if out is self._kept:
            out = torch.empty_like(out, memory_format=torch.contiguous_format)
        return out, self._next if then is None else then

    def scaled(self, norm: RMSNorm) -> Scaled | None:
        """The stream as this norm wants it, where the sum before left it so."""
        if self.left is None or self.left[0] is not self.value or self.left[1] is not norm:
            return None
        return self.left[2]


class TritonOps(TorchOps):
    """Of models in `dtype` on one stream; they share a workspace."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.products = Products(device, dtype)
        self._weights: dict[Linear, tuple[Weight, Tensor | None]] = {}

    def _weight(self, linear: Linear) -> tuple[Weight, Tensor | None]:
        """The layer's weight, with its rows' scales if it is in FP8, and its bias."""
        found = self._weights.get(linear)
        if found is None:
            weight = Weight(linear.weight, scale_of(linear))
            found = self._weights[linear] = weight, linear.bias
        return found

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        return gather_rows(weight, ids)

    def residual(self, x: Tensor, capture: tuple[int, ...] = ()) -> Residual:
        return FusedResidual(x, capture)

    def norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return rms_norm(x, norm.gain, norm.eps)

    def _linear(
        self, x: Tensor, linear: Linear, activation: Activation | None, **norm: Any
    ) -> Tensor:
        (weight, bias), gelu = self._weight(linear), activation == "gelu_tanh"
        gated = activation is not None
        return self.products.linear(x, weight, bias=bias, gated=gated, gelu=gelu, **norm)

    def linear(self, x: Tensor, linear: Linear, activation: Activation | None = None) -> Tensor:
        return self._linear(x, linear, activation)

    def norm_linear(
        self, x: Residual, norm: RMSNorm, linear: Linear, activation: Activation | None = None
    ) -> Tensor:
        assert isinstance(x, FusedResidual)
        how = {"norm": (norm.gain, norm.eps), "scaled": x.scaled(norm)}
        return self._linear(x.value, linear, activation, **how)

    def add_linear(
        self, x: Residual, y: Tensor, linear: Linear, then: RMSNorm | None = None
    ) -> None:
        assert isinstance(x, FusedResidual)
        (weight, bias), (out, norm) = self._weight(linear), x.target(then)
        gain, scaled = None if norm is None else norm.gain, None
        if gain is None:
            self.products.linear(y, weight, bias=bias, residual=x.value, out=out)
        else:
            _, scaled = self.products.add(y, weight, x.value, bias=bias, then=gain, out=out)
        x.value = out
        x.left = None if scaled is None or norm is None else (out, norm, scaled)

    def attention(self, qkv: Tensor, of: Attention, rows: Rows) -> Tensor:
        attend, end = rows.attend, of.gate_heads * of.head_dim
        if not hasattr(attend, "over"):  # keys and values are not within reach
            return super().attention(qkv, of, rows)
        table = rows.tables[of.layer]
        q = qk_norm_rope_store(
            qkv[:, end:] if end else qkv,
            of.query_gain(),
            None if of.k_norm is None else of.k_norm.gain,
            of.eps,
            table.cos,
            table.sin,
            rows.positions,
            attend.slots,
            attend.kv(of.layer),
            of.q_heads,
            of.kv_heads,
            own_values=of.own_values,
            value_norm=of.value_norm,
        )
        out = attend.over(of.layer, q, of.sinks)
        return out * qkv[:, :end].sigmoid() if end else out

    def head(self, x: Tensor, norm: RMSNorm, weight: Tensor) -> Tensor:
        return self.products.linear(self.norm(x, norm), Weight(weight))

    def argmax(
        self, x: Tensor, norm: RMSNorm, weight: Tensor, fp8: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        return self.products.head_argmax(self.norm(x, norm), Weight(*(fp8 or (weight,))))

    def store_context(
        self, kv: Tensor, of: ContextWeights, rows: Rows, slots: Tensor, store: KVStore
    ) -> None:
        cos, sin = rows.tables[0].cos, rows.tables[0].sin
        context_store(kv, of.gains, of.eps, cos, sin, rows.positions, slots, store.data)
