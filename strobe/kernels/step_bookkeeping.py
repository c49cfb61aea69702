# pyright: basic, reportCallIssue=false
"""A step's bookkeeping on the device: the rows' positions and K/V slots, and accepting drafts.

Legend: S spans, T rows, K drafts per span, W rows of a span with logits. The torch twins are
listed in `strobe.runner.step_ops`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.kept_rows import SINGLE_ROWS
from strobe.kernels.pdl import pdl_wait, supports_pdl

_BLOCK = 128
_SINGLE_ROWS = tl.constexpr(SINGLE_ROWS)


@triton.jit
def rows_fit(continues, accepted, size, P: tl.constexpr):
    """Whether a span leaves its state as it is; see `kept_rows.rows_fit`."""
    return continues & (accepted + size <= tl.where(size == 1, _SINGLE_ROWS, P))


@triton.jit(do_not_specialize=["spans", "rows", "columns", "limit", "draft_stride", "group_stride"])
def _place_kernel(
    cursor,
    tables,
    slots,
    span_of_row,
    offset,
    tokens,
    drafts,
    planned,
    starts,
    lengths,
    positions,
    kv_slots,
    ids,
    spans,
    rows,
    columns,
    limit,
    draft_stride,
    group_stride,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Per span: its start, and the number of its drafts within the context.
    valid = lanes < spans
    start = tl.load(cursor + 2 * tl.load(slots + lanes, valid, 0), valid, 0)
    tl.store(starts + lanes, start, valid)
    num_free = tl.maximum(limit - 1 - start, 0)
    tl.store(lengths + lanes, tl.minimum(tl.load(planned + lanes, valid, 0), num_free), valid)
    # Per row: its position, K/V slot and token.
    valid = lanes < rows
    span = tl.load(span_of_row + lanes, valid, 0)
    slot = tl.load(slots + span, valid, 0)
    position = tl.load(cursor + 2 * slot, valid, 0) + tl.load(offset + lanes, valid, 0)
    column = slot * columns + position // PAGE
    for group in tl.static_range(GROUPS):
        entry = tl.load(tables + group * group_stride + column, valid, 0)
        tl.store(kv_slots + group * rows + lanes, entry + position, valid)
    token = tl.load(tokens + lanes, valid, 0)
    tail = tl.load(cursor + 2 * slot + 1, valid & (token == -1), 0)
    if K:
        draft = tl.load(drafts + span * draft_stride - 2 - token, valid & (token < -1), 0)
        tail = tl.where(token < -1, draft, tail)
    tl.store(positions + lanes, position, valid)
    # A row with NaN logits gave token -1.
    tl.store(ids + lanes, tl.maximum(tl.where(token < 0, tail, token), 0), valid)


def place(
    cursor: Tensor, tables: Tensor, layout: Any, drafts: Tensor | None, limit: int, page_size: int
) -> list[Tensor]:
    """cursor [N, 2], tables [groups, N, columns], a layout of S spans and T rows, drafts [S, K] ->
    ids, positions [T], starts, draft_lengths [S], kv_slots [T] of each page group.

    draft_lengths: number of planned drafts before position `limit`. A layout's token is an id, -1
    for the span's newest token, or -2 - j for its draft j.
    """
    size = layout.slots.shape[0]
    count = layout.tokens.shape[0]
    device_tokens = layout.tokens[:, None] if drafts is None else drafts
    width = 0 if drafts is None else drafts.shape[1]
    groups = tables.shape[0]
    parts = [size, size, count, count, groups * count]
    buffer = torch.empty(sum(parts), dtype=torch.int64, device=cursor.device)
    starts, lengths, positions, ids, kv_slots = buffer.split(parts)
    pdl = supports_pdl(cursor.device)
    _place_kernel[(triton.cdiv(max(size, count), _BLOCK),)](
        cursor,
        tables,
        layout.slots,
        layout.span_of_row,
        layout.offset,
        layout.tokens,
        device_tokens,
        layout.drafts,
        starts,
        lengths,
        positions,
        kv_slots,
        ids,
        size,
        count,
        tables.shape[2],
        limit,
        device_tokens.stride(0),
        tables.stride(0),
        K=width,
        GROUPS=groups,
        PAGE=page_size,
        BLOCK=_BLOCK,
        num_warps=1,
        PDL=pdl,
        launch_pdl=pdl,
    )
    return [ids, positions, starts, lengths, *kv_slots.split(count)]


@triton.jit(do_not_specialize=["simulated", "rows"])
def _accept_kernel(
    tokens,
    ids,
    lengths,
    start,
    row_starts,
    context_rows,
    slots,
    cursor,
    accepted,
    simulated,
    rows,
    K: tl.constexpr,
    W: tl.constexpr,
    SIMULATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    span = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    tokens += span * W
    num_accepted = tl.zeros([], tl.int64)
    begin = tl.load(start + span)
    num_context = tl.load(context_rows + span)
    if K:
        length = tl.load(lengths + span)
        inside = lanes < length
        token = tl.load(tokens + lanes, inside, 0)
        first = tl.load(row_starts + span) + num_context
        draft = tl.load(ids + first + lanes, inside & (first + lanes < rows), 0)
        num_accepted = tl.min(tl.where(inside & (token == draft), BLOCK, lanes), 0).to(tl.int64)
        if SIMULATED:
            share = begin.to(tl.float32) * 0.6180339887498949
            base = tl.floor(simulated - 1.0)
            one_more = share - tl.floor(share) < simulated - 1.0 - base
            num_accepted = tl.minimum((base + tl.where(one_more, 1.0, 0.0)).to(tl.int64), length)
    tl.store(accepted + span, num_accepted)
    slot = tl.load(slots + span)
    tl.store(cursor + 2 * slot, begin + num_context + num_accepted)
    tl.store(cursor + 2 * slot + 1, tl.load(tokens + num_accepted))


def accept(
    tokens: Tensor, batch: Any, layout: Any, cursor: Tensor, simulated: float | None = None
) -> Tensor:
    """tokens [S, W], the target's tokens at the rows with logits -> accepted drafts [S].

    Drafts, which follow a span's context rows in the batch's ids, are accepted while they equal the
    target's tokens; the new lengths and newest tokens are written to cursor [N, 2]. simulated:
    accept drafts so that this many tokens are committed per step on average, whatever they are.
    """
    size, width = tokens.shape
    accepted = torch.empty(size, dtype=torch.int64, device=tokens.device)
    pdl = supports_pdl(tokens.device)
    _accept_kernel[(size,)](
        tokens,
        batch.ids,
        batch.draft_lengths,
        batch.starts,
        layout.row_starts,
        layout.context_rows,
        layout.slots,
        cursor,
        accepted,
        simulated or 1.0,
        batch.ids.shape[0],
        K=layout.shape.max_drafts,
        W=width,
        SIMULATED=simulated is not None,
        BLOCK=max(triton.next_power_of_2(width), 2),
        num_warps=1,
        PDL=pdl,
        launch_pdl=pdl,
    )
    return accepted


@triton.jit(do_not_specialize=["stride"])
def _gather_kernel(
    table, index, out, stride, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row) * stride
    tl.store(out + row * H + lanes, tl.load(table + source + lanes, lanes < H, 0), lanes < H)


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """table [N, H] of any row stride, index [R] int64 -> rows [R, H], as `index_select`, which
    takes four times as long for a few rows."""
    size = table.shape[1]
    out = torch.empty(index.shape[0], size, dtype=table.dtype, device=table.device)
    block = min(triton.next_power_of_2(size), 1024)
    pdl = supports_pdl(table.device)
    _gather_kernel[(index.shape[0], triton.cdiv(size, block))](
        table,
        index,
        out,
        table.stride(0),
        H=size,
        BLOCK=block,
        num_warps=4,
        PDL=pdl,
        launch_pdl=pdl,
    )
    return out


@triton.jit(do_not_specialize=["spans"])
def _cover_kernel(
    slots, starts, sizes, length, accepted, fresh, spans,
    P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = lanes < spans
    slot = tl.load(slots + lanes, valid, 0)
    start = tl.load(starts + lanes, valid, 0)
    size = tl.load(sizes + lanes, valid, 0)
    covered = tl.load(length + slot, valid, 0)
    pending = tl.minimum(tl.maximum(start - covered, 0), P)
    tl.store(accepted + lanes, tl.where(start == 0, 0, pending), valid)
    tl.store(fresh + lanes, start == 0, valid)
    fits = rows_fit(start > 0, pending, size, P)
    written = tl.where(size > P, start + size, start)
    tl.store(length + slot, tl.where(fits, covered, written), valid)


def cover(batch: Any, length: Tensor, pending: int) -> tuple[Tensor, Tensor]:
    """A batch of S spans -> accepted rows that the state lacks [S] int64, whether a sequence begins
    [S]. length [N]: positions in each slot's state, updated. pending: maximum rows that are kept
    next to a state."""
    size = batch.slots.shape[0]
    accepted = torch.empty(size, dtype=torch.int64, device=length.device)
    fresh = torch.empty(size, dtype=torch.bool, device=length.device)
    pdl = supports_pdl(length.device)
    _cover_kernel[(triton.cdiv(size, _BLOCK),)](
        batch.slots,
        batch.starts,
        batch.sizes,
        length,
        accepted,
        fresh,
        size,
        P=pending,
        BLOCK=_BLOCK,
        num_warps=1,
        PDL=pdl,
        launch_pdl=pdl,
    )
    return accepted, fresh
