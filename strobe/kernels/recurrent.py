# pyright: basic, reportCallIssue=false
"""Recurrent layers: convolution, gated delta rule and what is kept of a block, span by span.

Up to 16 rows are answered at once (Yang et al., arXiv 2412.06464, section 3.2): with the rates b,
unit keys K, and c the decay summed up to each row, the changes U solve (I + A) U = b (V - e^c K S),
A = tril(b K K^T e^(c_i - c_j), -1). The answers are e^c Q S + tril(Q K^T e^(c_i - c_j)) U, and the
state behind them is e^c_end S + (e^(c_end - c) K)^T U. So a state is read once for all of them. No
row's change depends on later rows: K and U are kept, and the next forward takes in those accepted.

Legend: S spans, T rows, P rows that a block may have, C channels of the convolution, Hk / Hv key
and value heads, Dk / Dv their sizes, N slots. The torch twin is
`strobe.attention.recurrent.RecurrentPlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.pdl import pdl_wait, supports_pdl

if TYPE_CHECKING:
    from strobe.kv.states import StateSpec

_ROWS = 8
_CHANNELS = 256
_WARPS = 4  # of a program that answers


def values_of(count: int) -> int:
    """A program's share of a head's values; few sequences need more programs."""
    return 32 if count < 4 else 64


@triton.jit
def _convolve_kernel(
    x, weight, window, slots, firsts, sizes, accepted, fresh, out,
    P: tl.constexpr, C: tl.constexpr, KERNEL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution of the span's rows."""
    pdl_wait(PDL)
    span = tl.program_id(0)
    lanes = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < C
    size, first, taken = tl.load(sizes + span), tl.load(firsts + span), tl.load(accepted + span)
    held = tl.load(fresh + span) == 0
    window += tl.load(slots + span) * (KERNEL - 1 + P) * C + lanes
    x += first * C + lanes
    begin = tl.program_id(1) * ROWS
    for row in range(begin, tl.minimum(begin + ROWS, size)):
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(KERNEL):
            back = row - (KERNEL - 1) + tap
            if back >= 0:
                value = tl.load(x + back * C, inside, other=0.0)
            else:
                at = taken + back + KERNEL - 1
                value = tl.load(window + at * C, inside & held, other=0.0)
            scale = tl.load(weight + lanes * KERNEL + tap, inside, other=0.0)
            total += value.to(tl.float32) * scale.to(tl.float32)
        tl.store(out + (first + row) * C + lanes, total * tl.sigmoid(total), inside)


@triton.jit
def _unit(x, AXIS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) + 1e-6)


@triton.jit
def _part(rows, row, there, lanes, some, C: tl.constexpr):
    """Some lanes [D] of rows [R], zeros where none is."""
    mask = there[:, None] & some[None, :]
    return tl.load(rows + row[:, None] * C + lanes[None, :], mask, other=0.0)


@triton.jit
def _inverse(a):
    """(I + a)^-1 of a strictly lower triangular a [16, 16]: first within blocks of 4, then over
    these. Powers of a itself grow into thousands and cancel where keys are alike."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    one = tl.where(i == j, 1.0, 0.0)
    inner = tl.where(i // 4 == j // 4, a, 0.0)
    inside = one - inner
    inside += tl.dot(inside, tl.dot(inner, inner, input_precision="ieee"), input_precision="ieee")
    outer = tl.dot(inside, a - inner, input_precision="ieee")
    across = one - outer
    across += tl.dot(across, tl.dot(outer, outer, input_precision="ieee"), input_precision="ieee")
    return tl.dot(across, inside, input_precision="ieee")


@triton.jit
def _changes(state, k, v, decay, rate, PRECISION: tl.constexpr):
    """What 16 rows k [16, Dk], v [16, Dv] add to the state by their keys, [16, Dv]; the decay up to
    each of them [16], and what is left from each at each later one [16, 16]."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    total = tl.cumsum(decay, 0)
    left = tl.where(i >= j, tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    system = tl.where(i > j, rate[:, None] * left * alike, 0.0)
    known = tl.exp(total)[:, None] * tl.dot(k, state, input_precision=PRECISION)
    right = rate[:, None] * (v - known)
    return tl.dot(_inverse(system), right, input_precision=PRECISION), total, left


@triton.jit
def _taken_in(state, k, changes, decay, total, PRECISION: tl.constexpr):
    """The state behind 16 rows."""
    end = tl.sum(decay, 0)
    rest = changes * tl.exp(end - total)[:, None]
    return state * tl.exp(end) + tl.dot(tl.trans(k), rest, input_precision=PRECISION)


@triton.jit
def _delta_kernel(
    rows, decay, rate, state, gates, held_keys, changes, slots, firsts, sizes, accepted, fresh, out,
    P: tl.constexpr, C: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SINGLE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of one head's state: what was accepted is taken in, then the span's rows answer, 16 at
    once, or one by one where spans are SINGLE rows."""
    pdl_wait(PDL)
    span, head = tl.program_id(0), tl.program_id(1)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    some, these = keys < DK, values < DV
    slot, first = tl.load(slots + span), tl.load(firsts + span)
    size, taken = tl.load(sizes + span).to(tl.int32), tl.load(accepted + span).to(tl.int32)
    held = tl.load(fresh + span) == 0
    place = state + (slot * HV + head) * (DK * DV) + (keys[:, None] * DV + values[None, :])
    both = some[:, None] & these[None, :]
    now = tl.load(place, both & held, other=0.0)
    key = head // (HV // HK)
    at_q, at_k, at_v = key * DK + keys, (HK + key) * DK + keys, 2 * HK * DK + head * DV + values
    rows, gates = rows + first * C, gates + slot * P * 2 * HV + head
    held_keys += slot * P * (HK * DK) + key * DK
    changes += slot * P * (HV * DV) + head * DV
    decay, rate = decay + first * HV + head, rate + first * HV + head
    out += (first * HV + head) * DV
    if SINGLE:
        for i in range(taken):
            k = _unit(tl.load(held_keys + i * (HK * DK) + keys, some, other=0.0), 0)
            change = tl.load(changes + i * (HV * DV) + values, these, other=0.0)
            now = now * tl.exp(tl.load(gates + i * 2 * HV)) + k[:, None] * change[None, :]
        tl.store(place, now, both)
        if size > 0:
            k = _unit(tl.load(rows + at_k, some, other=0.0), 0)
            q = _unit(tl.load(rows + at_q, some, other=0.0), 0) * (DK**-0.5)
            v = tl.load(rows + at_v, these, other=0.0)
            now *= tl.exp(tl.load(decay))
            change = (v - tl.sum(now * k[:, None], 0)) * tl.load(rate)
            now += k[:, None] * change[None, :]
            tl.store(out + values, tl.sum(now * q[:, None], 0), these)
            tl.debug_barrier()  # all have read what was kept
            tl.store(changes + values, change, these)
    else:
        offset = tl.arange(0, 16)
        for begin in range(0, taken, 16):
            row, there = begin + offset, begin + offset < taken
            k = _unit(_part(held_keys, row, there, keys, some, HK * DK), 1)
            change = _part(changes, row, there, values, these, HV * DV)
            fade = tl.load(gates + row * 2 * HV, there, other=0.0)
            now = _taken_in(now, k, change, fade, tl.cumsum(fade, 0), PRECISION)
        if size <= P:
            tl.store(place, now, both)
        tl.debug_barrier()  # all have read what was kept
        for begin in range(0, size, 16):
            row, there = begin + offset, begin + offset < size
            k = _unit(_part(rows, row, there, at_k, some, C), 1)
            q = _unit(_part(rows, row, there, at_q, some, C), 1) * (DK**-0.5)
            v = _part(rows, row, there, at_v, these, C)
            fade = tl.load(decay + row * HV, there, other=0.0)
            by = tl.load(rate + row * HV, there, other=0.0)
            change, total, left = _changes(now, k, v, fade, by, PRECISION)
            alike = tl.dot(q, tl.trans(k), input_precision=PRECISION) * left
            answer = tl.exp(total)[:, None] * tl.dot(q, now, input_precision=PRECISION)
            answer += tl.dot(alike, change, input_precision=PRECISION)
            at = row[:, None] * (HV * DV) + values[None, :]
            tl.store(out + at, answer, there[:, None] & these[None, :])
            if size <= P:
                tl.store(changes + at, change, there[:, None] & these[None, :])
            if (size > P) | (begin + 16 < size):
                now = _taken_in(now, k, change, fade, total, PRECISION)
        if size > P:
            tl.store(place, now, both)


@triton.jit
def _keep_kernel(
    x, rows, decay, rate, window, gates, held_keys, slots, firsts, sizes, accepted, fresh,
    P: tl.constexpr, C: tl.constexpr, KERNEL: tl.constexpr, HV: tl.constexpr, KEYS: tl.constexpr,
    TAPS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What the next forward needs of the span's rows: the convolution's inputs, the gates, and the
    KEYS channels of its keys, which stand behind those of the queries. A program reads what it
    needs of the window before it overwrites it: its rows move forward."""
    pdl_wait(PDL)
    span = tl.program_id(0)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < C
    slot, first, size = tl.load(slots + span), tl.load(firsts + span), tl.load(sizes + span)
    taken, held = tl.load(accepted + span), tl.load(fresh + span) == 0
    window += slot * (KERNEL - 1 + P) * C + lanes
    x += first * C + lanes
    skipped = tl.where(size > P, size, 0)
    at = tl.arange(0, TAPS)[:, None]
    back = skipped - (KERNEL - 1) + at
    true = (at < KERNEL - 1) & inside[None, :]
    value = tl.load(x[None, :] + back * C, true & (back >= 0), other=0.0)
    source = window[None, :] + (taken + back + KERNEL - 1) * C
    before = tl.load(source, true & held & (back < 0), other=0.0)
    tl.debug_barrier()  # or a thread might overwrite what another has yet to read
    tl.store(window[None, :] + at * C, tl.where(back >= 0, value, before), true)
    if size <= P:
        for i in range(size):
            newest = tl.load(x + i * C, inside, other=0.0)
            tl.store(window + (KERNEL - 1 + i) * C, newest, inside)
        own = (lanes >= KEYS) & (lanes < 2 * KEYS)
        for i in range(size):
            key = tl.load(rows + (first + i) * C + lanes, own, other=0.0)
            tl.store(held_keys + (slot * P + i) * KEYS + lanes - KEYS, key, own)
        if tl.program_id(1) == 0:
            heads = tl.arange(0, HEADS)
            spots, real = gates + slot * P * 2 * HV + heads, heads < HV
            for j in range(size):
                row = (first + j) * HV + heads
                tl.store(spots + j * 2 * HV, tl.load(decay + row, real), real)
                tl.store(spots + (j * 2 + 1) * HV, tl.load(rate + row, real), real)


def mix(
    x: Tensor,
    decay: Tensor,
    rate: Tensor,
    weight: Tensor,
    spans: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    held: Sequence[Tensor],
    longest: int,
    spec: StateSpec,
) -> Tensor:
    """x [T, C], decay, rate [T, Hv] float32, weight [C, kernel], spans (slots, first rows, sizes,
    rows accepted of the last block, whether a sequence begins) [S] -> answers [T, Hv, Dv].

    held: state [N, Hv, Dk, Dv], window [N, kernel - 1 + P, C], gates [N, P, 2, Hv], keys [N, P,
    Hk, Dk] and changes [N, P, Hv, Dv], in float32 but the window; all are brought up to date.
    longest: no span has more rows.
    """
    state, window, gates, keys, changes = held
    rows, block = x.shape[0], gates.shape[1]
    x, weight, decay, rate = (part.contiguous() for part in (x, weight, decay, rate))
    count = spans[0].shape[0]
    convolved = torch.empty(rows, spec.channels, dtype=torch.float32, device=x.device)
    out = torch.zeros(rows, spec.heads, spec.value_dim, dtype=x.dtype, device=x.device)
    pdl = supports_pdl(x.device)
    shared = {"P": block, "C": spec.channels, "PDL": pdl, "launch_pdl": pdl}
    wide = triton.cdiv(spec.channels, _CHANNELS)
    _convolve_kernel[(count, triton.cdiv(longest, _ROWS), wide)](
        x, weight, window, *spans, convolved,
        KERNEL=spec.kernel, ROWS=_ROWS, BLOCK=_CHANNELS, num_warps=2, **shared,
    )  # fmt: skip
    values = values_of(count)
    _delta_kernel[(count, spec.heads, triton.cdiv(spec.value_dim, values))](
        convolved, decay, rate, state, gates, keys, changes, *spans, out,
        HK=spec.key_heads, HV=spec.heads, DK=spec.key_dim, DV=spec.value_dim,
        KEYS=max(16, triton.next_power_of_2(spec.key_dim)), VALUES=values,
        SINGLE=longest == 1,
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
        num_warps=_WARPS, num_stages=1, **shared,
    )  # fmt: skip
    _keep_kernel[(count, wide)](
        x, convolved, decay, rate, window, gates, keys, *spans,
        KERNEL=spec.kernel, HV=spec.heads, KEYS=spec.key_heads * spec.key_dim,
        TAPS=triton.next_power_of_2(spec.kernel - 1), HEADS=triton.next_power_of_2(spec.heads),
        BLOCK=_CHANNELS, num_warps=2, **shared,
    )  # fmt: skip
    return out
