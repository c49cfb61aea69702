# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""The experts of each row, and the pairs of a row and an expert sorted by expert.

Legend: T rows, E experts, k experts per row, P = T k pairs, row after row. A shared expert, which
all rows choose, follows the E, and is a row's last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.reference_experts import Routing

_CHUNK = 4096
"""Pairs that a program of the sorting reads at a time."""


@triton.jit(do_not_specialize=["spans"])
def _route_kernel(
    logits,  # [T, E]
    scale,  # [E]; or None
    sizes,  # int64 [S]: rows of each span, their sum without padding; or None
    ids,  # int32 [T, k]: from the first expert at hand; HELD for padding rows and other experts
    weights,  # fp32 [T, k]
    stride,  # of logits, in units of UNIT
    spans,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,  # 1 with a shared expert, the sigmoid of whose logit is its weight
    NORMALIZED: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    SPANS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's program is one warp, whose reductions of integers are single instructions."""
    pdl_wait(PDL)
    CHOSEN: tl.constexpr = TOP_K + SHARED
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    line = logits + row.to(tl.int64) * (stride * UNIT)
    values = tl.load(line + column, column < E, float("-inf")).to(tl.float32)
    if SHARED:
        gate = tl.load(line + E).to(tl.float32)
    live = True
    if sizes is not None:
        span = tl.arange(0, SPANS)
        live = row < tl.sum(tl.load(sizes + span, span < spans, 0).to(tl.int32), 0)
    # Integers in the order of the logits. NaN counts as the largest logit, so that the row's
    # experts stay distinct. BF16 leaves 16 bits for the column.
    LOWEST: tl.constexpr = -(2**31)
    SHORT: tl.constexpr = logits.dtype.element_ty == tl.bfloat16
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    order = tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    if SHORT:
        order = (order & -0x10000) | (0xFFFF - column)
    order = tl.where(column < E, order, LOWEST)
    slot = tl.arange(0, triton.next_power_of_2(CHOSEN))
    share = tl.zeros(slot.shape, tl.float32)
    chosen = tl.zeros(slot.shape, tl.int32)
    top = 0.0
    total = 0.0
    for j in tl.static_range(TOP_K):
        highest = tl.max(order, 0)
        bits = highest ^ ((highest >> 31) & 0x7FFFFFFF)
        if SHORT:
            bits &= -0x10000
            expert = 0xFFFF - (highest & 0xFFFF)
        else:
            expert = tl.min(tl.where(order == highest, column, WIDTH), 0)
        order = tl.where(column == expert, LOWEST, order)
        value = bits.to(tl.float32, bitcast=True)
        if j == 0:
            top = value
        part = tl.exp(value - top)
        total += part
        share = tl.where(slot == j, part, share)
        chosen = tl.where(slot == j, expert, chosen)
    if not NORMALIZED:
        total = tl.sum(tl.exp(values - top), 0)
    share /= total
    if scale is not None:
        share *= tl.load(scale + chosen).to(tl.float32)
    if SHARED:
        share = tl.where(slot == TOP_K, 1.0 / (1.0 + tl.exp(-gate)), share)
        chosen = tl.where(slot == TOP_K, E, chosen)
    place = row * CHOSEN + slot
    tl.store(weights + place, share, slot < CHOSEN)
    at_hand = live & (chosen >= FIRST) & (chosen < FIRST + HELD)
    tl.store(ids + place, tl.where(at_hand, chosen - FIRST, HELD), slot < CHOSEN)


@triton.jit(do_not_specialize=["num_blocks"])
def _sort_kernel(
    ids,  # int32 [P]
    pairs,  # int32 [P]: pairs sorted by expert
    blocks,  # int32 [blocks, 3]: expert, first of its places in `pairs`, number of them
    number,
    num_blocks,
    E: tl.constexpr,  # with a shared expert
    CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BY_PAIR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each expert has a program and the blocks from its first pair / BLOCK_M + its number on, some
    of them empty; or, BY_PAIR, as many blocks as pairs, all but one of them empty. The last program
    empties the rest."""
    pdl_wait(PDL)
    expert = tl.program_id(0)
    chunk = tl.arange(0, CHUNK)
    lower = tl.zeros([CHUNK], tl.int32)
    for start in range(0, number, CHUNK):
        owner = tl.load(ids + start + chunk, start + chunk < number, E)
        lower += (owner < expert).to(tl.int32)
    first = tl.sum(lower, 0)
    size = 0
    for start in range(0, tl.where(expert < E, number, 0), CHUNK):
        pair = start + chunk
        own = tl.load(ids + pair, pair < number, E) == expert
        tl.store(pairs + first + size + tl.cumsum(own.to(tl.int32), 0) - 1, pair, own)
        size += tl.sum(own.to(tl.int32), 0)
    begin = first if BY_PAIR else first // BLOCK_M + expert
    end = first + size if BY_PAIR else (first + size) // BLOCK_M + expert + 1
    end = tl.where(expert < E, end, num_blocks)
    for block in range(begin, end, STEPS):
        part = block + tl.arange(0, STEPS)
        skipped = (part - begin) * BLOCK_M
        rest = size - skipped
        stored = part < end
        tl.store(blocks + part * 3, expert, stored)
        tl.store(blocks + part * 3 + 1, first + skipped, stored)
        tl.store(blocks + part * 3 + 2, tl.minimum(tl.maximum(rest, 0), BLOCK_M), stored)


class Routed(NamedTuple):
    """ids [T, k] int32, weights [T, k] fp32; pairs, blocks: see `_sort_kernel`, None if each pair
    is a block."""

    ids: Tensor
    weights: Tensor
    pairs: Tensor | None
    blocks: Tensor | None
    num_blocks: int


def route(
    logits: Tensor, routing: Routing, sizes: Tensor | None, block_m: int, *, by_pair: bool
) -> Routed:
    """logits [T, E], or [T, E + 1] with a shared expert; sizes [S] int64: rows of each span, all
    rows if None."""
    rows = logits.shape[0]
    device = logits.device
    shared = int(routing.shared)
    total = logits.shape[1] - shared
    chosen = routing.top_k + shared
    first, count = routing.held or (0, total + shared)
    pdl = supports_pdl(device)
    number = rows * chosen
    places = torch.empty(2 * number, dtype=torch.int32, device=device)
    ids = places[:number].view(rows, chosen)
    pairs = places[number:]
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=device)
    spans = 0 if sizes is None else sizes.shape[0]
    unit = 8 if logits.stride(0) % 8 == 0 else 1
    _route_kernel[(rows,)](
        logits,
        routing.scale,
        sizes,
        ids,
        weights,
        logits.stride(0) // unit,
        spans,
        E=total,
        FIRST=first,
        HELD=count,
        TOP_K=routing.top_k,
        SHARED=shared,
        NORMALIZED=routing.normalized,
        UNIT=unit,
        WIDTH=triton.next_power_of_2(total),
        SPANS=triton.next_power_of_2(max(spans, 1)),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    if by_pair:
        return Routed(ids=ids, weights=weights, pairs=None, blocks=None, num_blocks=number)
    num_blocks = number // block_m + count
    # A row's experts are distinct, so that an expert's pairs fit into a block of as many rows.
    fewer = rows <= block_m and number < num_blocks
    num_blocks = number if fewer else num_blocks
    blocks = torch.empty(num_blocks, 3, dtype=torch.int32, device=device)
    chunk = min(int(triton.next_power_of_2(number)), _CHUNK)
    if 0 < number % chunk <= chunk // 2:  # the last one would be half empty
        chunk //= 2
    _sort_kernel[(count + 1,)](
        ids,
        pairs,
        blocks,
        number,
        num_blocks,
        E=count,
        CHUNK=chunk,
        STEPS=64,
        BLOCK_M=block_m,
        BY_PAIR=fewer,
        PDL=pdl,
        num_warps=max(chunk // 512, 1),
        launch_pdl=pdl,
    )
    return Routed(ids=ids, weights=weights, pairs=pairs, blocks=blocks, num_blocks=num_blocks)
