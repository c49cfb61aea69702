# pyright: basic, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""The grouped GEMM of experts in codes, whose values exist only in registers: `experts.py` with
weights of `coded.py`. A value is rounded once to x's dtype before it is multiplied.

Two codes of 4 bits in a byte belong to neighboring columns, so that a tile of bytes is two tiles of
values, which multiply the even and the odd columns of x. Scales and zeros are loaded once per group
and spread over its columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strobe.kernels.coded import CodedExperts, constants, decode, load_factor
from strobe.kernels.experts_tile import block_of, columns_of, finish, weight_rows
from strobe.kernels.gemm import INTERPRETED
from strobe.kernels.pdl import pdl_wait


@triton.jit
def _by_column(
    pointer, lines, k,
    BYTES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Load what the groups of columns k to k + BLOCK_K share -> [BN, 1] if that is one group, else
    [BN, BYTES]. lines [BN, 1]: where the groups of each row begin."""
    PER: tl.constexpr = BLOCK_K // GROUP
    if (GROUP >= BLOCK_K and GROUP % BLOCK_K == 0) or GROUPS == 1:
        values = tl.load(pointer + lines + k // GROUP)
    elif PER * GROUP == BLOCK_K:
        group = k // GROUP + tl.arange(0, PER)[None, :]
        values = tl.load(pointer + lines + group, group < GROUPS, other=0)
        values = tl.broadcast_to(values[:, :, None], [BLOCK_N, PER, BYTES // PER])
        values = tl.reshape(values, [BLOCK_N, BYTES])
    else:
        column = k + tl.arange(0, BYTES)[None, :] * (BLOCK_K // BYTES)
        group = column // GROUP
        values = tl.load(pointer + lines + group, group < GROUPS, other=0)
    return values


@triton.jit
def coded_experts_kernel(
    x, codes, scale, zero, factor,  # of a weight [E * N, K], see `Codes`
    bias, ids, pairs, blocks, shares, y, x_stride, limit,  # as of `experts._grouped_kernel`
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    LINE: tl.constexpr,  # bytes of a row
    KIND: tl.constexpr, HALVES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, MIDDLE: tl.constexpr, DIVIDES: tl.constexpr, FACTOR_ROWS: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr, DOWN: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TAIL: tl.constexpr = K % BLOCK_K != 0
    BYTES: tl.constexpr = BLOCK_K // 2 if HALVES else BLOCK_K
    tile = tl.program_id(0) % TILES
    block = tl.program_id(0) // TILES
    ms = tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    places = tl.arange(0, BYTES)
    sources = weight_rows(tile, tl.arange(0, BLOCK_N), N, BLOCK_N, ACTIVATION)
    pdl_wait(PDL)
    expert, first, size = block_of(ids, pairs, blocks, block, E)
    if size > 0:
        live = ms < size
        place = first + ms
        pair = place
        if pairs is not None:
            pair = tl.load(pairs + place, live, 0)
        source = place if DOWN else pair // TOP_K
        lines = x + source.to(tl.int64) * x_stride
        row = expert.to(tl.int64) * N + sources[:, None]
        spots = codes + row * LINE + places[None, :]
        groups = row // ROWS * GROUPS
        of_rows = load_factor(factor, row, FACTOR_ROWS)
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            byte = k // 2 if HALVES else k
            if TAIL:
                code = tl.load(spots + byte, (byte + places < LINE)[None, :], other=0)
            else:
                code = tl.load(spots + byte)
            code = code.to(tl.int32)
            by_group = _by_column(scale, groups, k, BYTES, BLOCK_N, BLOCK_K, GROUP, GROUPS)
            offset = 0
            if zero is not None:
                offset = _by_column(zero, groups, k, BYTES, BLOCK_N, BLOCK_K, GROUP, GROUPS)
                offset = offset.to(tl.float32)
            a = columns_of(lines, live, k, ks, K, TAIL)
            if HALVES:
                even, odd = tl.split(tl.reshape(a, [BLOCK_M, BYTES, 2]))
                w = decode(code & 15, by_group, offset, of_rows, KIND, MIDDLE, DIVIDES)
                total = _multiply(w, even, total, DTYPE)
                w = decode(code >> 4, by_group, offset, of_rows, KIND, MIDDLE, DIVIDES)
                total = _multiply(w, odd, total, DTYPE)
            else:
                w = decode(code, by_group, offset, of_rows, KIND, MIDDLE, DIVIDES)
                total = _multiply(w, a, total, DTYPE)
        finish(
            total, bias, shares, y, expert, sources, pair, place, live, tile, limit,
            N=N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, ACTIVATION=ACTIVATION, DOWN=DOWN, DTYPE=DTYPE,
        )  # fmt: skip


@triton.jit
def _multiply(w, a, total, DTYPE: tl.constexpr):
    """Return `total` plus w times the transposed a."""
    w = w.to(DTYPE)
    if INTERPRETED:
        w = w.to(tl.float32)
    return tl.dot(w, tl.trans(a), total, input_precision="ieee")


def coded_options(weight: CodedExperts, block_k: int) -> dict[str, object]:
    """Return the kernel's constants for a weight."""
    line = weight.codes.codes.shape[1]
    return {**constants(weight.codes), "N": weight.shape[1], "LINE": line, "BLOCK_K": block_k}
