# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""The grouped GEMM of experts in MXFP4 and bfloat16 on GPUs, in Gluon: its layouts bring each value
from its word to the register where the tensor core reads it. W is the left operand, rows of x the
right one. `experts._grouped_kernel` does the same in other dtypes and in the interpreter.

A step is 128 columns: 16 words of a row, which `_UNPACK` unpacks as `unpack.py` orders them.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from strobe.kernels.gluon_barriers import barrier, wait

# A word and a power of two, times 2^62, to eight values in bfloat16, divided by 2^64: their bits
# are multiplied by up to 2^192, and bfloat16 ends at 2^127.
_UNPACK = gl.constexpr(
    """
    {
    .reg .b32 bits, sign, scale, zero;
    mov.b32 zero, 0x80008000;
    mov.b32 scale, {$9, $9};
    and.b32 bits, $8, 0x81C081C0;
    fma.rn.bf16x2 bits, bits, scale, zero;
    mov.b32 {$0, $1}, bits;
    shl.b32 bits, $8, 3;
    and.b32 bits, bits, 0x81C081C0;
    fma.rn.bf16x2 bits, bits, scale, zero;
    mov.b32 {$2, $3}, bits;
    and.b32 bits, $8, 0x20072007;
    mul.lo.u32 bits, bits, 68;  // sizes << 6 and signs << 2
    and.b32 bits, bits, 0x81C081C0;
    fma.rn.bf16x2 bits, bits, scale, zero;
    mov.b32 {$4, $5}, bits;
    shl.b32 sign, $8, 1;
    shr.b32 bits, $8, 3;
    and.b32 bits, bits, 0x01C001C0;
    lop3.b32 bits, sign, 0x80008000, bits, 0xEA;
    fma.rn.bf16x2 bits, bits, scale, zero;
    mov.b32 {$6, $7}, bits;
    }
    """
)
_EIGHT = gl.constexpr((gl.bfloat16,) * 8)


@gluon.constexpr_function
def _words_layout(block_n, warps):
    """Return the layout of words [BLOCK_N, 16] whose values are in place for the tensor cores."""
    rows = [[step, 0] for step in (16 * warps << i for i in range(8)) if step < block_n]
    warp = [[step, 0] for step in (16 << i for i in range(8)) if step < 16 * warps]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [8, 0], *rows], lanes, warp, [], [block_n, 16]
    )


@gluon.jit
def _row(slot, tile, N: gl.constexpr, BLOCK_N: gl.constexpr, ACTIVATION: gl.constexpr):
    """Return the row of W of a row of the tile; rows past the end repeat the last one and are not
    stored. Rows r and r + 8 of each 16 are the gate and the up row of an output, so that a thread
    has both."""
    if ACTIVATION == 0:
        row = gl.minimum(tile * BLOCK_N + slot, N - 1)
    else:
        column = gl.minimum(tile * (BLOCK_N // 2) + slot // 16 * 8 + slot % 8, N // 2 - 1)
        up = slot % 16 // 8
        row = column * 2 + up if ACTIVATION == 3 else column + up * (N // 2)
    return row


@gluon.jit
def _wait_for_step(STAGES: gl.constexpr, WGMMA: gl.constexpr):
    """Wait for a step's tiles, while the next ones still load."""
    async_copy.wait_group(STAGES - 2)
    if WGMMA:
        hopper.fence_async_shared()
        barrier()


@gluon.jit
def _load_weights(step, slot, spots, scales, ws, ss, N: gl.constexpr, inside):
    """Start to load a step's words and exponents into shared memory. inside: [1, 16], of words."""
    async_copy.async_copy_global_to_shared(ws.index(slot), spots + step * 16, inside)
    async_copy.async_copy_global_to_shared(ss.index(slot), scales + step * N)


@gluon.jit
def _load_rows(step, slot, lines, xs, inside):
    """Start to load a step's columns of x, zeros where not `inside`; its copies are a group now."""
    async_copy.async_copy_global_to_shared(xs.index(slot), lines + step * 128, inside)
    async_copy.commit_group()


@gluon.jit
def _multiply(total, slot, ws, ss, xs, WORDS: gl.constexpr, WGMMA: gl.constexpr):
    """Return `total` plus the product of a step's tiles."""
    BLOCK_N: gl.constexpr = total.shape[0]
    MMA: gl.constexpr = total.type.layout
    word = gl.arange(0, 16, gl.SliceLayout(0, WORDS))
    shift = (word // 8 * 2 + word % 2) * 8
    w = ws.index(slot).load(WORDS)
    power = ss.index(slot).load(gl.SliceLayout(1, WORDS))[:, None] >> shift[None, :]
    power = ((power & 255) << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        _UNPACK, "=h,=h,=h,=h,=h,=h,=h,=h,r,h", [w, power], _EIGHT, is_pure=True, pack=1
    )
    w = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    # Rows, bits of the word's number (64, lane, 32), and of the value's (1, 8, 16).
    w = gl.permute(gl.reshape(w, [BLOCK_N, 2, 4, 2, 2, 2, 2]), (0, 3, 6, 5, 2, 4, 1))
    for i in gl.static_range(2):
        part = gl.reshape(gl.split(w)[i], [BLOCK_N, 64])
        part = gl.convert_layout(part, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
        right = xs.index(slot).slice(64 * i, 64, 1).permute((1, 0))
        if WGMMA:
            total = hopper.warpgroup_mma(part, right, total, is_async=True)
        else:
            total = mma_v2(part, right.load(gl.DotOperandLayout(1, MMA, 2)), total)
    if WGMMA:
        total = hopper.warpgroup_mma_wait(0, deps=[total])
    return total


@gluon.jit
def _tile(
    x, weight, scale, bias, pairs, shares, y, x_stride, limit, expert, first, size, tile,
    N: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    DOWN: gl.constexpr,
    WGMMA: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = BLOCK_N if ACTIVATION == 0 else BLOCK_N // 2
    OUTPUTS: gl.constexpr = N if ACTIVATION == 0 else N // 2
    LINE: gl.constexpr = (K + 63) // 64 * 8  # words of a row
    STEPS: gl.constexpr = (K + 127) // 128
    FULL: gl.constexpr = max(K // 128 - STAGES + 1, 0)  # steps that start to load a whole step
    WARPS: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = _words_layout(BLOCK_N, WARPS)
    COPY_W: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    COPY_X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    COPY_S: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    MMA: gl.constexpr = (
        gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
        if WGMMA
        else gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    )
    SHARED_X: gl.constexpr = (
        gl.NVMMASharedLayout(128, 16, 2) if WGMMA else gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    SHARED_W: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    SHARED_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, 16], SHARED_W)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, 128], SHARED_X)
    ss = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], SHARED_S)

    ms = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY_X))
    live = (ms < size)[:, None]
    source = first + ms
    if not DOWN:
        if pairs is not None:
            source = gl.load(pairs + source, ms < size, 0)
        source = source // TOP_K
    column = gl.arange(0, 128, gl.SliceLayout(0, COPY_X))[None, :]
    lines = x + source.to(gl.int64)[:, None] * x_stride + column
    row = _row(gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_W)), tile, N, BLOCK_N, ACTIVATION)
    word = gl.arange(0, 16, gl.SliceLayout(0, COPY_W))[None, :]
    spots = weight + expert.to(gl.int64) * (N * LINE) + row[:, None] * LINE + word
    row = _row(gl.arange(0, BLOCK_N, COPY_S), tile, N, BLOCK_N, ACTIVATION)
    scales = scale + expert.to(gl.int64) * (STEPS * N) + row

    for i in gl.static_range(min(STAGES - 1, STEPS)):
        _load_weights(i, i, spots, scales, ws, ss, N, word + i * 16 < LINE)
    if DOWN:  # only x is of the previous kernel
        wait(PDL)
    for i in gl.static_range(STAGES - 1):
        _load_rows(i, i, lines, xs, live & (column + i * 128 < K))
    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    slot = 0
    last = STAGES - 1
    for step in range(FULL):
        _wait_for_step(STAGES, WGMMA)
        _load_weights(step + STAGES - 1, last, spots, scales, ws, ss, N, None)
        _load_rows(step + STAGES - 1, last, lines, xs, live)
        total = _multiply(total, slot, ws, ss, xs, WORDS, WGMMA)
        last = slot
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    for ahead in gl.static_range(FULL + STAGES - 1, STEPS + STAGES - 1):
        _wait_for_step(STAGES, WGMMA)
        if ahead < STEPS:
            _load_weights(ahead, last, spots, scales, ws, ss, N, word + ahead * 16 < LINE)
            _load_rows(ahead, last, lines, xs, live & (column + ahead * 128 < K))
        else:
            async_copy.commit_group()
        total = _multiply(total, slot, ws, ss, xs, WORDS, WGMMA)
        last = slot
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)

    total *= 2.0**64
    if bias is not None:
        row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
        row = _row(row, tile, N, BLOCK_N, ACTIVATION)
        total += gl.load(bias + expert * N + row).to(gl.float32)[:, None]
    if ACTIVATION > 0:
        total = gl.reshape(total, [BLOCK_N // 16, 2, 8, BLOCK_M])
        gate, up = gl.split(gl.permute(total, (0, 2, 3, 1)))
        slope = gate
        if ACTIVATION == 2:  # tanh(u) = 2 sigmoid(2 u) - 1
            slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        elif ACTIVATION == 3:
            gate = gl.minimum(gate, limit)
            up = gl.minimum(gl.maximum(up, -limit), limit) + 1.0
            slope = 1.702 * gate
        total = gl.reshape(up * gate / (1.0 + gl.exp(-slope)), [COLUMNS, BLOCK_M])
    WIDE: gl.constexpr = min(COLUMNS // 8, 32)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [WIDE, 32 // WIDE], [1, WARPS], [0, 1])
    out = gl.convert_layout(total, OUT)
    ms = gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
    live = ms < size
    place = first + ms
    if DOWN:
        if pairs is not None:
            place = gl.load(pairs + place, live, 0)
        out *= gl.load(shares + place, live, 0.0)[None, :]
    columns = tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, OUT))
    spots = y + place.to(gl.int64)[None, :] * OUTPUTS + columns[:, None]
    gl.store(spots, out.to(gl.bfloat16), live[None, :] & (columns < OUTPUTS)[:, None])


@gluon.jit
def mxfp4_kernel(
    x,  # as of `experts._grouped_kernel`
    weight,  # int32
    scale,
    bias,
    ids,
    pairs,
    blocks,
    shares,
    y,
    x_stride,
    limit,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    FEW: gl.constexpr,  # a block of at most so many rows takes a smaller tile
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    DOWN: gl.constexpr,
    WGMMA: gl.constexpr,  # Hopper's instructions for four warps
    PDL: gl.constexpr,
):
    TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = gl.program_id(0) % TILES
    block = gl.program_id(0) // TILES
    if not DOWN:
        wait(PDL)
    if pairs is None:
        expert = gl.load(ids + block)
        first = block
        size = gl.where(expert < E, 1, 0)
    else:
        expert = gl.load(blocks + block * 3)
        first = gl.load(blocks + block * 3 + 1)
        size = gl.load(blocks + block * 3 + 2)
    if FEW < BLOCK_M and size > FEW:
        _tile(
            x, weight, scale, bias, pairs, shares, y, x_stride, limit, expert, first, size, tile,
            N, K, TOP_K, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, DOWN, WGMMA, PDL,
        )  # fmt: skip
    elif size > 0:
        _tile(
            x, weight, scale, bias, pairs, shares, y, x_stride, limit, expert, first, size, tile,
            N, K, TOP_K, FEW, BLOCK_N, STAGES, ACTIVATION, DOWN, WGMMA, PDL,
        )  # fmt: skip
    elif DOWN:
        wait(PDL)


def instructions(block_m: int) -> dict[str, int | bool]:
    """Return FEW and WGMMA. Every block of a launch has the same instructions, since a row's bits
    must not depend on the number of rows in its block."""
    is_hopper = triton.runtime.driver.active.get_current_target().arch // 10 == 9
    few = block_m if block_m <= 32 else block_m // 2
    return {"FEW": few, "WGMMA": is_hopper and block_m >= 32}
