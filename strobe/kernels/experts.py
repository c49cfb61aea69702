# pyright: basic, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""Experts of few rows: routing, two grouped GEMMs with the activation between them, and each row's
weighted sum. Experts that no row chose are not read, and padding rows choose none.

    _route_kernel     each row's experts and weights
    _sort_kernel      pairs of a row and an expert, sorted by expert and cut into blocks
    _grouped_kernel   a tile of an expert's weight times a block of its rows; twice
    _sum_kernel       each row's outputs, added in the order of its experts

Legend: T rows, H hidden size, E experts of inner size I, k experts per row, P = T k pairs, row
after row; W [N, K] an expert's weight. No result depends on the order in which programs run, and a
row's bits do not depend on the other rows in a bucket of row counts. The torch twin is
`strobe.kernels.reference_experts`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.experts_table import MAX_ROWS, ExpertsConfig, choose
from strobe.kernels.gemm import DTYPES, INTERPRETED
from strobe.kernels.gemm_table import Weight
from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.reference_experts import Gate, Routing
from strobe.kernels.rowwise import gated, round_to, row_part

__all__ = ["MAX_ROWS", "experts"]

_ACTIVATIONS: dict[str, int] = {"silu": 1, "gelu_tanh": 2, "clamped": 3}
_ROUTED_CELLS = 4096
"""Logits that one program of the routing reads."""


@triton.jit
def _route_kernel(
    logits,  # [T, E]
    scale,  # [E]; or None
    sizes,  # int64 [S]: rows of each span, their sum without padding; or None
    ids,  # int32 [T, k]: E for padding rows
    weights,  # fp32 [T, k]
    rows,
    stride,
    spans,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
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
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    best = tl.zeros([BLOCK, triton.next_power_of_2(TOP_K)], tl.float32) + float("-inf")
    chosen = tl.zeros([BLOCK, triton.next_power_of_2(TOP_K)], tl.int32)
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
    at = row[:, None] * TOP_K + slot[None, :]
    stored = inside[:, None] & (slot < TOP_K)[None, :]
    tl.store(weights + at, share, stored)
    tl.store(ids + at, tl.where(live[:, None], chosen, E), stored)


@triton.jit
def _sort_kernel(
    ids,  # int32 [P]
    pairs,  # int32 [P]: pairs sorted by expert
    blocks,  # int32 [blocks, 3]: expert, first of its places in `pairs`, number of them
    count,  # P
    num_blocks,
    E: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    expert = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    owner = tl.load(ids + place, place < count, E)
    bins = tl.arange(0, BINS)
    counts = tl.where(bins < E, tl.histogram(owner, BINS), 0)
    needed = (counts + BLOCK_M - 1) // BLOCK_M
    before = bins < expert
    first = tl.sum(tl.where(before, counts, 0), 0)
    block = tl.sum(tl.where(before, needed, 0), 0)
    own = (owner == expert) & (expert < E)
    size = tl.sum(own.to(tl.int32), 0)
    rank = tl.cumsum(own.to(tl.int32), 0) - 1
    tl.store(pairs + first + rank, place, own)
    step = tl.arange(0, STEPS)
    used = step * BLOCK_M < size
    tl.store(blocks + (block + step) * 3, expert, used)
    tl.store(blocks + (block + step) * 3 + 1, first + step * BLOCK_M, used)
    tl.store(blocks + (block + step) * 3 + 2, tl.minimum(size - step * BLOCK_M, BLOCK_M), used)
    if expert == E:  # the last program marks the blocks that are not needed
        for rest in range(block, num_blocks, STEPS):
            tl.store(blocks + (rest + step) * 3 + 2, 0, rest + step < num_blocks)


@triton.jit
def _grouped_kernel(
    x,  # [T, K], or with DOWN [P, K] in the order of `pairs`
    weight,  # [E, N, K]
    scale,  # fp32 [E, N] of e4m3; or None
    bias,  # [E, N]; or None
    ids,  # int32 [P]
    pairs,  # int32 [P]; or None: a block is a pair
    blocks,  # int32 [blocks, 3]
    shares,  # fp32 [P], multiplied with DOWN
    y,  # [P, columns]
    x_stride,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DOWN: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION > 0
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    OUTPUTS: tl.constexpr = N // 2 if GATED else N
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    TAIL: tl.constexpr = K % BLOCK_K != 0
    tile = tl.program_id(0) % TILES
    block = tl.program_id(0) // TILES
    ms = tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    ws = tl.arange(0, BLOCK_N)
    # Rows of W in this tile; rows past the end repeat the last one and are not stored.
    if ACTIVATION == 3:  # gate and up rows take turns
        sources = tl.minimum(tile * BLOCK_N + ws, N - 1)
    elif GATED:
        sources = tl.minimum(tile * COLUMNS + ws % COLUMNS, OUTPUTS - 1) + ws // COLUMNS * OUTPUTS
    else:
        sources = tl.minimum(tile * BLOCK_N + ws, N - 1)
    pdl_wait(PDL)
    if pairs is None:
        expert = tl.load(ids + block)
        first = block
        size = tl.where(expert < E, 1, 0)
    else:
        expert = tl.load(blocks + block * 3)
        first = tl.load(blocks + block * 3 + 1)
        size = tl.load(blocks + block * 3 + 2)
    if size > 0:
        live = ms < size
        place = first + ms
        pair = place
        if pairs is not None:
            pair = tl.load(pairs + place, live, 0)
        source = place if DOWN else pair // TOP_K
        start = weight + expert.to(tl.int64) * (N * K)
        lines = x + source.to(tl.int64) * x_stride
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            if TAIL:
                inside = k + ks < K
                w = tl.load(
                    start + sources[:, None] * K + (k + ks)[None, :], inside[None, :], other=0.0
                )
                a = tl.load(
                    lines[:, None] + (k + ks)[None, :],
                    live[:, None] & inside[None, :],
                    other=0.0,
                )
            else:
                w = tl.load(start + sources[:, None] * K + (k + ks)[None, :])
                a = tl.load(lines[:, None] + (k + ks)[None, :], live[:, None], other=0.0)
            if INTERPRETED:
                w = w.to(tl.float32)
                a = a.to(tl.float32)
            elif scale is not None:
                w = w.to(DTYPE)
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
        if scale is not None:
            total *= tl.load(scale + expert * N + sources)[:, None]
        if bias is not None:
            total += tl.load(bias + expert * N + sources).to(tl.float32)[:, None]
        out = tl.trans(total)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        if ACTIVATION == 3:
            gate, up = tl.split(tl.reshape(out, [BLOCK_M, COLUMNS, 2]))
            gate, up = tl.minimum(gate, limit), tl.clamp(up, -limit, limit)
            out = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
        elif GATED:
            gate, up = tl.split(tl.permute(tl.reshape(out, [BLOCK_M, 2, COLUMNS]), [0, 2, 1]))
            out = gated(gate, up, ACTIVATION == 2)
        if DOWN:
            out *= tl.load(shares + pair, live, 0.0)[:, None]
            place = pair
        tl.store(
            y + place.to(tl.int64)[:, None] * OUTPUTS + columns[None, :],
            round_to(out, DTYPE),
            live[:, None] & (columns < OUTPUTS)[None, :],
        )


@triton.jit
def _sum_kernel(
    y,  # [T, k, H]
    ids,  # int32 [T, k]
    extra,  # [T, H]; or None
    out,  # [T, H]
    extra_stride,
    H: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row, column, inside = row_part(H, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if tl.load(ids + row * TOP_K) < E:
        for j in tl.static_range(TOP_K):
            total += tl.load(y + (row * TOP_K + j) * H + column, inside, 0.0).to(tl.float32)
    if extra is not None:
        total += tl.load(extra + row * extra_stride + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * H + column, round_to(total, out.dtype.element_ty), inside)


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
    """logits [T, E]; sizes [S] int64: rows of each span, all rows if None."""
    (rows, count), top_k, device = logits.shape, routing.top_k, logits.device
    pdl = supports_pdl(device)
    number = rows * top_k
    places = torch.empty(2 * number, dtype=torch.int32, device=device)
    ids, pairs = places[:number].view(rows, top_k), places[number:]
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    width = triton.next_power_of_2(count)
    block = min(max(_ROUTED_CELLS // width, 1), triton.next_power_of_2(rows))
    spans = 0 if sizes is None else sizes.shape[0]
    _route_kernel[(triton.cdiv(rows, block),)](
        logits, routing.scale, sizes, ids, weights, rows, logits.stride(0), spans,
        E=count, TOP_K=top_k, NORMALIZED=routing.normalized, BLOCK=block, WIDTH=width,
        SPANS=triton.next_power_of_2(max(spans, 1)), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    if by_pair:
        return Routed(ids, weights, None, None, number)
    # A row's experts are distinct, so that each expert has at most `rows` pairs.
    num_blocks = min(number, number // block_m + count, count * -(-rows // block_m))
    blocks = torch.empty(num_blocks, 3, dtype=torch.int32, device=device)
    _sort_kernel[(count + 1,)](
        ids, pairs, blocks, number, num_blocks, E=count, BINS=triton.next_power_of_2(count + 1),
        WIDTH=triton.next_power_of_2(number),
        STEPS=max(triton.next_power_of_2(triton.cdiv(rows, block_m)), 64), BLOCK_M=block_m,
        PDL=pdl, num_warps=8 if number > 1024 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return Routed(ids, weights, pairs, blocks, num_blocks)


def grouped(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    routed: Routed,
    tile: tuple[int, int, int, int],
    block_m: int,
    activation: Gate | None,
    *,
    warmup: bool = False,
) -> Tensor:
    """x [T, H] -> [P, I] by the first GEMM, which has an activation, or [P, I] -> [P, H] by the
    second. `warmup` only compiles the kernel."""
    (count, n, k), number = weight.data.shape, routed.ids.numel()
    outputs = n if activation is None else n // 2
    block_n, block_k, warps, stages = tile
    y = x.new_empty(number, outputs)
    pdl = supports_pdl(x.device)
    grid = (triton.cdiv(n, block_n) * routed.num_blocks,)
    kernel = _grouped_kernel.warmup if warmup else _grouped_kernel[grid]
    options: dict[str, Any] = {"grid": grid} if warmup else {}
    kernel(
        x, weight.data, weight.scale, bias, routed.ids, routed.pairs, routed.blocks,
        routed.weights, y, x.stride(0), 0.0 if activation is None else activation.limit,
        N=n, K=k, E=count, TOP_K=routed.ids.shape[1], BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, ACTIVATION=_ACTIVATIONS[activation.name] if activation else 0,
        DOWN=activation is None, DTYPE=DTYPES[x.dtype], PDL=pdl, num_warps=warps,
        num_stages=stages, launch_pdl=pdl, **options,
    )  # fmt: skip
    return y


def experts(
    x: Tensor,
    logits: Tensor,
    routing: Routing,
    gate_up: tuple[Weight, Tensor | None],
    down: tuple[Weight, Tensor | None],
    activation: Gate,
    extra: Tensor | None,
    sizes: Tensor | None = None,
    config: ExpertsConfig | None = None,
) -> Tensor:
    """x [T, H], logits [T, E], weights and biases of the experts, extra [T, H] -> extra + the
    weighted outputs of each row's experts [T, H]. sizes [S] int64: rows of each span; rows after
    them are padding and choose no experts. config: the table's if None."""
    if config is None:
        config = choose(x.shape[0], gate_up[0].data.shape, x.dtype, x.device)
    routed = route(logits, routing, sizes, config.block_m, by_pair=config.by_pair)
    inner = grouped(x, *gate_up, routed, config.gate_up, config.block_m, activation)
    y = grouped(inner, *down, routed, config.down, config.block_m, None)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size = x.shape
    block = min(triton.next_power_of_2(size), 512 if rows <= 64 else 2048)
    pdl = supports_pdl(x.device)
    _sum_kernel[(rows, triton.cdiv(size, block))](
        y, routed.ids, extra, out, 0 if extra is None else extra.stride(0), H=size,
        E=logits.shape[1], TOP_K=routing.top_k, BLOCK=block, PDL=pdl,
        num_warps=4 if block > 512 else 2, launch_pdl=pdl,
    )  # fmt: skip
    return out
