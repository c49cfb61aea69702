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

_ROWS_AT_ONCE = 32
"""Rows that a single program routes and sorts: it has a warp for each, and integers a bit."""
_CELLS_AT_ONCE = 8192
"""Logits for which such a program has registers."""
_CHUNK = 4096
"""Pairs that a program of the sorting reads at a time."""


@triton.jit
def _store_blocks(blocks, block, expert, first, size, stored, BLOCK_M: tl.constexpr):
    """Store blocks which begin at place `first`, where the expert has `size` more pairs."""
    tl.store(blocks + block * 3, expert, stored)
    tl.store(blocks + block * 3 + 1, first, stored)
    tl.store(blocks + block * 3 + 2, tl.minimum(tl.maximum(size, 0), BLOCK_M), stored)


@triton.jit
def _ones(x):
    """Count the bits of 32-bit integers."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit(do_not_specialize=["rows", "spans", "num_blocks"])
def _route_kernel(
    logits,  # [T, E]
    scale,  # [E]; or None
    sizes,  # int64 [S]: rows of each span, their sum without padding; or None
    ids,  # int32 [T, k]: from the first expert at hand; HELD for padding rows and other experts
    weights,  # fp32 [T, k]
    pairs,  # see _sort_kernel, for a single program; or None
    blocks,
    rows,
    stride,  # of logits, in units of UNIT
    spans,
    num_blocks,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,  # 1 with a shared expert, the sigmoid of whose logit is its weight
    NORMALIZED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row is one warp's, whose reductions of integers are single instructions."""
    pdl_wait(PDL)
    CHOSEN: tl.constexpr = TOP_K + SHARED
    SLOTS: tl.constexpr = triton.next_power_of_2(CHOSEN)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = row < rows
    line = logits + row.to(tl.int64) * (stride * UNIT)
    values = tl.load(line + column, inside & (column < E), float("-inf")).to(tl.float32)
    if SHARED:
        gate = tl.load(line + E, inside, 0.0).to(tl.float32)
    filled = rows
    if sizes is not None:
        span = tl.arange(0, SPANS)
        filled = tl.sum(tl.load(sizes + span, span < spans, 0).to(tl.int32), 0)
    live = inside & (row < filled)
    # Integers in the order of the logits. NaN counts as the largest logit, so that the row's
    # experts stay distinct. BF16 leaves 16 bits for the column.
    LOWEST: tl.constexpr = -(2**31)
    SHORT: tl.constexpr = logits.dtype.element_ty == tl.bfloat16
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    order = tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    if SHORT:
        order = (order & -0x10000) | (0xFFFF - column)
    order = tl.where(column < E, order, LOWEST + TOP_K)
    slot = tl.arange(0, SLOTS)[None, :]
    share = tl.zeros([BLOCK, SLOTS], tl.float32)
    chosen = tl.zeros([BLOCK, SLOTS], tl.int32)
    top = tl.zeros([BLOCK, 1], tl.float32)
    total = tl.zeros([BLOCK, 1], tl.float32)
    for j in tl.static_range(TOP_K):
        highest = tl.max(order, 1)[:, None]
        bits = highest ^ ((highest >> 31) & 0x7FFFFFFF)
        if SHORT:
            bits &= -0x10000
            expert = 0xFFFF - (highest & 0xFFFF)
        else:
            expert = tl.min(tl.where(order == highest, column, WIDTH), 1)[:, None]
        order = tl.where(column == expert, LOWEST + j, order)  # below all logits
        value = bits.to(tl.float32, bitcast=True)
        if j == 0:
            top = value
        part = tl.exp(value - top)
        total += part
        share = tl.where(slot == j, part, share)
        chosen = tl.where(slot == j, expert, chosen)
    if not NORMALIZED:
        total = tl.sum(tl.exp(values - top), 1)[:, None]
    share /= total
    if scale is not None:
        share *= tl.load(scale + chosen).to(tl.float32)
    if SHARED:
        share = tl.where(slot == TOP_K, 1.0 / (1.0 + tl.exp(-gate)), share)
        chosen = tl.where(slot == TOP_K, E, chosen)
    place = row * CHOSEN + slot
    tl.store(weights + place, share, inside & (slot < CHOSEN))
    at_hand = live & (slot < CHOSEN) & (chosen >= FIRST) & (chosen < FIRST + HELD)
    chosen = tl.where(at_hand, chosen - FIRST, HELD)
    tl.store(ids + place, chosen, inside & (slot < CHOSEN))
    if pairs is not None:
        at_hand = live & (column >= FIRST) & (column < FIRST + HELD)
        # For each expert the rows that chose it, a bit each.
        members = tl.sum(tl.where(at_hand & (order < LOWEST + TOP_K), 1 << row, 0), 0)
        # Every warp has all of these sums; spread them over the warps.
        members = tl.gather(members, tl.arange(0, WIDTH), 0)
        size = _ones(members)
        # Numbers of pairs, and 65536 times numbers of blocks.
        both = size + ((size + BLOCK_M - 1) // BLOCK_M << 16)
        before, end = tl.cumsum(both, 0) - both, tl.sum(both, 0)
        first, block = before & 0xFFFF, before >> 16
        pair = tl.arange(0, BLOCK * SLOTS)
        row, slot, expert = pair // SLOTS, pair % SLOTS, tl.reshape(chosen, [BLOCK * SLOTS])
        source = tl.where(expert < HELD - SHARED, expert + FIRST, 0)
        earlier = tl.gather(members, source, 0) & ((1 << row) - 1)
        place = tl.gather(first, source, 0) + _ones(earlier)
        if SHARED:  # its pairs follow the others
            place = tl.where(slot == TOP_K, (end & 0xFFFF) + row, place)
        tl.store(pairs + place, row * CHOSEN + slot, expert < HELD)
        number = tl.arange(0, WIDTH) - FIRST
        used = end >> 16
        for skipped in tl.static_range(0, BLOCK, BLOCK_M):
            rest, begin = size - skipped, first + skipped
            _store_blocks(
                blocks, block + skipped // BLOCK_M, number, begin, rest, rest > 0, BLOCK_M
            )
            if SHARED:
                rest, begin = tl.minimum(filled, rows) - skipped, (end & 0xFFFF) + skipped
                _store_blocks(blocks, used, HELD - 1, begin, rest, rest > 0, BLOCK_M)
                used += (rest > 0).to(tl.int32)
        for unused in range(used, num_blocks, WIDTH):
            block = unused + tl.arange(0, WIDTH)
            tl.store(blocks + block * 3 + 2, 0, block < num_blocks)


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
    PDL: tl.constexpr,
):
    """Each expert has a program and the blocks from its first pair / BLOCK_M + its number on, some
    of them empty. The last program empties the rest."""
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
    begin = first // BLOCK_M + expert
    end = tl.where(expert < E, (first + size) // BLOCK_M + expert + 1, num_blocks)
    for block in range(begin, end, STEPS):
        part = block + tl.arange(0, STEPS)
        skipped = (part - begin) * BLOCK_M
        rest = size - skipped
        _store_blocks(blocks, part, expert, first + skipped, rest, part < end, BLOCK_M)


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
    rows, device, shared = logits.shape[0], logits.device, int(routing.shared)
    total, chosen = logits.shape[1] - shared, routing.top_k + shared
    first, count = routing.held or (0, total + shared)
    pdl = supports_pdl(device)
    number = rows * chosen
    places = torch.empty(2 * number, dtype=torch.int32, device=device)
    ids, pairs = places[:number].view(rows, chosen), places[number:]
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=device)
    width, num_blocks, blocks = triton.next_power_of_2(total), number, None
    at_once = not by_pair and rows <= min(_ROWS_AT_ONCE, _CELLS_AT_ONCE // width)
    if not by_pair:
        num_blocks = number // block_m + count
        if at_once:  # a row's experts are distinct, so that each has at most `rows` pairs
            num_blocks = min(number, num_blocks, count * -(-rows // block_m))
        blocks = torch.empty(num_blocks, 3, dtype=torch.int32, device=device)
    block = triton.next_power_of_2(rows) if at_once else 1
    spans = 0 if sizes is None else sizes.shape[0]
    unit = 8 if logits.stride(0) % 8 == 0 else 1
    _route_kernel[(triton.cdiv(rows, block),)](
        logits, routing.scale, sizes, ids, weights, *((pairs, blocks) if at_once else (None, None)),
        rows, logits.stride(0) // unit, spans, num_blocks,
        E=total, FIRST=first, HELD=count, TOP_K=routing.top_k, SHARED=shared,
        NORMALIZED=routing.normalized, UNIT=unit, BLOCK=block, WIDTH=width,
        SPANS=triton.next_power_of_2(max(spans, 1)), BLOCK_M=block_m if at_once else 1,
        PDL=pdl, num_warps=block, launch_pdl=pdl,
    )  # fmt: skip
    if blocks is None:
        return Routed(ids, weights, None, None, num_blocks)
    if not at_once:
        chunk = min(triton.next_power_of_2(number), _CHUNK)
        _sort_kernel[(count + 1,)](
            ids, pairs, blocks, number, num_blocks, E=count, CHUNK=chunk, STEPS=64,
            BLOCK_M=block_m, PDL=pdl, num_warps=max(chunk // 256, 1), launch_pdl=pdl,
        )  # fmt: skip
    return Routed(ids, weights, pairs, blocks, num_blocks)
