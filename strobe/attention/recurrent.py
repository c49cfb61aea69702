"""Recurrent layers over states per sequence, beside any attention backend.

Legend: S spans, T rows, P rows that a block may have, C channels of the convolution, Hk / Hv key
and value heads, Dk / Dv their sizes, G spans of a rectangle of Q rows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.attention.base import AttentionBackend, AttentionPlan, Batch, PagedPlan
from strobe.attention.groups import groups_of
from strobe.attention.mask import LayerMask
from strobe.kv.states import StateSpec, StateStore
from strobe.kv.store import KVStore

CHUNK = 64
"""Rows that are taken in by one GEMM, where there are many."""
FEW = 16
"""Up to here rows are taken in one by one."""


class RecurrentBackend:
    """Another backend's attention, and states for the layers that have none."""

    def __init__(self, backend: AttentionBackend, states: StateStore, *, kernels: bool = False):
        """kernels: whether triton's do it, which read rows as they lie."""
        self.backend, self.states, self.kernels = backend, states, kernels

    def plan(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]) -> RecurrentPlan:
        attend = self.backend.plan(batch, store, masks)
        kind = KernelPlan if self.kernels else RecurrentPlan
        return kind(attend, batch, self.states)


class _Rectangle(NamedTuple):
    """Spans of like length: slots, sizes, accepted, fresh [G]; rows [G, Q], those that `valid` says
    belong to their span."""

    slots: Tensor
    sizes: Tensor
    accepted: Tensor
    starts_fresh: Tensor
    rows: Tensor
    valid: Tensor


class RecurrentPlan:
    """One forward in plain torch: the definition of right.

    What a state has taken in and where its span starts say how many rows of the last block were
    accepted; a sequence's first rows find a state of zero, whatever the slot held before.
    """

    def __init__(self, attend: AttentionPlan, batch: Batch, states: StateStore):
        self.attend, self.batch, self.states = attend, batch, states
        self.state_slots, start, sizes = batch.slots, batch.starts, batch.sizes
        self.starts_fresh = start == 0
        num_pending = start - states.length.index_select(0, self.state_slots)
        self.accepted = num_pending.clamp(0, states.pending).masked_fill(self.starts_fresh, 0)
        length = torch.where(sizes > states.pending, start + sizes, start)
        states.length.index_copy_(0, self.state_slots, length)
        self._lay_out()

    def _lay_out(self) -> None:
        batch, device = self.batch, self.state_slots.device
        span_groups = [(torch.arange(len(self.state_slots), device=device), batch.longest)]
        if batch.row_counts:
            groups = groups_of(tuple(batch.row_counts), device)
            span_groups = [(group.spans, group.rows.shape[1]) for group in groups]
        self.rectangles: list[_Rectangle] = []
        for spans, longest in span_groups:
            sizes = batch.sizes[spans]
            offset = torch.arange(longest, device=device)
            rows = batch.row_starts[spans][:, None] + offset
            self.rectangles.append(
                _Rectangle(
                    self.state_slots[spans],
                    sizes,
                    self.accepted[spans],
                    self.starts_fresh[spans],
                    rows.clamp_(max=len(batch.positions) - 1),
                    offset < sizes[:, None],
                )
            )

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """As the attention backend's."""
        return self.attend(layer, q, k, v, sinks)

    def mix(self, layer: int, x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor) -> Tensor:
        """x [T, C], queries, keys and values before the convolution of weight [C, kernel]; decay
        (its logarithm) and rate [T, Hv] -> what the layer's states answer [T, Hv, Dv]."""
        spec, (rows, _) = self.states.spec, x.shape
        out = x.new_zeros(rows + 1, spec.heads, spec.value_dim)
        for part in self.rectangles:
            answers = self._mix(layer, part, x, torch.stack([decay, rate], 1), weight)
            # What fills a rectangle up goes to a row behind all others.
            place = torch.where(part.valid, part.rows, rows)
            out.index_copy_(0, place.flatten(), answers.flatten(0, 1).to(out.dtype))
        return out[:rows]

    def _mix(
        self, layer: int, part: _Rectangle, x: Tensor, gates: Tensor, weight: Tensor
    ) -> Tensor:
        store, spec = self.states, self.states.spec
        held = [every[layer].index_select(0, part.slots) for every in store.tensors]
        state, window, held_gates, keys, changes = held
        # What is not the sequence's own may be anything, and 0 times anything is not always 0.
        state = state.masked_fill(part.starts_fresh[:, None, None, None], 0.0)
        index = torch.arange(window.shape[1], device=x.device)
        is_own = (index < spec.kernel - 1 + part.accepted[:, None]) & ~part.starts_fresh[:, None]
        window = window.where(is_own[:, :, None], 0.0)
        block = torch.arange(store.pending, device=x.device)
        true = (block < part.accepted[:, None])[:, :, None, None]
        held_gates, keys, changes = (rows.where(true, 0.0) for rows in (held_gates, keys, changes))
        state = apply_changes(state, held_gates[:, :, 0], _unit(keys), changes)
        before = torch.arange(spec.kernel - 1, device=x.device) + part.accepted[:, None]
        fresh = x[part.rows].where(part.valid[:, :, None], 0.0)
        rows = torch.cat([_take(window, before), fresh], 1)
        row_gates = gates[part.rows].where(part.valid[:, :, None, None], 0.0)
        q, k, v = split(rows, weight, spec)
        out, end, change = delta_rule(state, _unit(q) * spec.key_dim**-0.5, _unit(k), v, row_gates)
        long = (part.sizes > store.pending)[:, None]
        if part.rows.shape[1] > store.pending:
            state = torch.where(long[..., None, None], end, state)
        first = torch.where(long, part.sizes[:, None], 0)
        store.state[layer].index_copy_(0, part.slots, state)
        store.window[layer].index_copy_(0, part.slots, _take(rows, first + index))
        newest = block.expand(len(rows), -1)
        for every, new in ((store.gates, row_gates), (store.keys, k), (store.changes, change)):
            every[layer].index_copy_(0, part.slots, _take(new, newest))
        return out


class KernelPlan(RecurrentPlan):
    """The same by triton's kernels, beside triton's attention: nothing is padded or gathered."""

    def _lay_out(self) -> None:
        pass

    @property
    def slots(self) -> Tensor:
        return self.batch.kv_slots

    def kv(self, layer: int) -> Tensor:
        return cast(PagedPlan, self.attend).kv(layer)

    def over(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        return cast(PagedPlan, self.attend).over(layer, q, sinks)

    def mix(self, layer: int, x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor) -> Tensor:
        from strobe.kernels.recurrent import mix

        batch, store = self.batch, self.states
        spans = self.state_slots, batch.row_starts, batch.sizes, self.accepted, self.starts_fresh
        held = [every[layer] for every in store.tensors]
        return mix(x, decay, rate, weight, spans, held, batch.longest, store.spec)


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [G, N, ...], index [G, M] -> [G, M, ...], the last one for what lies beyond."""
    index = index.clamp(max=rows.shape[1] - 1)
    wide = index.view(*index.shape, *[1] * (rows.ndim - 2)).expand(-1, -1, *rows.shape[2:])
    return rows.gather(1, wide)


def split(x: Tensor, weight: Tensor, spec: StateSpec) -> tuple[Tensor, Tensor, Tensor]:
    """x [G, kernel - 1 + N, C], weight [C, kernel] -> queries, keys [G, N, Hk, Dk] and values
    [G, N, Hv, Dv] in fp32: SiLU of the convolution."""
    count = x.shape[1] - spec.kernel + 1
    x, taps = x.float(), weight.float()
    y = x[:, :count] * taps[:, 0]
    for j in range(1, spec.kernel):
        y = torch.addcmul(y, x[:, j : j + count], taps[:, j])
    width = spec.key_heads * spec.key_dim
    q, k, v = F.silu(y).split([width, width, spec.heads * spec.value_dim], -1)
    q, k = (part.unflatten(-1, (spec.key_heads, spec.key_dim)) for part in (q, k))
    return q, k, v.unflatten(-1, (spec.heads, spec.value_dim))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """[G, N, Hk, D] -> [G, N, Hv, D]."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def apply_changes(state: Tensor, decay: Tensor, k: Tensor, changes: Tensor) -> Tensor:
    """The state [G, Hv, Dk, Dv] behind rows whose changes [G, N, Hv, Dv] are known: decay (its
    logarithm) [G, N, Hv], k [G, N, Hk, Dk]. The sums are those of `delta_rule`, in its order."""
    keep, k = decay.exp()[..., None, None], _of_heads(k, state.shape[1])
    for i in range(k.shape[1]):
        state = torch.addcmul(state * keep[:, i], k[:, i, :, :, None], changes[:, i, :, None])
    return state


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """state [G, Hv, Dk, Dv], q, k [G, N, Hk, Dk], v [G, N, Hv, Dv], gates [G, N, 2, Hv] ->
    (answers [G, N, Hv, Dv], the state behind all rows, what each row adds to it by its key
    [G, N, Hv, Dv]). A row whose gates are 0 changes nothing.

    S <- exp(decay) S; S <- S + rate k (v - S^T k)^T; the answer is S^T q
    (Yang et al., arXiv 2412.06464, equation 10).
    """
    q, k = (_of_heads(part, state.shape[1]) for part in (q, k))
    if q.shape[1] > FEW:
        return _by_chunks(state, q, k, v, gates)
    answers, changes = list[Tensor](), list[Tensor]()
    keep = gates[:, :, 0].exp()[..., None, None]
    for i in range(q.shape[1]):
        state = state * keep[:, i]
        error = v[:, i] - (state * k[:, i, :, :, None]).sum(-2)
        change = error * gates[:, i, 1, :, None]
        state = torch.addcmul(state, k[:, i, :, :, None], change[:, :, None])
        answers.append((state * q[:, i, :, :, None]).sum(-2))
        changes.append(change)
    return torch.stack(answers, 1), state, torch.stack(changes, 1)


def _by_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, chunk by chunk (section 3.2 there): a chunk's changes U solve (I + A) U = rate (V -
    exp(c) K S), A = tril(rate K K^T exp(c_i - c_j), -1), c the decay summed within the chunk; then
    the answers are exp(c) Q S + tril(Q K^T exp(c_i - c_j)) U, and the state is
    exp(c_end) S + (exp(c_end - c) K)^T U."""
    count = q.shape[1]
    fill = -count % CHUNK
    decay, rate = F.pad(gates, (0, 0, 0, 0, 0, fill)).unbind(2)
    q, k, v = (_chunks(F.pad(part, (0, 0, 0, 0, 0, fill))) for part in (q, k, v))
    decay, rate = (_chunks(part[..., None])[..., 0] for part in (decay, rate))
    total = decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    faded = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    since = total.exp()[..., None]
    system = rate[..., None] * (k @ k.mT) * faded
    right = torch.cat([rate[..., None] * v, rate[..., None] * since * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, old = solved.split([v.shape[-1], k.shape[-1]], -1)
    inner, outer = (q @ k.mT) * faded, q * since
    last = total[..., -1:]
    end_decay, ahead = last.exp()[..., None], (k * (last - total).exp()[..., None]).mT
    answers, changes = list[Tensor](), list[Tensor]()
    for i in range(q.shape[2]):
        change = fresh[:, :, i] - old[:, :, i] @ state
        changes.append(change)
        answers.append(outer[:, :, i] @ state + inner[:, :, i] @ change)
        state = end_decay[:, :, i] * state + ahead[:, :, i] @ change
    outputs, all_changes = (
        torch.cat(parts, 2).transpose(1, 2)[:, :count] for parts in (answers, changes)
    )
    return outputs, state, all_changes


def _chunks(x: Tensor) -> Tensor:
    """[G, N, Hv, D] -> [G, Hv, N / CHUNK, CHUNK, D]."""
    return x.transpose(1, 2).unflatten(2, (-1, CHUNK))
