"""The kernels of recurrent layers in plain torch.

Legend: S spans, T rows, P maximum rows that are kept, C channels of the convolution, Hk / Hv key
and value heads, Dk / Dv their sizes, G spans of a group padded to Q rows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.kernels.kept_rows import rows_fit
from strobe.kernels.reference_gates import delta_gates, gated_norm

if TYPE_CHECKING:
    from strobe.kv.states import StateSpec

CHUNK = 64
"""Rows per GEMM when a span has many rows."""
FEW = 16
"""Spans of up to this many rows are computed row by row."""


class DeltaInput(NamedTuple):
    """Rows and weights of a layer. qkv [T, C], gates z [T, Hv Dv] and outputs for rate and time ba
    [T, 2 Hv], of any row stride; the convolution's weight [C, kernel]; a_log, dt_bias [Hv] of the
    gates; gain [Dv] and eps of the norm."""

    qkv: Tensor
    z: Tensor
    ba: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    gain: Tensor
    eps: float


class DeltaSpans(NamedTuple):
    """S spans as the kernels read them, one value each."""

    slots: Tensor
    first_rows: Tensor
    sizes: Tensor
    accepted: Tensor
    """Accepted rows that the state lacks."""
    starts_fresh: Tensor
    """Whether a sequence begins."""


class PaddedGroup(NamedTuple):
    """Spans of similar length: slots, sizes, accepted, starts_fresh [G]; rows [G, Q]; valid [G, Q]:
    rows that are not padding."""

    slots: Tensor
    sizes: Tensor
    accepted: Tensor
    starts_fresh: Tensor
    rows: Tensor
    valid: Tensor


def gated_mix(
    x: DeltaInput, groups: Sequence[PaddedGroup], stored: Sequence[Tensor], spec: StateSpec
) -> Tensor:
    """`mix` with its gates computed, and its outputs normed and gated -> [T, Hv Dv]."""
    decay, rate = delta_gates(x.ba, x.a_log, x.dt_bias)
    out = mix(
        x.qkv,
        decay=decay,
        rate=rate,
        weight=x.conv,
        groups=groups,
        stored=stored,
        spec=spec,
    )
    return gated_norm(out, x.z, x.gain, x.eps)


def mix(
    x: Tensor,
    decay: Tensor,
    rate: Tensor,
    weight: Tensor,
    groups: Sequence[PaddedGroup],
    stored: Sequence[Tensor],
    spec: StateSpec,
) -> Tensor:
    """Run the convolution and the delta rule, and update the stored states.

    x [T, C]: queries, keys and values before the convolution; decay (log) and rate [T, Hv]; weight
    [C, kernel]; stored: one layer's tensors, see `strobe.kernels.recurrent.mix` -> outputs
    [T, Hv, Dv].
    """
    rows = x.shape[0]
    out = x.new_zeros(rows + 1, spec.heads, spec.value_dim)
    for group in groups:
        gates = torch.stack([decay, rate], 1)
        outputs = _mix(x, gates, weight, group=group, stored=stored, spec=spec)
        # Padding goes to one extra row at the end.
        place = torch.where(group.valid, group.rows, rows)
        out.index_copy_(0, place.flatten(), outputs.flatten(0, 1).to(out.dtype))
    return out[:rows]


def _mix(
    x: Tensor,
    gates: Tensor,
    weight: Tensor,
    group: PaddedGroup,
    stored: Sequence[Tensor],
    spec: StateSpec,
) -> Tensor:
    state, window, block_gates, keys, changes = (t.index_select(0, group.slots) for t in stored)
    pending = keys.shape[1]
    before = group.accepted[:, None]
    fits = rows_fit(group.accepted, group.sizes, group.starts_fresh, pending)
    kept = torch.where(fits, group.accepted, 0)[:, None]
    # Mask by value, not by multiplication: another sequence's leftovers may be NaN.
    state = state.masked_fill(group.starts_fresh[:, None, None, None], 0.0)
    index = torch.arange(window.shape[1], device=x.device)
    is_own = (index < spec.kernel - 1 + before) & ~group.starts_fresh[:, None]
    window = window.where(is_own[:, :, None], 0.0)
    block = torch.arange(pending, device=x.device)
    accepted = (block < before)[:, :, None, None]
    held = [rows.where(accepted, 0.0) for rows in (block_gates, keys, changes)]
    current = apply_changes(state, held[0][:, :, 0], _unit(held[1]), held[2])
    fresh = x[group.rows].where(group.valid[:, :, None], 0.0)
    rows = torch.cat([_take(window, index[: spec.kernel - 1] + before), fresh], 1)
    row_gates = gates[group.rows].where(group.valid[:, :, None, None], 0.0)
    q, k, v = split(rows, weight, spec)
    q = _unit(q) * spec.key_dim**-0.5
    out, end, change = delta_rule(current, q, _unit(k), v=v, gates=row_gates)
    long = (group.sizes > pending)[:, None]
    state = torch.where(fits[:, None, None, None], state, current)
    if group.rows.shape[1] > pending:
        state = torch.where(long[..., None, None], end, state)
    moved = before + torch.where(long, group.sizes[:, None], -kept)
    new_window = _append(window, fresh, index + moved, spec.kernel - 1 + before)
    added = (row_gates, k, change)
    new_rows = (_append(old, new, block, kept) for old, new in zip(held, added, strict=True))
    updated = state, new_window, *new_rows
    for tensor, new in zip(stored, updated, strict=True):
        tensor.index_copy_(0, group.slots, new)
    return out


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [G, N, ...], index [G, M] -> [G, M, ...]; indices past the end take the last row."""
    index = index.clamp(max=rows.shape[1] - 1)
    wide = index.view(*index.shape, *[1] * (rows.ndim - 2)).expand(-1, -1, *rows.shape[2:])
    return rows.gather(1, wide)


def _append(old: Tensor, new: Tensor, index: Tensor, count: Tensor) -> Tensor:
    """Join the first `count` [G, 1] rows of old [G, N, ...] and new [G, M, ...], and take the rows
    at index [G, K] of the result."""
    index = index.where(index < count, index + old.shape[1] - count)
    return _take(torch.cat([old, new], 1), index)


def split(x: Tensor, weight: Tensor, spec: StateSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve, apply SiLU and split: x [G, kernel - 1 + N, C], weight [C, kernel] -> queries, keys
    [G, N, Hk, Dk] and values [G, N, Hv, Dv] in fp32."""
    count = x.shape[1] - spec.kernel + 1
    x = x.float()
    taps = weight.float()
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
    """Return the state [G, Hv, Dk, Dv] after N rows with known changes [G, N, Hv, Dv], log decay
    [G, N, Hv] and keys k [G, N, Hk, Dk]. Sums in the same order as `delta_rule`."""
    keep = decay.exp()[..., None, None]
    k = _of_heads(k, state.shape[1])
    for i in range(k.shape[1]):
        state = torch.addcmul(state * keep[:, i], k[:, i, :, :, None], changes[:, i, :, None])
    return state


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gated delta rule (Yang et al., arXiv 2412.06464, equation 10), for each row in turn:
    S <- exp(decay) S; change = rate (v - S^T k); S <- S + k change^T; output = S^T q.

    state [G, Hv, Dk, Dv], q, k [G, N, Hk, Dk], v [G, N, Hv, Dv], gates [G, N, 2, Hv] (log decay,
    rate) -> outputs [G, N, Hv, Dv], the state after the last row, and each row's change
    [G, N, Hv, Dv]. A row with zero gates leaves the state as it is.
    """
    q, k = (_of_heads(part, state.shape[1]) for part in (q, k))
    if q.shape[1] > FEW:
        return _by_chunks(state, q, k, v=v, gates=gates)
    outputs = list[Tensor]()
    changes = list[Tensor]()
    keep = gates[:, :, 0].exp()[..., None, None]
    for i in range(q.shape[1]):
        state = state * keep[:, i]
        error = v[:, i] - (state * k[:, i, :, :, None]).sum(-2)
        change = error * gates[:, i, 1, :, None]
        state = torch.addcmul(state, k[:, i, :, :, None], change[:, :, None])
        outputs.append((state * q[:, i, :, :, None]).sum(-2))
        changes.append(change)
    return torch.stack(outputs, 1), state, torch.stack(changes, 1)


def _by_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`delta_rule` chunk by chunk (section 3.2 there). With c the cumulative decay in a chunk, its
    changes U solve (I + A) U = rate (V - exp(c) K S), A = tril(rate K K^T exp(c_i - c_j), -1). The
    outputs are exp(c) Q S + tril(Q K^T exp(c_i - c_j)) U, and the next state is
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
    inner = (q @ k.mT) * faded
    outer = q * since
    last = total[..., -1:]
    end_decay = last.exp()[..., None]
    ahead = (k * (last - total).exp()[..., None]).mT
    answers = list[Tensor]()
    changes = list[Tensor]()
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
