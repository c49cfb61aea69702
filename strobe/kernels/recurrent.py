# pyright: basic, reportCallIssue=false
"""Recurrent layers in three launches: convolution and gates; the gated delta rule; the norm of its
outputs, and saving the rows for later forwards. With single rows the rule convolves them itself.

Up to 16 rows are computed at once (Yang et al., arXiv 2412.06464, section 3.2), so that the state S
is read once for all of them. With rates b, unit keys K and cumulative decay c, the changes U solve
(I + A) U = b (V - e^c K S), A = tril(b K K^T e^(c_i - c_j), -1). The outputs are e^c Q S +
tril(Q K^T e^(c_i - c_j)) U, and the next state is e^c_end S + (e^(c_end - c) K)^T U. A row's change
does not depend on later rows, so K and U are saved and later forwards apply the accepted ones. The
state itself is not written while there is room for a forward's rows next to those.

Legend: S spans, T rows, P maximum rows that are saved, C channels of the convolution, Hk / Hv key
and value heads, Dk / Dv their sizes, N slots. The torch twin is
`strobe.kernels.reference_recurrent.gated_mix`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.rowwise import round_to
from strobe.kernels.step_bookkeeping import rows_fit

if TYPE_CHECKING:
    from strobe.kernels.reference_recurrent import DeltaInput, DeltaSpans
    from strobe.kv.states import StateSpec

_ROWS = 16
_CHANNELS = 128
_HEADS = 4  # of a program of the norm


def tile(count: int, longest: int) -> tuple[int, int]:
    """Return a program's value channels, fewer for few sequences, and warps for the delta rule."""
    return (32, 4) if count < 4 else (64, 2 if longest == 1 else 4)


@triton.jit
def _gates(ba, a_log, dt_bias, head, mask, at, HV: tl.constexpr):
    """Return the log decay and the rate of heads. at: place of their rates' inputs in ba."""
    b = tl.load(ba + at, mask, 0.0).to(tl.float32)
    time = tl.load(ba + HV + at, mask, 0.0).to(tl.float32)
    time += tl.load(dt_bias + head, mask, 0.0).to(tl.float32)
    # log(1 + e^t) without overflow
    time = tl.maximum(time, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(time)))
    scale = tl.exp(tl.load(a_log + head, mask, 0.0).to(tl.float32))
    return -scale * time, 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def _history(before, weight, lanes, mask, C: tl.constexpr, KERNEL: tl.constexpr):
    """Return the part of a row's convolution that comes from the rows before it."""
    total = tl.zeros(lanes.shape, tl.float32)
    for tap in tl.static_range(KERNEL - 1):
        value = tl.load(before + tap * C + lanes, mask, other=0.0).to(tl.float32)
        total += value * tl.load(weight + lanes * KERNEL + tap, mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _convolved(total, x, weight, lanes, mask, KERNEL: tl.constexpr):
    """Add the row x itself to its convolution, and apply SiLU."""
    value = tl.load(x + lanes, mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + lanes * KERNEL + KERNEL - 1, mask, other=0.0).to(tl.float32)
    total += value * scale
    return total * tl.sigmoid(total)


@triton.jit
def _convolve_kernel(
    x, ba, weight, a_log, dt_bias, window, slots, firsts, sizes, accepted, fresh, out, decay, rate,
    x_stride, ba_stride,
    P: tl.constexpr, C: tl.constexpr, KERNEL: tl.constexpr, HV: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve a span's rows and apply SiLU; the last program of the rows computes their gates."""
    span = tl.program_id(0)
    begin = tl.program_id(1) * ROWS
    size = tl.load(sizes + span)
    first = tl.load(firsts + span)
    place = tl.load(slots + span) * (KERNEL - 1 + P) + tl.load(accepted + span)
    continues = tl.load(fresh + span) == 0
    pdl_wait(PDL)
    if tl.program_id(2) == tl.num_programs(2) - 1:
        row = begin + tl.arange(0, ROWS)[:, None]
        head = tl.arange(0, HEADS)[None, :]
        real = (row < size) & (head < HV)
        at = (first + row) * ba_stride + head
        row_decay, row_rate = _gates(ba, a_log, dt_bias, head, real, at, HV)
        tl.store(decay + (first + row) * HV + head, row_decay, real)
        tl.store(rate + (first + row) * HV + head, row_rate, real)
    else:
        lanes = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        i = begin + tl.arange(0, ROWS)
        inside = (i < size)[:, None] & (lanes < C)[None, :]
        before = window + place * C
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for tap in tl.static_range(KERNEL):
            source = (i - (KERNEL - 1) + tap)[:, None]
            at_x = (first + source) * x_stride + lanes[None, :]
            value = tl.load(x + at_x, inside & (source >= 0), other=0.0)
            at_window = (source + KERNEL - 1) * C + lanes[None, :]
            old = tl.load(before + at_window, inside & (source < 0) & continues, other=0.0)
            scale = tl.load(weight + lanes * KERNEL + tap, lanes < C, other=0.0).to(tl.float32)
            total += tl.where(source >= 0, value, old).to(tl.float32) * scale[None, :]
        at_out = (first + i)[:, None] * C + lanes[None, :]
        tl.store(out + at_out, total * tl.sigmoid(total), inside)


@triton.jit
def _unit(x, AXIS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) + 1e-6)


@triton.jit
def _part(rows, row, row_mask, lanes, lane_mask, C: tl.constexpr):
    """Load lanes [D] of rows [R], zero where a mask is False."""
    mask = row_mask[:, None] & lane_mask[None, :]
    return tl.load(rows + row[:, None] * C + lanes[None, :], mask, other=0.0)


@triton.jit
def _inverse(a):
    """Return (I + a)^-1 of a strictly lower triangular a [16, 16]: first within blocks of 4, then
    across them. With similar keys, powers of a itself would grow into thousands and cancel."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    identity = tl.where(i == j, 1.0, 0.0)
    inner = tl.where(i // 4 == j // 4, a, 0.0)
    inside = identity - inner
    inside += tl.dot(inside, tl.dot(inner, inner, input_precision="ieee"), input_precision="ieee")
    outer = tl.dot(inside, a - inner, input_precision="ieee")
    across = identity - outer
    across += tl.dot(across, tl.dot(outer, outer, input_precision="ieee"), input_precision="ieee")
    return tl.dot(across, inside, input_precision="ieee")


@triton.jit
def _changes(state, k, v, decay, rate, PRECISION: tl.constexpr):
    """Return the changes [16, Dv] of 16 rows k [16, Dk], v [16, Dv], the cumulative log decay [16],
    and the decay from row j to row i [16, 16]."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    total = tl.cumsum(decay, 0)
    remaining = tl.where(i >= j, tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
    similarity = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    system = tl.where(i > j, rate[:, None] * remaining * similarity, 0.0)
    known = tl.exp(total)[:, None] * tl.dot(k, state, input_precision=PRECISION)
    target = rate[:, None] * (v - known)
    return tl.dot(_inverse(system), target, input_precision=PRECISION), total, remaining


@triton.jit
def _apply_changes(state, k, changes, decay, total, PRECISION: tl.constexpr):
    """Return the state after 16 rows."""
    end = tl.sum(decay, 0)
    rest = changes * tl.exp(end - total)[:, None]
    return state * tl.exp(end) + tl.dot(tl.trans(k), rest, input_precision=PRECISION)


@triton.jit
def _delta_kernel(
    x, ba, weight, a_log, dt_bias, window, rows, decay, rate, state, gates, saved_keys, changes,
    slots, firsts, sizes, accepted, fresh, out, x_stride, ba_stride,
    P: tl.constexpr, C: tl.constexpr, KERNEL: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SINGLE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply to VALUES channels of one head's state the accepted rows that it lacks, then compute
    the span's rows, 16 at once; without tensor cores if every span is a SINGLE row, which is
    convolved here, and whose key and gates are written to rows, decay and rate."""
    span = tl.program_id(0)
    head = tl.program_id(1)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    key_mask = keys < DK
    value_mask = values < DV
    slot = tl.load(slots + span)
    first = tl.load(firsts + span)
    size = tl.load(sizes + span).to(tl.int32)
    num_accepted = tl.load(accepted + span).to(tl.int32)
    continues = tl.load(fresh + span) == 0
    fits = rows_fit(continues, num_accepted, size, P)
    kept = tl.where(fits, num_accepted, 0)
    place = state + (slot * HV + head) * (DK * DV) + (keys[:, None] * DV + values[None, :])
    both = key_mask[:, None] & value_mask[None, :]
    current = tl.load(place, both & continues, other=0.0)
    # All that the last forward saved is read, and the state written, before the previous kernel
    # ends: only forwards use them.
    key = head // (HV // HK)
    at_q = key * DK + keys
    at_k = (HK + key) * DK + keys
    at_v = 2 * HK * DK + head * DV + values
    rows = rows + first * C
    gates = gates + slot * P * 2 * HV + head
    saved_keys += slot * P * (HK * DK) + key * DK
    changes += slot * P * (HV * DV) + head * DV
    decay = decay + first * HV + head
    rate = rate + first * HV + head
    out += (first * HV + head) * DV
    if SINGLE:
        live = size > 0
        before = window + (slot * (KERNEL - 1 + P) + num_accepted) * C
        old_k = _history(before, weight, at_k, key_mask & live & continues, C, KERNEL)
        old_q = _history(before, weight, at_q, key_mask & live & continues, C, KERNEL)
        old_v = _history(before, weight, at_v, value_mask & live & continues, C, KERNEL)
        for i in range(num_accepted):
            last = _unit(tl.load(saved_keys + i * (HK * DK) + keys, key_mask, other=0.0), 0)
            change = tl.load(changes + i * (HV * DV) + values, value_mask, other=0.0)
            current *= tl.exp(tl.load(gates + i * 2 * HV))
            current += last[:, None] * change[None, :]
        if not fits:
            tl.store(place, current, both)
        pdl_wait(PDL)
        x += first * x_stride
        k = _convolved(old_k, x, weight, at_k, key_mask & live, KERNEL)
        q = _convolved(old_q, x, weight, at_q, key_mask & live, KERNEL)
        v = _convolved(old_v, x, weight, at_v, value_mask & live, KERNEL)
        row_decay, row_rate = _gates(ba, a_log, dt_bias, head, live, first * ba_stride + head, HV)
        if tl.program_id(2) == 0:
            tl.store(rows + at_k, k, key_mask & live & (head % (HV // HK) == 0))
            tl.store(decay, row_decay, live)
            tl.store(rate, row_rate, live)
        k = _unit(k, 0)
        q = _unit(q, 0) * (DK**-0.5)
        keep = tl.exp(row_decay)
        current *= keep
        newest = (v - tl.sum(current * k[:, None], 0)) * row_rate
        current += k[:, None] * newest[None, :]
        tl.store(out + values, tl.sum(current * q[:, None], 0), value_mask & live)
        tl.debug_barrier()  # all threads have read the last block
        tl.store(changes + kept * (HV * DV) + values, newest, value_mask & live)
    else:
        offset = tl.arange(0, 16)
        for begin in range(0, num_accepted, 16):
            row = begin + offset
            row_mask = begin + offset < num_accepted
            k = _unit(_part(saved_keys, row, row_mask, keys, key_mask, HK * DK), 1)
            change = _part(changes, row, row_mask, values, value_mask, HV * DV)
            log_decay = tl.load(gates + row * 2 * HV, row_mask, other=0.0)
            current = _apply_changes(
                current, k, change, log_decay, tl.cumsum(log_decay, 0), PRECISION
            )
        if (size <= P) & (not fits):
            tl.store(place, current, both)
        tl.debug_barrier()  # all threads have read the last block
        pdl_wait(PDL)
        for begin in range(0, size, 16):
            row = begin + offset
            row_mask = begin + offset < size
            k = _unit(_part(rows, row, row_mask, at_k, key_mask, C), 1)
            q = _unit(_part(rows, row, row_mask, at_q, key_mask, C), 1) * (DK**-0.5)
            v = _part(rows, row, row_mask, at_v, value_mask, C)
            log_decay = tl.load(decay + row * HV, row_mask, other=0.0)
            row_rate = tl.load(rate + row * HV, row_mask, other=0.0)
            change, total, remaining = _changes(current, k, v, log_decay, row_rate, PRECISION)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * remaining
            output = tl.exp(total)[:, None] * tl.dot(q, current, input_precision=PRECISION)
            output += tl.dot(scores, change, input_precision=PRECISION)
            at = row[:, None] * (HV * DV) + values[None, :]
            tl.store(out + at, output, row_mask[:, None] & value_mask[None, :])
            if size <= P:
                at += kept * (HV * DV)
                tl.store(changes + at, change, row_mask[:, None] & value_mask[None, :])
            if (size > P) | (begin + 16 < size):
                current = _apply_changes(current, k, change, log_decay, total, PRECISION)
        if size > P:
            tl.store(place, current, both)


@triton.jit
def _norm(
    x, z, gain, out, z_stride, eps, row, live, part,
    HV: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, VALUES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x / rms(x) * gain * silu(z) of a row's GROUP heads; 0 if the row is not live."""
    head = part * GROUP + tl.arange(0, GROUP)
    at = tl.arange(0, VALUES)
    inside = (head < HV)[:, None] & (at < DV)[None, :]
    place = head[:, None] * DV + at[None, :]
    logit = tl.load(z + row * z_stride + place, inside & live, 0.0).to(tl.float32)
    scale = tl.load(gain + at, at < DV, 0.0).to(tl.float32)[None, :]
    pdl_wait(PDL)
    value = tl.load(x + row * (HV * DV) + place, inside & live, 0.0).to(tl.float32)
    unit = tl.rsqrt(tl.sum(value * value, 1) / DV + eps)[:, None]
    y = value * unit * scale * (logit / (1.0 + tl.exp(-logit)))
    tl.store(out + row * (HV * DV) + place, round_to(y, out.dtype.element_ty), inside)


@triton.jit
def _save(
    x, rows, decay, rate, window, gates, saved_keys, x_stride, slot, first, size, num_accepted,
    continues, part, P: tl.constexpr, C: tl.constexpr, KERNEL: tl.constexpr, HV: tl.constexpr,
    KEYS: tl.constexpr, TAPS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Save what the next forward needs of BLOCK channels of a span: the convolution's inputs, the
    gates and the keys, which are the KEYS channels after the queries. The window moves forward in
    place with the state, so a program reads all it needs of it before it writes."""
    lanes = part * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < C
    window += slot * (KERNEL - 1 + P) * C + lanes
    x += first * x_stride + lanes
    skipped = tl.where(size > P, size, 0)
    kept = tl.where(rows_fit(continues, num_accepted, size, P), num_accepted, 0)
    at = tl.arange(0, TAPS)[:, None]
    back = skipped - (KERNEL - 1) + at
    tap_mask = (at < KERNEL - 1) & inside[None, :]
    value = tl.load(x[None, :] + back * x_stride, tap_mask & (back >= 0), other=0.0)
    source = window[None, :] + (num_accepted - kept + back + KERNEL - 1) * C
    before = tl.load(source, tap_mask & continues & (back < 0), other=0.0)
    pdl_wait(PDL)
    tl.debug_barrier()  # all threads have read the window
    tl.store(window[None, :] + at * C, tl.where(back >= 0, value, before), tap_mask)
    if size <= P:
        key_mask = ((lanes >= KEYS) & (lanes < 2 * KEYS))[None, :]
        heads = tl.arange(0, HEADS)[None, :]
        for begin in range(0, size, ROWS):
            i = begin + tl.arange(0, ROWS)[:, None]
            real = (i < size) & inside[None, :]
            newest = tl.load(x[None, :] + i * x_stride, real, other=0.0)
            tl.store(window[None, :] + (KERNEL - 1 + kept + i) * C, newest, real)
            key = tl.load(rows + (first + i) * C + lanes[None, :], real & key_mask, other=0.0)
            place = (slot * P + kept + i) * KEYS + (lanes - KEYS)[None, :]
            tl.store(saved_keys + place, key, real & key_mask)
            gated = (i < size) & (heads < HV) & (part == 0)
            row_gates = (first + i) * HV + heads
            spot = (slot * P + kept + i) * 2 * HV + heads
            tl.store(gates + spot, tl.load(decay + row_gates, gated), gated)
            tl.store(gates + spot + HV, tl.load(rate + row_gates, gated), gated)


@triton.jit(do_not_specialize=["count", "num_norms"])
def _finish_kernel(
    x, rows, decay, rate, window, gates, saved_keys, slots, firsts, sizes, accepted, fresh,
    outputs, z, gain, normed, x_stride, z_stride, eps, count, num_norms,
    P: tl.constexpr, C: tl.constexpr, KERNEL: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, TAPS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, VALUES: tl.constexpr, SPANS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm the outputs in the first programs, save the spans in the others. Before the rule's
    launch ends, only what it does not write is read."""
    PARTS: tl.constexpr = (HV + GROUP - 1) // GROUP
    WIDE: tl.constexpr = (C + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    if program < num_norms:
        row = (program // PARTS).to(tl.int64)
        every = tl.arange(0, SPANS)
        live = row < tl.sum(tl.load(sizes + every, every < count, 0), 0)
        part = program % PARTS
        _norm(outputs, z, gain, normed, z_stride, eps, row, live, part, HV, DV, GROUP, VALUES, PDL)
    else:
        span = (program - num_norms) // WIDE
        _save(
            x, rows, decay, rate, window, gates, saved_keys, x_stride, tl.load(slots + span),
            tl.load(firsts + span), tl.load(sizes + span), tl.load(accepted + span),
            tl.load(fresh + span) == 0, (program - num_norms) % WIDE,
            P, C, KERNEL, HV, KEYS, TAPS, HEADS, ROWS, BLOCK, PDL,
        )  # fmt: skip


def mix(
    x: DeltaInput,
    spans: DeltaSpans,
    stored: Sequence[Tensor],
    longest: int,
    spec: StateSpec,
) -> Tensor:
    """Rows of spans -> normed and gated outputs [T, Hv Dv], 0 for rows after the spans'.

    stored, updated in place: state [N, Hv, Dk, Dv], window [N, kernel - 1 + P, C], gates
    [N, P, 2, Hv], keys [N, P, Hk, Dk] and changes [N, P, Hv, Dv]; all in float32 but the window.
    longest: maximum rows of a span.
    """
    state, window, gates, keys, changes = stored
    rows = x.qkv.shape[0]
    count = spans.slots.shape[0]
    heads = spec.heads
    floats = x.qkv.new_empty(rows * (spec.channels + 2 * heads), dtype=torch.float32)
    convolved, decay, rate = floats.split([rows * n for n in (spec.channels, heads, heads)])
    out, normed = x.qkv.new_empty((2, rows, heads * spec.value_dim))
    pdl = supports_pdl(x.qkv.device)
    shared = {"P": gates.shape[1], "C": spec.channels, "HV": heads, "PDL": pdl, "launch_pdl": pdl}
    shared["KERNEL"] = spec.kernel
    width = triton.next_power_of_2(heads)
    assert x.conv.is_contiguous()  # a copy would be the launch before the rule's
    if longest > 1:
        wide = triton.cdiv(spec.channels, _CHANNELS)
        _convolve_kernel[(count, triton.cdiv(longest, _ROWS), wide + 1)](
            x.qkv,
            x.ba,
            x.conv,
            x.a_log,
            x.dt_bias,
            window,
            spans.slots,
            spans.first_rows,
            spans.sizes,
            spans.accepted,
            spans.starts_fresh,
            convolved,
            decay,
            rate,
            x.qkv.stride(0),
            x.ba.stride(0),
            HEADS=width,
            ROWS=_ROWS,
            BLOCK=_CHANNELS,
            num_warps=4,
            **shared,
        )
    values, warps = tile(count, longest)
    _delta_kernel[(count, heads, triton.cdiv(spec.value_dim, values))](
        x.qkv,
        x.ba,
        x.conv,
        x.a_log,
        x.dt_bias,
        window,
        convolved,
        decay,
        rate,
        state,
        gates,
        keys,
        changes,
        spans.slots,
        spans.first_rows,
        spans.sizes,
        spans.accepted,
        spans.starts_fresh,
        out,
        x.qkv.stride(0),
        x.ba.stride(0),
        HK=spec.key_heads,
        DK=spec.key_dim,
        DV=spec.value_dim,
        KEYS=max(16, triton.next_power_of_2(spec.key_dim)),
        VALUES=values,
        SINGLE=longest == 1,
        PRECISION="tf32x3" if out.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=1,
        **shared,
    )
    num_norms = rows * triton.cdiv(heads, _HEADS)
    taps = triton.next_power_of_2(spec.kernel - 1)
    size = min(_ROWS, triton.next_power_of_2(gates.shape[1]))
    block = _ROWS * _CHANNELS // max(size, taps)
    _finish_kernel[(num_norms + count * triton.cdiv(spec.channels, block),)](
        x.qkv,
        convolved,
        decay,
        rate,
        window,
        gates,
        keys,
        spans.slots,
        spans.first_rows,
        spans.sizes,
        spans.accepted,
        spans.starts_fresh,
        out,
        x.z,
        x.gain,
        normed,
        x.qkv.stride(0),
        x.z.stride(0),
        x.eps,
        count,
        num_norms,
        DV=spec.value_dim,
        KEYS=spec.key_heads * spec.key_dim,
        TAPS=taps,
        HEADS=width,
        ROWS=size,
        BLOCK=block,
        GROUP=_HEADS,
        VALUES=triton.next_power_of_2(spec.value_dim),
        SPANS=triton.next_power_of_2(count),
        num_warps=4,
        **shared,
    )
    return normed
