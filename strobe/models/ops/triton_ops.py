"""The operations by Triton kernels, for a GPU, and by plain torch where no kernel supports a call.

A Qwen3 layer launches: norm with q, k and v; their norms, rotation and the K/V store; attention;
o_proj added to the residual stream; norm with gate, up and activation; down_proj added to the
residual stream. Legend as in `torch_ops.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strobe.attention.recurrent_backend import RecurrentPlan
from strobe.kernels import candidates, gates
from strobe.kernels.coded import CodedExperts
from strobe.kernels.convolution import convolve
from strobe.kernels.experts import KernelExperts, Projection, experts, serves
from strobe.kernels.gemm_table import Weight
from strobe.kernels.linear import Gemms
from strobe.kernels.operands import Epilogue, Input, RowNorm
from strobe.kernels.recurrent import mix
from strobe.kernels.reference_candidates import EdgeTerms
from strobe.kernels.reference_recurrent import DeltaInput
from strobe.kernels.residual import FusedResidual
from strobe.kernels.rowwise import context_store, qk_norm_rope_store, rms_norm
from strobe.kernels.sampling import argmax
from strobe.kernels.step_bookkeeping import gather_rows
from strobe.kv.kv_store import KVStore
from strobe.models.linear import AnyLinear, LinearView
from strobe.models.modules import Attention, RMSNorm
from strobe.models.ops.torch_ops import (
    Activation,
    BlockKernels,
    ContextWeights,
    ExpertsLayer,
    ForwardRows,
    Residual,
    TorchOps,
)
from strobe.models.quantization.kernel_weights import has_experts_kernel, kernel_weight
from strobe.sampling.walk import WalkNoise


class TritonOps(TorchOps):
    """For models in `dtype` on one stream, which share a workspace."""

    gates = gates

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.gemms = Gemms(device, dtype)
        self._weights: dict[AnyLinear, tuple[Any, Tensor | None]] = {}

    def _weight(self, linear: AnyLinear) -> tuple[Any, Tensor | None]:
        """Return the layer's weight and bias for kernels. A format without a kernel is dequantized
        for this call."""
        cached = self._weights.get(linear)
        if cached is None:
            weight = kernel_weight(linear)
            if weight is None:
                return Weight(linear.dense(self.gemms.dtype)), linear.bias
            cached = self._weights[linear] = weight, linear.bias
        return cached

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        return gather_rows(weight, ids)

    def residual(self, x: Tensor, capture: tuple[int, ...] = ()) -> Residual:
        return FusedResidual(x, capture)

    def norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def linear(self, x: Tensor, linear: AnyLinear, activation: Activation | None = None) -> Tensor:
        return self._product(Input(rows=x), linear, activation)

    def norm_linear(
        self, x: Residual, norm: RMSNorm, linear: AnyLinear, activation: Activation | None = None
    ) -> Tensor:
        rows = Input(
            rows=x.value,
            norm=RowNorm(norm.weight, norm.eps),
            scaled=x.scaled(norm.weight) if isinstance(x, FusedResidual) else None,
        )
        return self._product(rows, linear, activation)

    def _product(self, x: Input, linear: AnyLinear, activation: Activation | None) -> Tensor:
        weight, bias = self._weight(linear)
        return self.gemms.linear(x, weight, Epilogue(bias=bias, activation=activation))

    def add_linear(
        self, x: Residual, y: Tensor, linear: AnyLinear, next_norm: RMSNorm | None = None
    ) -> None:
        if not isinstance(x, FusedResidual):
            return super().add_linear(x, y, linear, next_norm)
        weight, bias = self._weight(linear)
        x.add_linear(self.gemms, y, weight, bias, next_norm=next_norm)

    def add_norm(self, x: Residual, y: Tensor, norm: RMSNorm, scale: Tensor | None = None) -> None:
        x.value = gates.add_norm(x.value, y, norm.weight, norm.eps, scale=scale)

    def attention(self, qkv: Tensor, attention: Attention, rows: ForwardRows) -> Tensor:
        if rows.paged is None:
            return super().attention(qkv, attention, rows)
        table = rows.tables[attention.layer]
        scale = rows.paged.scale(attention.layer)
        q = qk_norm_rope_store(
            qkv,
            q_weight=None if attention.q_norm is None else attention.q_norm.weight,
            k_weight=None if attention.k_norm is None else attention.k_norm.weight,
            eps=attention.eps,
            cos=table.cos,
            sin=table.sin,
            positions=rows.positions,
            slots=rows.paged.slots(attention.layer),
            kv=rows.paged.kv(attention.layer),
            q_heads=attention.q_heads,
            kv_heads=attention.kv_heads,
            own_values=attention.own_values,
            value_norm=attention.value_norm,
            k_scale=scale.keys,
            v_scale=scale.values,
        )
        return rows.paged.over(attention.layer, q, attention.sinks)

    def experts(
        self, x: Tensor, logits: Tensor, layer: ExpertsLayer, onto: Tensor | None, rows: ForwardRows
    ) -> Tensor:
        linears = layer.gate_up, layer.down
        if not serves(x, layer.gate_up) or not all(map(has_experts_kernel, linears)):
            unpacked = [self._dequantizer(linear) for linear in linears]
            layer = layer._replace(gate_up=unpacked[0], down=unpacked[1])
            return super().experts(x, logits, layer, onto=onto, rows=rows)
        weights = KernelExperts(
            routing=layer.routing,
            gate_up=Projection(*self._weight(layer.gate_up)),
            down=Projection(*self._weight(layer.down)),
            gate=layer.gate,
        )
        return experts(
            x,
            logits,
            weights,
            extra=onto,
            sizes=None if rows.paged is None else rows.paged.sizes,
        )

    def _dequantizer(self, linear: AnyLinear) -> AnyLinear:
        """Return the layer as plain torch multiplies by it: a kernel dequantizes experts in
        codes."""
        weight = kernel_weight(linear)
        if not isinstance(weight, CodedExperts):
            return linear
        return LinearView(weight=linear.weight, bias=linear.bias, held_experts=weight)

    def delta_rule(self, x: DeltaInput, layer: int, rows: ForwardRows) -> Tensor:
        plan: RecurrentPlan = rows.recurrent
        return mix(
            x,
            plan.spans,
            stored=plan.stored(layer),
            longest=plan.batch.longest,
            spec=plan.states.spec,
        )

    def argmax(self, x: Tensor, norm: RMSNorm, head: AnyLinear) -> Tensor:
        return self.gemms.head_argmax(Input(rows=self.norm(x, norm)), self._weight(head)[0])

    def best_two(self, x: Tensor, norm: RMSNorm, head: AnyLinear) -> tuple[Tensor, Tensor]:
        margins = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        weight, _ = self._weight(head)
        rows = Input(rows=self.norm(x, norm))
        return self.gemms.head_argmax(rows, weight, margins=margins), margins

    def best_two_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        margins = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        return argmax(logits, margins), margins

    def block_kernels(self, base: Tensor, dynamic: Tensor) -> BlockKernels:
        return BlockKernels(base, dynamic)

    def convolve(
        self,
        x: Tensor,
        kernels: BlockKernels,
        side: int,
        rows: ForwardRows,
        onto: Tensor | None = None,
    ) -> Tensor:
        assert rows.offsets is not None
        base, dynamic = kernels.of_side(side)
        return convolve(x, base, dynamic, rows.offsets, onto)

    def best_of(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return candidates.best_of(logits, count)

    def edges(self, terms: EdgeTerms) -> Tensor:
        return candidates.edges(terms)

    def walk(
        self, edges: Tensor, ids: Tensor, margins: Tensor | None, noise: WalkNoise | None
    ) -> Tensor:
        return candidates.walk(edges, ids, margins, noise)

    def store_context(
        self, kv: Tensor, weights: ContextWeights, rows: ForwardRows, slots: Tensor, store: KVStore
    ) -> None:
        context_store(
            kv,
            k_weight=weights.gains,
            eps=weights.eps,
            cos=rows.tables[0].cos,
            sin=rows.tables[0].sin,
            positions=rows.positions,
            slots=slots,
            data=store.data,
        )
