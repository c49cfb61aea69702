"""The operations on a CPU in C that is compiled on this machine, and in plain torch where C does
not support a call: another dtype than float32, attention sinks, heads of an unusual size.

A layer of few rows makes four calls around its products: norms, rotation, the K/V store and
attention; the sum with the residual stream and the next norm, twice; and the activation. Legend as
in `torch_ops.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strobe.attention.compiled import CompiledPlan
from strobe.kernels.cpu.calls import CpuCalls, LayerStruct, NormFactors, is_plain
from strobe.kernels.reference_experts import Gate
from strobe.kernels.reference_residual import Norm, ResidualStream
from strobe.kv.kv_store import KVStore
from strobe.models.linear import AnyLinear
from strobe.models.modules import Attention, RMSNorm
from strobe.models.ops.torch_ops import (
    Activation,
    BlockKernels,
    ContextWeights,
    ForwardRows,
    Residual,
    TorchOps,
)


class NormedStream(ResidualStream):
    """A stream that also holds its value after the norm that reads it next, if the operation that
    made the value has computed that."""

    def __init__(self, value: Tensor, capture: tuple[int, ...]):
        super().__init__(value, capture)
        self._next_norm: Norm | None = None
        self._normed: tuple[Tensor, Norm, Tensor] | None = None

    def begin(self, done: int, next_norm: Norm | None) -> None:
        self._next_norm = next_norm

    def next_norm(self, norm: RMSNorm | None) -> RMSNorm | None:
        """Return the norm that reads the stream next. norm: the one within a layer, None at its
        end."""
        following = self._next_norm if norm is None else norm
        return following if isinstance(following, RMSNorm) else None

    def hold(self, value: Tensor, norm: RMSNorm, normed: Tensor) -> None:
        """Set the value, and norm(value)."""
        self.value = value
        self._normed = value, norm, normed

    def normed(self, norm: RMSNorm) -> Tensor | None:
        """Return norm(value) if it is held."""
        if self._normed is None:
            return None
        value, of_norm, normed = self._normed
        return normed if value is self.value and of_norm is norm else None


class _KnownLayer(NamedTuple):
    """An attention layer as C reads it, and the tensors whose memory that names."""

    struct: LayerStruct
    tensors: tuple[Tensor | None, ...]
    store: KVStore


class CompiledOps(TorchOps):
    """For models on a CPU."""

    def __init__(self) -> None:
        self.calls = CpuCalls()
        self._factors_of: dict[RMSNorm, NormFactors] = {}
        self._layers: dict[Attention, _KnownLayer] = {}
        self._context: tuple[ContextWeights, NormFactors] | None = None

    def residual(self, x: Tensor, capture: tuple[int, ...] = ()) -> Residual:
        return NormedStream(x, capture)

    def _factors(self, norm: RMSNorm) -> NormFactors | None:
        """Return a norm as C reads it; None if it is not folded."""
        known = self._factors_of.get(norm)
        if known is None and norm.folded is not None and norm.folded[0].is_contiguous():
            gain, floor = norm.folded
            known = self._factors_of[norm] = NormFactors(gain=gain, floor=float(floor))
        return known

    def norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        factors = self._factors(norm)
        if factors is None or x.dim() != 2 or not is_plain(x):
            return super().norm(x, norm)
        return self.calls.norm(x, factors)

    def linear(self, x: Tensor, linear: AnyLinear, activation: Activation | None = None) -> Tensor:
        y = super().linear(x, linear)
        return y if activation is None else self._activate(y, activation)

    def _activate(self, y: Tensor, activation: Activation) -> Tensor:
        """y [T, 2 I], outputs of gate and up -> [T, I]."""
        if y.dim() != 2 or not is_plain(y):
            return Gate(activation)(y)
        return self.calls.gate(y, gelu=activation == "gelu_tanh")

    def norm_linear(
        self, x: Residual, norm: RMSNorm, linear: AnyLinear, activation: Activation | None = None
    ) -> Tensor:
        normed = x.normed(norm) if isinstance(x, NormedStream) else None
        if normed is None:
            normed = self.norm(x.value, norm)
        return self.linear(normed, linear, activation)

    def add_linear(
        self, x: Residual, y: Tensor, linear: AnyLinear, next_norm: RMSNorm | None = None
    ) -> None:
        total = self.linear(y, linear)
        norm = x.next_norm(next_norm) if isinstance(x, NormedStream) else None
        factors = None if norm is None else self._factors(norm)
        if factors is None or not is_plain(x.value) or not is_plain(total):
            x.value = x.value + total
            return
        assert isinstance(x, NormedStream)
        assert norm is not None
        normed = self.calls.add_norm(total, x.value, factors)
        x.hold(total, norm, normed)

    def add_norm(self, x: Residual, y: Tensor, norm: RMSNorm, scale: Tensor | None = None) -> None:
        factors = self._factors(norm)
        if factors is None or not is_plain(y) or not is_plain(x.value):
            return super().add_norm(x, y, norm, scale)
        self.calls.norm_add(y, x.value, factors, 1.0 if scale is None else float(scale))
        x.value = y
        return None

    def attention(self, qkv: Tensor, attention: Attention, rows: ForwardRows) -> Tensor:
        plan = rows.attend
        if not isinstance(plan, CompiledPlan) or not is_plain(qkv):
            return super().attention(qkv, attention, rows)
        known = self._layers.get(attention)
        if known is None or known.store is not plan.store:
            known = self._layer(attention, plan, rows)
            if known is None:
                return super().attention(qkv, attention, rows)
            self._layers[attention] = known
        return plan.heads(attention.layer, known.struct, qkv)

    def _layer(
        self, attention: Attention, plan: CompiledPlan, rows: ForwardRows
    ) -> _KnownLayer | None:
        """Return a layer as C reads it; None if C does not support it."""
        table = rows.tables[attention.layer]
        width = attention.head_dim
        norms = attention.norms()
        gains = None if norms is None else norms[0].contiguous()
        floor = None if norms is None else norms[1]
        is_supported = (
            attention.sinks is None
            and self.calls.has_width(width)
            and plan.stores(attention.layer)
            and table.dtype == torch.float32
            and all(map(is_plain, (table.cos, table.sin)))
            and (gains is None or (floor is not None and is_plain(gains)))
        )
        if not is_supported:
            return None
        struct = plan.struct(
            attention.layer,
            gains=None if gains is None else gains.data_ptr(),
            cos=table.cos.data_ptr(),
            sin=table.sin.data_ptr(),
            q_heads=attention.q_heads,
            kv_heads=attention.kv_heads,
            width=width,
            own_values=attention.own_values,
            value_norm=attention.value_norm,
            floor=0.0 if floor is None else float(floor),
            value_floor=(width * attention.eps) ** 0.5,
        )
        return _KnownLayer(struct, (gains, table.cos, table.sin), plan.store)

    def block_kernels(self, base: Tensor, dynamic: Tensor) -> BlockKernels:
        if not is_plain(base) or not is_plain(dynamic):
            return super().block_kernels(base, dynamic)
        return BlockKernels(base, dynamic)

    def convolve(
        self,
        x: Tensor,
        kernels: BlockKernels,
        side: int,
        rows: ForwardRows,
        onto: Tensor | None = None,
    ) -> Tensor:
        if kernels.taps:
            return super().convolve(x, kernels, side, rows, onto)
        if not is_plain(x) or (onto is not None and not is_plain(onto)):
            whole = super().block_kernels(kernels.base, kernels.dynamic)
            return super().convolve(x, whole, side, rows, onto)
        assert rows.offsets is not None
        base, dynamic = kernels.of_side(side)
        return self.calls.convolve(x, base, dynamic, rows.offsets, onto)

    def store_context(
        self, kv: Tensor, weights: ContextWeights, rows: ForwardRows, slots: Tensor, store: KVStore
    ) -> None:
        norms = self._context_norms(weights)
        table = rows.tables[0]
        is_supported = (
            norms is not None
            and is_plain(kv)
            and store.data.dim() == 5
            and store.spec.dtype == torch.float32
            and table.dtype == torch.float32
            and slots.is_contiguous()
        )
        if norms is None or not is_supported:
            return super().store_context(kv, weights, rows, slots, store)
        self.calls.store_context(
            kv,
            factors=norms,
            cos=table.cos,
            sin=table.sin,
            positions=rows.positions,
            slots=slots,
            store=store.data,
        )
        return None

    def _context_norms(self, weights: ContextWeights) -> NormFactors | None:
        """Return the key norms of a drafter's layers; None if they are not folded."""
        if self._context is not None and self._context[0] is weights:
            return self._context[1]
        gains, floor = weights.folded
        if floor is None or not is_plain(gains):
            return None
        norms = NormFactors(gain=gains, floor=float(floor))
        self._context = weights, norms
        return norms
