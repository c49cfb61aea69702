# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
"""Logits processors in one launch: bias, penalties, bans and grammar masks over per-slot tables.

Tables of slots without processors are not read. Legend: as in `strobe.sampling.processors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from strobe.sampling.processors import LogitRows, Tables

BLOCK = 2048
FLOOR = tl.constexpr(-1e30)
"""See `strobe.sampling.processors.FLOOR`."""


@triton.jit(do_not_specialize=["stride", "draft_stride", "mask_stride"])
def _process_kernel(
    logits,
    kinds,
    bias,
    counts,
    flags,
    strengths,
    min_end_position,
    slots,
    positions,
    drafts,
    span,
    rank,
    masks,
    out,
    stride,
    draft_stride,
    mask_stride,
    V: tl.constexpr,
    PROCESSED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = ids < V
    x = tl.load(logits + row * stride + ids, real, 0.0).to(tl.float32)
    slot = tl.load(slots + row)
    kind = tl.load(kinds + slot)
    if PROCESSED:  # noqa: SIM102, decided when compiled
        if kind & 1:
            cells = slot * V + ids
            x += tl.load(bias + cells, real, 0.0)
            count = tl.load(counts + cells, real, 0)
            first = drafts + tl.load(span + row) * draft_stride
            for i in range(tl.load(rank + row).to(tl.int32)):
                count += (ids == tl.load(first + i)).to(tl.int32)
            flag = tl.load(flags + cells, real, 0)
            presence = tl.load(strengths + slot * 3)
            frequency = tl.load(strengths + slot * 3 + 1)
            repetition = tl.load(strengths + slot * 3 + 2)
            scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where((count > 0) | ((flag & 1) != 0), scaled, x)
            x = x - count * frequency - tl.where(count > 0, presence, 0.0)
            early = tl.load(positions + row) < tl.load(min_end_position + slot)
            x = tl.where(early & ((flag & 2) != 0), float("-inf"), x)
    if MASKED:  # noqa: SIM102
        if kind & 2:
            word = tl.load(masks + row * mask_stride + (ids >> 5), real, 0)
            floored = tl.where(x == float("-inf"), FLOOR, x)
            x = tl.where(((word >> (ids & 31)) & 1) != 0, floored, float("-inf"))
    tl.store(out + row * V + ids, x, real)


def process(
    logits: Tensor,
    tables: Tables,
    rows: LogitRows,
    masks: Tensor | None,
    *,
    processed: bool,
) -> Tensor:
    """logits [R, V] -> [R, V] float32, as `strobe.sampling.processors.process`, with its Tables and
    LogitRows."""
    size = logits.shape[1]
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    drafts = rows.drafts
    _process_kernel[(logits.shape[0], triton.cdiv(size, BLOCK))](
        logits,
        tables.kinds,
        tables.bias,
        tables.counts,
        tables.flags,
        tables.strengths,
        tables.min_end_position,
        rows.slots,
        rows.positions,
        drafts,
        rows.span,
        rows.rank,
        out if masks is None else masks,
        out,
        logits.stride(0),
        0 if drafts is None else drafts.stride(0),
        0 if masks is None else masks.stride(0),
        V=size,
        PROCESSED=processed,
        MASKED=masks is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
