"""Every operation in plain torch, the reference for kernels and the path of gradients, and the
values that operations take: the residual stream and the forward's rows.

Legend: T rows, H hidden size, I intermediate size, V vocabulary, Hq / Hkv query and key-value
heads, D head size, L layers, k experts per row; of a gated delta rule Hv value heads of Dv, C
channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.attention.backend import paged_plan
from strobe.attention.recurrent_backend import RecurrentPlan
from strobe.kernels import reference_candidates, reference_experts, reference_gates
from strobe.kernels.operands import Activation
from strobe.kernels.reference_candidates import EdgeTerms
from strobe.kernels.reference_convolution import add_taps, missing_rows, whole_kernels
from strobe.kernels.reference_recurrent import DeltaInput, gated_mix
from strobe.kernels.reference_residual import ResidualStream
from strobe.kv.kv_store import KVStore
from strobe.models.linear import AnyLinear, apply
from strobe.models.modules import Attention, RMSNorm, Rope, RotaryTable, rotate, unit_rms
from strobe.sampling.sampler import argmax, best_two
from strobe.sampling.walk import WalkNoise, walk

if TYPE_CHECKING:
    from strobe.kernels.residual import FusedResidual


class ContextWeights(NamedTuple):
    """Every layer's key and value outputs as one linear layer [L * 2 * Hkv * D, H], and the key
    norms' gains [L, D]. folded: gains and floor for `unit_rms`."""

    linear: AnyLinear
    gains: Tensor
    folded: tuple[Tensor, Tensor | None]
    eps: float


class BlockKernels(NamedTuple):
    """The kernels of the two convolutions around a sub-layer, of its input and of its output.

    A row's kernel is base [2, taps, H] plus dynamic [T, 2 * taps * G], in which H / G neighboring
    channels share a column. taps: the sums of both sides' taps, one after another, each [T, H] in
    float32; empty if each convolution adds them itself."""

    base: Tensor
    dynamic: Tensor
    taps: Sequence[Tensor] = ()

    def of_side(self, side: int) -> tuple[Tensor, Tensor]:
        """Return one convolution's base [taps, H] and dynamic part [T, taps, G]. side: 0 or 1."""
        dynamic = self.dynamic.unflatten(1, (2, self.base.shape[1], -1))
        return self.base[side], dynamic[:, side]


class ExpertsLayer(NamedTuple):
    """How rows choose experts, and the experts: gate and up as one linear layer, then down."""

    routing: reference_experts.Routing
    gate_up: AnyLinear
    down: AnyLinear
    gate: reference_experts.Gate


Residual: TypeAlias = "ResidualStream | FusedResidual"
"""The stream of `TorchOps` or of kernels, with the same attributes and methods."""


Attend = Callable[..., Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D]; a keyword sinks [Hq] for
layers that have them.

Stores the rows' keys and values and attends over the keys that each row may see. Models know
nothing else about caches, masks and batches: the engine passes one such function, training another.
"""


AttendJoined = Callable[..., Tensor]
"""As `Attend`, in the engine: (layer, qkv [T, Hq + 2 Hkv, D], Hq), with the keyword sinks."""
JOINED_ROWS = 64
"""Rows up to which all heads are rotated at once: time goes by operations there, not by values."""


class ForwardRows:
    """The rows of one forward. tables: the rotary table of each layer with attention. attend: any
    `Attend`; for recurrent layers a `RecurrentPlan`. joined: the same for joined heads; None if the
    plan has no such function, or there are many rows. paged: the attention plan, if kernels can
    store keys and values in its cache. offsets [T]: each row's offset in its span, for convolutions
    along blocks; 0 for padding."""

    __slots__ = (
        "_angles",
        "_head_angles",
        "_missing",
        "attend",
        "joined",
        "offsets",
        "paged",
        "positions",
        "recurrent",
        "tables",
    )

    def __init__(
        self,
        positions: Tensor,
        attend: Any,
        tables: Sequence[RotaryTable],
        offsets: Tensor | None = None,
    ):
        self.positions = positions
        self.offsets = offsets
        self.tables = tables
        self.recurrent = attend
        self.attend: Attend = attend.attend if isinstance(attend, RecurrentPlan) else attend
        self.paged = paged_plan(self.attend)
        self.joined: AttendJoined | None = None
        if positions.shape[0] <= JOINED_ROWS:
            self.joined = getattr(self.attend, "joined", None)
        self._angles: dict[RotaryTable, Rope] = {}
        self._head_angles: dict[tuple[RotaryTable, int, int], Rope] = {}
        self._missing: dict[int, list[Tensor | None]] = {}

    def angles(self, layer: int) -> Rope:
        """Return the layer's rotation angles, computed once per table."""
        table = self.tables[layer]
        angles = self._angles.get(table)
        if angles is None:
            angles = self._angles[table] = table(self.positions)
        return angles

    def head_angles(self, layer: int, rotated: int, others: int) -> Rope:
        """Return the layer's angles for `rotated` heads and, so that one operation serves all
        heads of a row, angles of zero for others after them: [T, heads, D]."""
        key = self.tables[layer], rotated, others
        angles = self._head_angles.get(key)
        if angles is None:
            cos, sin = self.angles(layer)
            still = cos.new_zeros(cos.shape[0], others, cos.shape[2])
            cos = torch.cat([cos.expand(-1, rotated, -1), still + 1], 1)
            sin = torch.cat([sin.expand(-1, rotated, -1), still], 1)
            angles = self._head_angles[key] = cos, sin
        return angles

    def missing(self, taps: int) -> list[Tensor | None]:
        """Return `reference_convolution.missing_rows` of the rows, computed once."""
        missing = self._missing.get(taps)
        if missing is None:
            assert self.offsets is not None
            missing = self._missing[taps] = missing_rows(self.offsets, taps)
        return missing


class TorchOps:
    """Stateless. Takes linear layers and norms as the modules that hold their parameters. gates:
    operations on gates, see `strobe.kernels.reference_gates`."""

    gates: ModuleType = reference_gates

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """ids [T], weight [V, H] -> [T, H]."""
        return F.embedding(ids, weight)

    def residual(self, x: Tensor, capture: tuple[int, ...] = ()) -> Residual:
        """Start a residual stream with x [T, H], which the caller gives up. capture: numbers of
        finished layers after which to capture features, in the features' order."""
        return ResidualStream(x, capture)

    def norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x [T, H] -> [T, H]."""
        return norm.forward(x)

    def linear(self, x: Tensor, linear: AnyLinear, activation: Activation | None = None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] after an activation."""
        y = apply(linear, x)
        return y if activation is None else reference_experts.Gate(activation)(y)

    def norm_linear(
        self, x: Residual, norm: RMSNorm, linear: AnyLinear, activation: Activation | None = None
    ) -> Tensor:
        """linear(norm(x))."""
        return self.linear(self.norm(x.value, norm), linear, activation)

    def add_linear(
        self, x: Residual, y: Tensor, linear: AnyLinear, next_norm: RMSNorm | None = None
    ) -> None:
        """x += linear(y), y [T, K]. next_norm: the norm that reads x next; None at the end of the
        layer."""
        if linear.product is not None or linear.bias is not None:
            x.value = x.value + apply(linear, y)
        else:
            x.value = torch.addmm(x.value, y, linear.dense(y.dtype).t())

    def add_norm(self, x: Residual, y: Tensor, norm: RMSNorm, scale: Tensor | None = None) -> None:
        """x = (x + norm(y)) * scale, y [T, H], scale [1]."""
        value = x.value + self.norm(y, norm)
        x.value = value if scale is None else value * scale

    def attention(self, qkv: Tensor, attention: Attention, rows: ForwardRows) -> Tensor:
        """Norm and rotate the heads, store keys and values, attend: qkv [T, (Hq + 2 Hkv) D] from
        the layer's linear -> [T, Hq * D]."""
        qkv = qkv.view(qkv.shape[0], -1, attention.head_dim)
        q_heads = attention.q_heads
        kv_heads = attention.kv_heads
        if rows.joined is not None and self._joins(attention):
            return self._joined_attention(qkv, attention, rows)
        # A layer without its own values uses its keys.
        qk = qkv[:, : q_heads + kv_heads]
        v = qkv[:, -kv_heads:]
        if (norms := attention.norms()) is not None:
            qk = (unit_rms(qk, attention.eps, norms[1]) * norms[0]).to(qk.dtype)
        qk = rotate(qk, rows.angles(attention.layer))
        if attention.value_norm:
            v = unit_rms(v, attention.eps, None)
        q = qk[:, :q_heads]
        k = qk[:, q_heads:]
        if attention.sinks is None:
            return rows.attend(attention.layer, q, k, v)
        return rows.attend(attention.layer, q, k, v, sinks=attention.sinks)

    def _joins(self, attention: Attention) -> bool:
        """Whether `_joined_attention` serves this layer."""
        norms = attention.norms()
        has_floor = norms is None or norms[1] is not None
        return has_floor and attention.own_values and not attention.value_norm

    def _joined_attention(self, qkv: Tensor, attention: Attention, rows: ForwardRows) -> Tensor:
        """As `attention`, by few operations, which overwrite qkv [T, Hq + 2 Hkv, D]."""
        assert rows.joined is not None
        rotated = attention.q_heads + attention.kv_heads
        if (norms := attention.norms()) is not None:
            qk = qkv[:, :rotated]
            torch.mul(unit_rms(qk, attention.eps, norms[1]), norms[0], out=qk)
        qkv = rotate(qkv, rows.head_angles(attention.layer, rotated, attention.kv_heads))
        return rows.joined(attention.layer, qkv, attention.q_heads, sinks=attention.sinks)

    def experts(
        self, x: Tensor, logits: Tensor, layer: ExpertsLayer, onto: Tensor | None, rows: ForwardRows
    ) -> Tensor:
        """Add the weighted outputs of the experts that each row's logits [T, E] choose onto a
        tensor [T, H], or return them: x [T, H] -> [T, H]."""
        weights, ids = reference_experts.route(logits, layer.routing)
        return reference_experts.experts(
            x,
            weights,
            ids,
            gate_up=layer.gate_up,
            down=layer.down,
            activate=layer.gate,
            residual=onto,
            complete=layer.routing.held is None,
        )

    def delta_rule(self, x: DeltaInput, layer: int, rows: ForwardRows) -> Tensor:
        """Convolution and gated delta rule over the sequences' states (Yang et al., arXiv
        2412.06464), and the norm after it -> [T, Hv Dv]. layer: index among the recurrent layers.
        """
        plan: RecurrentPlan = rows.recurrent
        spans = plan.groups
        held = plan.stored(layer)
        return gated_mix(x, spans, held, plan.states.spec)

    def block_kernels(self, base: Tensor, dynamic: Tensor) -> BlockKernels:
        """base [2, taps, H], dynamic [T, 2 * taps * G] -> the kernels for `convolve`."""
        return BlockKernels(base, dynamic, whole_kernels(base, dynamic))

    def convolve(
        self,
        x: Tensor,
        kernels: BlockKernels,
        side: int,
        rows: ForwardRows,
        onto: Tensor | None = None,
    ) -> Tensor:
        """Convolve each channel along the rows of each span, and add the result onto a tensor
        [T, H], or return it: x [T, H] -> [T, H]. side: 0 for a sub-layer's input, 1 for its output.

        Tap o reads the row o places before, if that is in the same span.
        """
        count = kernels.base.shape[1]
        taps = kernels.taps[side * count : (side + 1) * count]
        return add_taps(x, taps, rows.missing(count), onto)

    def head(self, x: Tensor, norm: RMSNorm, head: AnyLinear) -> Tensor:
        """Residual stream [R, H], head [V, H] -> logits [R, V], or this rank's columns of them."""
        return self.logits(self.norm(x, norm), head)

    def logits(self, rows: Tensor, head: AnyLinear) -> Tensor:
        """As `head`, from normed rows [R, H]."""
        return self.linear(rows, head)

    def whole(self, logits: Tensor) -> Tensor:
        """This rank's columns of logits -> all columns [R, V]. Whole logits stay as they are."""
        return logits

    def argmax(self, x: Tensor, norm: RMSNorm, head: AnyLinear) -> Tensor:
        """Residual stream [R, H], head [V, H] -> the ids of the largest logits [R]."""
        return argmax(self.head(x, norm, head))

    def best_two(self, x: Tensor, norm: RMSNorm, head: AnyLinear) -> tuple[Tensor, Tensor]:
        """As `argmax`, and the margin of each largest logit over the second largest [R] float32."""
        return self.best_two_of(self.head(x, norm, head))

    def best_two_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As `best_two`, from logits: this rank's columns or all."""
        return best_two(logits)

    def best_of(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Logits [R, V], or this rank's columns of them -> the largest [R, count] float32,
        descending, and their ids [R, count]; of equal logits the lowest ids. count: at most V."""
        return reference_candidates.best_of(logits, count)

    def edges(self, terms: EdgeTerms) -> Tensor:
        """Return the scores of candidates after each candidate before them; see
        `reference_candidates.edges`."""
        return reference_candidates.edges(terms)

    def walk(
        self, edges: Tensor, ids: Tensor, margins: Tensor | None, noise: WalkNoise | None
    ) -> Tensor:
        """Return the tokens [S, K] of the path through candidates ids [S, K, C]; see
        `strobe.sampling.walk`."""
        return walk(edges, ids, margins, noise)

    def context_kv(
        self, kv: Tensor, weights: ContextWeights, rows: ForwardRows
    ) -> tuple[Tensor, Tensor]:
        """A drafter's kv [T, L * 2 * Hkv * D] from its context weights -> normed and rotated keys,
        values [T, L, Hkv, D]."""
        layers, width = weights.gains.shape
        keys, values = kv.view(kv.shape[0], layers, 2, -1, width).unbind(2)
        gains, floor = weights.folded
        cos, sin = rows.angles(0)
        keys = (unit_rms(keys, weights.eps, floor) * gains[:, None]).to(kv.dtype)
        return rotate(keys, (cos[:, None], sin[:, None])), values

    def store_context(
        self, kv: Tensor, weights: ContextWeights, rows: ForwardRows, slots: Tensor, store: KVStore
    ) -> None:
        """Write the outputs of `context_kv` to slots [T] of every layer."""
        store.write_all(slots, *self.context_kv(kv, weights, rows))
