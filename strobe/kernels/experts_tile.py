# pyright: basic, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""Common parts of the grouped GEMMs of experts: a program's rows of W and of x, and the epilogue.
Legend as in `experts.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strobe.kernels.gemm import INTERPRETED
from strobe.kernels.rowwise import gated, round_to


@triton.jit
def weight_rows(tile, ws, N: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the rows of W in a tile. Rows past the end repeat the last one and are not stored."""
    GATED: tl.constexpr = ACTIVATION > 0
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    OUTPUTS: tl.constexpr = N // 2 if GATED else N
    if ACTIVATION == 3:  # gate and up rows take turns
        sources = tl.minimum(tile * BLOCK_N + ws, N - 1)
    elif GATED:
        sources = tl.minimum(tile * COLUMNS + ws % COLUMNS, OUTPUTS - 1) + ws // COLUMNS * OUTPUTS
    else:
        sources = tl.minimum(tile * BLOCK_N + ws, N - 1)
    return sources


@triton.jit
def block_of(ids, pairs, blocks, block, E: tl.constexpr):
    """Return a block's expert, its first place and its number of rows."""
    if pairs is None:
        expert = tl.load(ids + block)
        first = block
        size = tl.where(expert < E, 1, 0)
    else:
        expert = tl.load(blocks + block * 3)
        first = tl.load(blocks + block * 3 + 1)
        size = tl.load(blocks + block * 3 + 2)
    return expert, first, size


@triton.jit
def columns_of(lines, live, k, ks, K: tl.constexpr, TAIL: tl.constexpr):
    """Load columns k + ks of rows of x; zeros past the end and for rows not live."""
    inside = live[:, None]
    if TAIL:
        inside = inside & (k + ks < K)[None, :]
    a = tl.load(lines[:, None] + (k + ks)[None, :], inside, other=0.0)
    if INTERPRETED:
        a = a.to(tl.float32)
    return a


@triton.jit
def finish(
    total,  # [BLOCK_N, BLOCK_M]
    bias, shares, y, expert, sources, pair, place, live, tile, limit,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr,
    DOWN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the bias, apply the activation or the rows' weights, and store."""
    GATED: tl.constexpr = ACTIVATION > 0
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    OUTPUTS: tl.constexpr = N // 2 if GATED else N
    if bias is not None:
        total += tl.load(bias + expert * N + sources).to(tl.float32)[:, None]
    out = tl.trans(total)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    if ACTIVATION == 3:
        gate, up = tl.split(tl.reshape(out, [BLOCK_M, COLUMNS, 2]))
        gate = tl.minimum(gate, limit)
        up = tl.clamp(up, -limit, limit)
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
