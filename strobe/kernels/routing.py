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

_ROUTED_CELLS = 4096
"""Logits that one program of the routing reads."""


@triton.jit
def _route_kernel(
    logits,  # [T, E]
    scale,  # [E]; or None
    sizes,  # int64 [S]: rows of each span, their sum without padding; or None
    ids,  # int32 [T, k]: from the first expert at hand; HELD for padding rows and other experts
    weights,  # fp32 [T, k]
    rows,
    stride,
    spans,
    E: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,  # 1 with a shared expert, the sigmoid of whose logit is its weight
    NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    SPANS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    live = inside
    if sizes is not None:
        span = tl.arange(0, SPANS)
        live = inside & (row < tl.sum(tl.load(sizes + span, span < spans, 0), 0))
    column = tl.arange(0, WIDTH)
    places = logits + row[:, None] * stride + column[None, :]
    real = inside[:, None] & (column < E)[None, :]
    values = tl.load(places, real, 0.0).to(tl.float32)
    values = tl.where((column < E)[None, :], values, float("-inf"))
    # NaN counts as the largest logit, so that the row's experts stay distinct.
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    order = tl.where(values == values, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)
    keys = (order.to(tl.int64) << 32) | (WIDTH - 1 - column)[None, :]
    keys = tl.where((column < E)[None, :], keys, -(2**63))
    slot = tl.arange(0, triton.next_power_of_2(TOP_K + SHARED))
    best = tl.zeros([BLOCK, triton.next_power_of_2(TOP_K + SHARED)], tl.float32) + float("-inf")
    chosen = tl.zeros([BLOCK, triton.next_power_of_2(TOP_K + SHARED)], tl.int32)
    for j in tl.static_range(TOP_K):
        key = tl.max(keys, 1)
        keys = tl.where(keys == key[:, None], -(2**63), keys)
        high = (key >> 32).to(tl.int32)
        value = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
        expert = WIDTH - 1 - (key & 0xFFFFFFFF).to(tl.int32)
        here = (slot == j)[None, :]
        best = tl.where(here, value[:, None], best)
        chosen = tl.where(here, expert[:, None], chosen)
    top = tl.max(best, 1)
    if NORMALIZED:
        total = tl.sum(tl.exp(best - top[:, None]), 1)
    else:
        total = tl.sum(tl.exp(values - top[:, None]), 1)
    share = tl.exp(best - top[:, None]) / total[:, None]
    if scale is not None:
        share *= tl.load(scale + tl.where(chosen < E, chosen, 0)).to(tl.float32)
    if SHARED:
        logit = tl.load(logits + row * stride + E, inside, 0.0).to(tl.float32)[:, None]
        share = tl.where((slot == TOP_K)[None, :], 1.0 / (1.0 + tl.exp(-logit)), share)
        chosen = tl.where((slot == TOP_K)[None, :], E, chosen)
    at = row[:, None] * (TOP_K + SHARED) + slot[None, :]
    stored = inside[:, None] & (slot < TOP_K + SHARED)[None, :]
    tl.store(weights + at, share, stored)
    at_hand = (chosen >= FIRST) & (chosen < FIRST + HELD)
    tl.store(ids + at, tl.where(live[:, None] & at_hand, chosen - FIRST, HELD), stored)


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
    width = triton.next_power_of_2(total)
    block = min(max(_ROUTED_CELLS // width, 1), triton.next_power_of_2(rows))
    spans = 0 if sizes is None else sizes.shape[0]
    _route_kernel[(triton.cdiv(rows, block),)](
        logits, routing.scale, sizes, ids, weights, rows, logits.stride(0), spans,
        E=total, FIRST=first, HELD=count, TOP_K=routing.top_k, SHARED=shared,
        NORMALIZED=routing.normalized,
        BLOCK=block, WIDTH=width, SPANS=triton.next_power_of_2(max(spans, 1)), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
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
