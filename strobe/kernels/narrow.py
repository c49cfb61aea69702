# pyright: basic, reportCallIssue=false
"""Which drafts of a step are verified, and the layout of those, on the device.

    _chances_kernel    S programs: each draft's chance to count, -1 past the proposed ones
    _choose_kernel     S programs: number of a span's drafts that are among the best of all
    _narrow_kernel     blocks of rows: the place of each row of the narrower layout

Legend: S spans, K drafts per span, T rows, W rows of a span with logits. The torch twins are
`strobe.kernels.reference_narrow` and `StepOps.narrow`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.evidence import KNOTS_PER_UNIT, MEAN_POWER, SQUARE_ROOTS

_BLOCK = 128
_CHUNK = 1024
_CELLS = 8192

_KNOTS_PER_UNIT = tl.constexpr(KNOTS_PER_UNIT)
_MEAN_POWER = tl.constexpr(MEAN_POWER)
_SQUARE_ROOTS = tl.constexpr(SQUARE_ROOTS)


@triton.jit
def _chances_kernel(
    margins,
    rates,
    limits,
    chances,
    stride,
    K: tl.constexpr,
    KNOTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """rates [K, KNOTS]: by position, at the knots of evidence. Computes the evidence as
    `strobe.kernels.evidence.evidence` does."""
    span = tl.program_id(0)
    place = tl.arange(0, SIZE)
    real = place < K
    limit = tl.load(limits + span)
    margin = tl.load(margins + span * stride + place, real, 0.0)
    mean = tl.sum(tl.where(place < limit, margin, 0.0), 0) / tl.maximum(limit, 1).to(tl.float32)
    power = margin
    for _ in tl.static_range(_MEAN_POWER):
        power = power * mean
    root = tl.where(power > 0, power, 0.0)  # NaN is no evidence
    for _ in tl.static_range(_SQUARE_ROOTS):
        root = tl.sqrt_rn(root)
    at = tl.minimum(_KNOTS_PER_UNIT * root, KNOTS - 1)
    knot = tl.minimum(at.to(tl.int32), KNOTS - 2)
    low = tl.load(rates + place * KNOTS + knot, real, 0.0)
    high = tl.load(rates + place * KNOTS + knot + 1, real, 0.0)
    chance = tl.cumprod(low + (high - low) * (at - knot.to(tl.float32)), 0)
    chance = tl.where(place < limit, chance, -1.0)
    tl.store(chances + span * K + place, chance, real)


@triton.jit(do_not_specialize=["spans", "count"])
def _choose_kernel(
    chances, limits, drafts, out, spans, count,
    K: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out: the span's other drafts, and device drafts whose rank is below `count`."""
    span = tl.program_id(0)
    place = tl.arange(0, SIZE)
    limit = tl.load(limits + span)
    own_chance = tl.load(chances + span * K + place, place < K, -1.0)
    order = place * spans + span  # among equal chances earlier places come first
    rank = tl.zeros([SIZE], tl.int32)
    for first in range(0, spans * K, CHUNK):
        cells = first + tl.arange(0, CHUNK)
        chance = tl.load(chances + cells, cells < spans * K, -2.0)
        cell_order = (cells % K) * spans + cells // K
        before = (chance[None, :] == own_chance[:, None]) & (cell_order[None, :] < order[:, None])
        rank += tl.sum(((chance[None, :] > own_chance[:, None]) | before).to(tl.int32), 1)
    num_chosen = tl.sum(((rank < count) & (place < limit)).to(tl.int64), 0)
    tl.store(out + span, tl.load(drafts + span) - limit + num_chosen)


def chances(margins: Tensor, rates: Tensor, device_drafts: Tensor) -> Tensor:
    """Return each draft's chance to count [S, K] float32, and -1 past the proposed ones; see
    `choose`."""
    spans, width = margins.shape
    out = torch.empty(spans, width, dtype=torch.float32, device=margins.device)
    _chances_kernel[(spans,)](
        margins,
        rates,
        device_drafts,
        out,
        margins.stride(0),
        K=width,
        KNOTS=rates.shape[1],
        SIZE=triton.next_power_of_2(width),
        num_warps=1,
    )
    return out


def choose(
    margins: Tensor, rates: Tensor, device_drafts: Tensor, drafts: Tensor, count: int
) -> Tensor:
    """Return the drafts to verify [S] int64, from margins [S, K], rates [K, KNOTS] float32, and
    the numbers of drafts proposed on the device and in all [S] int64: all of the host's, and of the
    device's those whose chances are among the `count` largest."""
    spans, width = margins.shape
    out = torch.empty(spans, dtype=torch.int64, device=margins.device)
    _choose_kernel[(spans,)](
        chances(margins, rates, device_drafts),
        device_drafts,
        drafts,
        out,
        spans,
        count,
        K=width,
        SIZE=triton.next_power_of_2(width),
        CHUNK=min(_CHUNK, triton.next_power_of_2(spans * width)),
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["spans", "rows", "source_rows"])
def _narrow_kernel(
    slots, context_rows, drafts, active, source_starts, source_tokens, out, spans, rows,
    source_rows, W: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    span = tl.arange(0, SPANS)
    real = span < spans
    context = tl.load(context_rows + span, real, 0)
    num_drafts = tl.load(drafts + span, real, 0)
    sizes = context + num_drafts
    ends = tl.cumsum(sizes, 0)
    begins = ends - sizes
    if tl.program_id(0) == 0:
        tl.store(out + span, tl.load(slots + span, real, 0), real)
        tl.store(out + spans + span, context, real)
        tl.store(out + 2 * spans + span, num_drafts, real)
        tl.store(out + 3 * spans + span, sizes, real)
        tl.store(out + 4 * spans + span, begins, real)
        tl.store(out + 5 * spans + span, tl.load(active + span, real, 0), real)
        for column in tl.static_range(W):
            row = ends - tl.maximum(1 + num_drafts - column, 1)
            row = tl.where(sizes > 0, tl.maximum(row, 0), rows - 1)
            tl.store(out + 6 * spans + 3 * rows + span * W + column, row, real)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    owner = tl.sum(((ends[None, :] <= row[:, None]) & real[None, :]).to(tl.int64), 1)
    used = inside & (owner < spans)
    owner = tl.minimum(owner, spans - 1)
    own = span[None, :] == owner[:, None]
    offset = row - tl.sum(tl.where(own, begins[None, :], 0), 1)
    offset = tl.where(used, offset, 0)
    source = tl.load(source_starts + owner, used, 0) + offset
    token = tl.load(source_tokens + tl.minimum(source, source_rows - 1), used, 0)
    out += 6 * spans
    tl.store(out + row, owner, inside)
    tl.store(out + rows + row, offset, inside)
    tl.store(out + 2 * rows + row, token, inside)


def narrow(layout: Any, drafts: Tensor, shape: Any) -> Tensor:
    """A layout of S spans, drafts [S] of theirs, and the shape of the narrower one -> its parts,
    packed."""
    size = 6 * shape.spans + 3 * shape.rows + shape.spans * shape.max_logits
    packed = torch.empty(size, dtype=torch.int64, device=drafts.device)
    spans = triton.next_power_of_2(shape.spans)
    block = min(_BLOCK, max(_CELLS // spans, 16))  # each row is compared with each span
    _narrow_kernel[(triton.cdiv(shape.rows, block),)](
        layout.slots,
        layout.context_rows,
        drafts,
        layout.active,
        layout.row_starts,
        layout.tokens,
        packed,
        shape.spans,
        shape.rows,
        layout.tokens.shape[0],
        W=shape.max_logits,
        SPANS=spans,
        BLOCK=block,
        num_warps=4,
    )
    return packed
