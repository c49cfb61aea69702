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


@triton.jit
def _route_kernel(
    logits,  # [T, E]
    scale,  # [E]; or None
    sizes,  # int64 [S]: rows of each span, their sum without padding; or None
    ids,  # int32 [T, k]: from the first expert at hand; HELD for padding rows and other experts
    weights,  # fp32 [T, k]
    stride,
    spans,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,  # 1 with a shared expert, the sigmoid of whose logit is its weight
    NORMALIZED: tl.constexpr,
    WIDTH: tl.constexpr,
    SPANS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's program is one warp, whose reductions of integers are single instructions."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    line = logits + row.to(tl.int64) * stride
    values = tl.load(line + column, column < E, float("-inf")).to(tl.float32)
    if SHARED:
        gate = tl.load(line + E).to(tl.float32)
    live = True
    if sizes is not None:
        span = tl.arange(0, SPANS)
        live = row < tl.sum(tl.load(sizes + span, span < spans, 0).to(tl.int32), 0)
    # Integers in the order of the logits. NaN counts as the largest logit, so that the row's
    # experts stay distinct.
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    order = tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    order = tl.where(column < E, order, -(2**31))
    slot = tl.arange(0, triton.next_power_of_2(TOP_K + SHARED))
    share = tl.zeros([triton.next_power_of_2(TOP_K + SHARED)], tl.float32)
    chosen = tl.zeros([triton.next_power_of_2(TOP_K + SHARED)], tl.int32)
    top = 0.0
    total = 0.0
    for j in tl.static_range(TOP_K):
        highest = tl.max(order, 0)
        expert = tl.min(tl.where(order == highest, column, WIDTH), 0)
        order = tl.where(column == expert, -(2**31), order)
        value = (highest ^ ((highest >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
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
    place = row * (TOP_K + SHARED) + slot
    tl.store(weights + place, share, slot < TOP_K + SHARED)
    at_hand = (chosen >= FIRST) & (chosen < FIRST + HELD)
    chosen = tl.where(live & at_hand, chosen - FIRST, HELD)
    tl.store(ids + place, chosen, slot < TOP_K + SHARED)


@triton.jit
def _sort_kernel(
    ids,  # int32 [P]
    pairs,  # int32 [P]: pairs sorted by expert
    blocks,  # int32 [blocks, 3]: expert, first of its places in `pairs`, number of them
    rows,
    num_blocks,
    E: tl.constexpr,  # with a shared expert
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    expert = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    pair = place // TOP_K * (TOP_K + SHARED) + place % TOP_K
    owner = tl.load(ids + pair, place < rows * TOP_K, E)
    bins = tl.arange(0, BINS)
    counts = tl.where(bins < E, tl.histogram(owner, BINS), 0)
    needed = (counts + BLOCK_M - 1) // BLOCK_M
    before = bins < expert
    first = tl.sum(tl.where(before, counts, 0), 0)
    block = tl.sum(tl.where(before, needed, 0), 0)
    own = (owner == expert) & (expert < E)
    if SHARED:  # its pairs need no sorting, and all follow the others
        last = place * (TOP_K + SHARED) + TOP_K
        chose = tl.load(ids + last, place < rows, E) == E - 1
        own = tl.where(expert == E - 1, chose, own)
        pair = tl.where(expert == E - 1, last, pair)
        shared_blocks = (tl.sum(chose.to(tl.int32), 0) + BLOCK_M - 1) // BLOCK_M
        block += tl.where(expert == E, shared_blocks, 0)
    size = tl.sum(own.to(tl.int32), 0)
    rank = tl.cumsum(own.to(tl.int32), 0) - 1
    tl.store(pairs + first + rank, pair, own)
    step = tl.arange(0, STEPS)
    used = step * BLOCK_M < size
    tl.store(blocks + (block + step) * 3, expert, used)
    tl.store(blocks + (block + step) * 3 + 1, first + step * BLOCK_M, used)
    tl.store(blocks + (block + step) * 3 + 2, tl.minimum(size - step * BLOCK_M, BLOCK_M), used)
    if expert == E:  # the last program marks the blocks that are not needed
        for rest in range(block, num_blocks, STEPS):
            tl.store(blocks + (rest + step) * 3 + 2, 0, rest + step < num_blocks)


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
    spans = 0 if sizes is None else sizes.shape[0]
    _route_kernel[(rows,)](
        logits, routing.scale, sizes, ids, weights, logits.stride(0), spans,
        E=total, FIRST=first, HELD=count, TOP_K=routing.top_k, SHARED=shared,
        NORMALIZED=routing.normalized,
        WIDTH=triton.next_power_of_2(total), SPANS=triton.next_power_of_2(max(spans, 1)), PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    if by_pair:
        return Routed(ids, weights, None, None, number)
    # A row's experts are distinct, so that each expert has at most `rows` pairs.
    num_blocks = min(number, number // block_m + count, count * -(-rows // block_m))
    blocks = torch.empty(num_blocks, 3, dtype=torch.int32, device=device)
    _sort_kernel[(count + 1,)](
        ids, pairs, blocks, rows, num_blocks, E=count, TOP_K=routing.top_k, SHARED=shared,
        BINS=triton.next_power_of_2(count + 1),
        WIDTH=triton.next_power_of_2(rows * routing.top_k),
        STEPS=max(triton.next_power_of_2(triton.cdiv(rows, block_m)), 64), BLOCK_M=block_m,
        PDL=pdl, num_warps=8 if rows * routing.top_k > 1024 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return Routed(ids, weights, pairs, blocks, num_blocks)
