# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false
"""Products of bfloat16 with weights in int4, e2m1 and e4m3 on GPUs, in Gluon: its layouts decode
each code in the thread that holds its value for the tensor core, and copies are in flight while
values are multiplied. `coded._gemm_kernel` does the same for other forms and in the interpreter.

W is the left operand, rows of x the right one. In a tensor core's tile a thread has words t,
t + 4, ... of a row, where t is its place among four threads. So 4 words are the columns of one or
two multiplications, in an order that x follows: in registers for few rows of x, by `order_kernel`
for more, since Hopper's instructions for four warps read x from shared memory.

Codes without their scale are exact in bfloat16. A scale multiplies the float32 sum over its group,
or values, which are then rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from strobe.kernels.gluon_barriers import barrier, wait
from strobe.kernels.pdl import pdl_wait

_START = """
    {
    .reg .b32 bits, size, scale, zero, none;
    mov.b32 none, 0x80008000;
"""


def _outputs(place: int) -> str:
    """Return PTX that moves `bits` to two results."""
    return f"mov.b32 {{${2 * place}, ${2 * place + 1}}}, bits;\n"


def _int4(*, scaled: bool) -> str:
    """Return PTX: a word and -(128 + zero) to values j and j + 4, from 128 + code; then times a
    scale."""
    text = _START + "mov.b32 size, 0x3F803F80;\nmov.b32 zero, {$9, $9};\n"
    if scaled:
        text += "mov.b32 scale, {$10, $10};\n"
    for j in range(4):
        source = "$8"
        if j > 0:
            text += f"shr.b32 bits, $8, {4 * j};\n"
            source = "bits"
        text += f"lop3.b32 bits, {source}, 0x000F000F, 0x43004300, 0xEA;\n"
        text += "fma.rn.bf16x2 bits, bits, size, zero;\n"
        if scaled:
            text += "fma.rn.bf16x2 bits, bits, scale, none;\n"
        text += _outputs(j)
    return text + "}"


def _e2m1() -> str:
    """Return PTX: a word, 4 scales in e4m3 and the selection of one to values j and j + 4, times
    2**-8. Sizes are bfloat16 divided by 2**126, and the scale is multiplied by 2**118."""
    text = _START + "prmt.b32 scale, $9, 0, $10;\nshl.b32 scale, scale, 4;\n"
    text += "and.b32 scale, scale, 0x87F087F0;\n"
    text += "mov.b32 zero, 0x7B807B80;\nfma.rn.bf16x2 scale, scale, zero, none;\n"
    text += "mov.b32 zero, 0x7A807A80;\nfma.rn.bf16x2 scale, scale, zero, none;\n"
    for j in range(4):
        sign = 12 - 4 * j
        size = 6 - 4 * j
        text += f"shl.b32 bits, $8, {sign};\n"
        text += f"sh{'l' if size > 0 else 'r'}.b32 size, $8, {abs(size)};\n"
        text += "and.b32 size, size, 0x01C001C0;\n"
        text += "lop3.b32 bits, bits, 0x80008000, size, 0xEA;\n"
        text += "fma.rn.bf16x2 bits, bits, scale, none;\n"
        text += _outputs(j)
    return text + "}"


def _e4m3() -> str:
    """Return PTX: a word to its values j and j + 2."""
    text = _START + "mov.b32 zero, 0x7B807B80;  // 2^120, twice\n"
    for j in range(2):
        shift = "shl.b32 size, $4, 4;\n" if j == 0 else "shr.b32 size, $4, 4;\n"
        text += shift + "and.b32 size, size, 0x07F007F0;\n"
        text += "shl.b32 bits, $4, 8;\n" if j == 0 else "mov.b32 bits, $4;\n"
        text += "lop3.b32 bits, bits, 0x80008000, size, 0xEA;\n"
        text += "fma.rn.bf16x2 bits, bits, zero, none;\n"
        text += _outputs(j)
    return text + "}"


_INT4 = gl.constexpr(_int4(scaled=False))
_INT4_SCALED = gl.constexpr(_int4(scaled=True))
_E2M1 = gl.constexpr(_e2m1())
_E4M3 = gl.constexpr(_e4m3())
_FOUR = gl.constexpr((gl.bfloat16,) * 4)
_EIGHT = gl.constexpr((gl.bfloat16,) * 8)


@gluon.constexpr_function
def _bits(first, last):
    """Return powers of two from first to below last."""
    return [first << i for i in range(12) if first << i < last]


@gluon.constexpr_function
def _words_layout(block_n, words, warps):
    """Return the layout of words [BLOCK_N, words] whose values are in place for the tensor core."""
    registers = [[0, step] for step in _bits(4, words)]
    registers += [[8, 0]] + [[step, 0] for step in _bits(16 * warps, block_n)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    warp = [[step, 0] for step in _bits(16, 16 * warps)]
    return gl.DistributedLinearLayout(registers, lanes, warp, [], [block_n, words])


@gluon.constexpr_function
def _rows_layout(block_m, columns, per, warps):
    """Return the layout of x [BLOCK_M, columns] whose values are in place for the tensor core."""
    registers = [[0, step] for step in _bits(1, per)] + [
        [0, step] for step in _bits(4 * per, columns)
    ]
    registers += [[step, 0] for step in _bits(8, block_m)]
    lanes = [[0, per], [0, 2 * per], [1, 0], [2, 0], [4, 0]]
    warp = [[0, 0] for _ in _bits(1, warps)]
    return gl.DistributedLinearLayout(registers, lanes, warp, [], [block_m, columns])


@gluon.jit
def _source(slot, tile, N: gl.constexpr, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """Return the row of W of a row of the tile; rows past the end repeat the last one and are not
    stored. Gated: rows r and r + 8 of each 16 are the gate and the up row of an output, so that a
    thread has both."""
    if GATED:
        column = gl.minimum(tile * (BLOCK_N // 2) + slot // 16 * 8 + slot % 8, N - 1)
        row = column + slot % 16 // 8 * N
    else:
        row = gl.minimum(tile * BLOCK_N + slot, N - 1)
    return row


@gluon.jit
def _ordered_rows(x, HALVES: gl.constexpr):
    """x [M, C] -> [M, C], in the order of the values in a tensor core."""
    M: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    if HALVES:
        x = gl.reshape(x, [M, C // 32, 4, 2, 2, 2])
        x = gl.permute(x, (0, 1, 4, 5, 2, 3))
    else:
        x = gl.reshape(x, [M, C // 16, 4, 2, 2])
        x = gl.permute(x, (0, 1, 4, 2, 3))
    return gl.reshape(x, [M, C])


@gluon.jit
def _values(words, scale, zero, KIND: gl.constexpr):
    """words [N, W] -> values [N, W * PER] in bfloat16, in the order of a tensor core."""
    N: gl.constexpr = words.shape[0]
    W: gl.constexpr = words.shape[1]
    if KIND == "e4m3":
        a, b, c, d = gl.inline_asm_elementwise(
            _E4M3, "=h,=h,=h,=h,r", [words], _FOUR, is_pure=True, pack=1
        )
        v = gl.join(gl.join(a, b), gl.join(c, d))
        v = gl.permute(gl.reshape(v, [N, W // 4, 4, 2, 2]), (0, 1, 4, 2, 3))
    else:
        if KIND == "e2m1":
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                _E2M1, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, scale, zero], _EIGHT,
                is_pure=True, pack=1,
            )  # fmt: skip
        elif scale is None:
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                _INT4, "=h,=h,=h,=h,=h,=h,=h,=h,r,h", [words, zero], _EIGHT, is_pure=True, pack=1
            )
        else:
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                _INT4_SCALED, "=h,=h,=h,=h,=h,=h,=h,=h,r,h,h", [words, zero, scale], _EIGHT,
                is_pure=True, pack=1,
            )  # fmt: skip
        v = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
        v = gl.permute(gl.reshape(v, [N, W // 4, 4, 2, 2, 2]), (0, 1, 5, 4, 2, 3))
    return gl.reshape(v, [N, W * (4 if KIND == "e4m3" else 8)])


@gluon.jit
def _by_chunk(pointer, row, step, STEP: gl.constexpr, CHUNK: gl.constexpr, GROUP: gl.constexpr):
    """Load what rows share in each chunk of a step."""
    result = ()
    for i in gl.static_range(STEP // CHUNK):
        result = result + (gl.load(pointer + row + (step * STEP + i * CHUNK) // GROUP),)  # noqa: RUF005
    return result


@gluon.jit
def _copy(step, slot, spots, scales, ws, ss, WORDS: gl.constexpr, inside):
    """Start to load a step's words, and scales that are in shared memory."""
    async_copy.async_copy_global_to_shared(ws.index(slot), spots + step * WORDS, inside)
    if scales is not None:
        async_copy.async_copy_global_to_shared(ss.index(slot), scales + step * (WORDS // 8), inside)


@gluon.jit
def _decode(
    slot, i: gl.constexpr, j: gl.constexpr, ws, ss, own, own_zero,
    KIND: gl.constexpr, MIDDLE: gl.constexpr, SCALED: gl.constexpr, CHUNK: gl.constexpr,
    PART: gl.constexpr, CODES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Return values of part j of chunk i as the left operand."""
    PER: gl.constexpr = 4 if KIND == "e4m3" else 8
    BLOCK_N: gl.constexpr = ws.shape[1]
    if KIND == "e2m1":
        of_values = ss.index(slot).slice(i, 1, 1).load(CODES)
        byte = gl.arange(0, PART // PER, gl.SliceLayout(0, CODES)) // 2
        offset = (byte * 0x1111 + 0x8080)[None, :]
    elif KIND == "int4":
        of_values = own[i].to(gl.bfloat16)[:, None] if SCALED else None
        offset = gl.full([BLOCK_N], -128.0 - MIDDLE, gl.float32, gl.SliceLayout(1, CODES))
        if len(own_zero) > 0:
            offset -= own_zero[i].to(gl.float32)
        offset = offset.to(gl.bfloat16)[:, None]
    else:
        of_values = None
        offset = None
    w = ws.index(slot).slice((i * CHUNK + j * PART) // PER, PART // PER, 1).load(CODES)
    w = _values(w, of_values, offset, KIND)
    return gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _finished(
    total, scale, groups, factor, bias, row,
    KIND: gl.constexpr, GROUPS: gl.constexpr, DIVIDES: gl.constexpr, FACTOR_ROWS: gl.constexpr,
    GATED: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Return act(sums and bias) of a tile, [BLOCK_N or half of it, BLOCK_M]. row: rows of W."""
    BLOCK_N: gl.constexpr = total.shape[0]
    BLOCK_M: gl.constexpr = total.shape[1]
    if KIND == "e2m1":
        total *= 256.0  # see `_e2m1`
    elif GROUPS == 1:
        total *= gl.load(scale + groups).to(gl.float32)[:, None]
    if factor is not None:
        if FACTOR_ROWS:  # noqa: SIM108
            of_rows = gl.load(factor + row // FACTOR_ROWS)[:, None]
        else:
            of_rows = gl.load(factor)
        total = total / of_rows if DIVIDES else total * of_rows
    if bias is not None:
        total += gl.load(bias + row).to(gl.float32)[:, None]
    if GATED:
        pairs = gl.reshape(total, [BLOCK_N // 16, 2, 8, BLOCK_M])
        gate, up = gl.split(gl.permute(pairs, (0, 2, 3, 1)))
        slope = gate
        if GELU:  # tanh(u) = 2 sigmoid(2 u) - 1
            slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gl.reshape(up * gate / (1.0 + gl.exp(-slope)), [BLOCK_N // 2, BLOCK_M])
    else:
        result = total
    return result


@gluon.jit
def _store(
    result, residual, out, first_row, rows, tile, residual_stride, out_stride, N: gl.constexpr
):
    """Store a tile's result plus the residual, rounded once."""
    COLUMNS: gl.constexpr = result.shape[0]
    LAYOUT: gl.constexpr = result.type.layout
    ms = first_row + gl.arange(0, result.shape[1], gl.SliceLayout(0, LAYOUT))
    columns = tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    stored = (ms < rows)[None, :] & (columns < N)[:, None]
    if residual is not None:
        spots = residual + ms.to(gl.int64)[None, :] * residual_stride + columns[:, None]
        result += gl.load(spots, stored, 0.0).to(gl.float32)
    spots = out + ms.to(gl.int64)[None, :] * out_stride + columns[:, None]
    gl.store(spots, result.to(gl.bfloat16), stored)


@gluon.jit
def tiles_kernel(
    x,  # [M, K]
    words,  # int32 [rows, K / PER]
    scale,  # e2m1: int32, 4 scales each
    zero, factor, bias, residual, out, partials, arrivals,
    rows, x_stride, residual_stride, out_stride,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    GROUPS: gl.constexpr, MIDDLE: gl.constexpr, DIVIDES: gl.constexpr, FACTOR_ROWS: gl.constexpr,
    GATED: gl.constexpr, GELU: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STEP: gl.constexpr,  # columns of a step
    STAGES: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = KIND != "e4m3"
    PER: gl.constexpr = 8 if HALVES else 4
    LINE: gl.constexpr = K // PER
    WORDS: gl.constexpr = STEP // PER
    STEPS: gl.constexpr = K // STEP
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    IN_SHARED: gl.constexpr = KIND == "e2m1"
    ONE: gl.constexpr = GROUPS == 1
    CHUNK: gl.constexpr = 64 if IN_SHARED else min(GROUP, 128)
    BY_SUM: gl.constexpr = not (IN_SHARED or ONE)
    COPY_WIDTH: gl.constexpr = WORDS // 4  # threads of a row
    COPY_W: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // COPY_WIDTH, COPY_WIDTH], [WARPS, 1], [1, 0]
    )
    COPY_X: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [WARPS, 1], [1, 0])
    COPY_S: gl.constexpr = gl.BlockedLayout([1, STEP // 64], [32, 1], [WARPS, 1], [1, 0])
    CODES: gl.constexpr = _words_layout(BLOCK_N, CHUNK // PER, WARPS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    SHARED_X: gl.constexpr = gl.SwizzledSharedLayout(4 * PER, 1, 64 // (4 * PER), [1, 0])
    SHARED_W: gl.constexpr = gl.SwizzledSharedLayout(
        4, 1 if WORDS >= 32 else 2, min(8, WORDS // 4), [1, 0]
    )
    SHARED_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    split = gl.program_id(0) % SPLIT
    tile = gl.program_id(0) // SPLIT
    start = split * STEPS // SPLIT
    end = (split + 1) * STEPS // SPLIT
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, WORDS], SHARED_W)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, STEP], SHARED_X)

    row = _source(gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_W)), tile, N, BLOCK_N, GATED)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, COPY_W))[None, :]
    spots = words + row.to(gl.int64)[:, None] * LINE + word
    ss = None
    scales = None
    if IN_SHARED:
        ss = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, STEP // 64], SHARED_S)
        row = _source(gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_S)), tile, N, BLOCK_N, GATED)
        place = gl.arange(0, STEP // 64, gl.SliceLayout(0, COPY_S))[None, :]
        scales = scale + row[:, None] * (K // 64) + place
    for i in gl.static_range(STAGES - 1):
        _copy(start + i, i, spots, scales, ws, ss, WORDS, start + i < end)

    value_rows = _source(gl.arange(0, BLOCK_N, gl.SliceLayout(1, CODES)), tile, N, BLOCK_N, GATED)
    value_groups = value_rows // ROWS * GROUPS
    sum_rows = _source(gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA)), tile, N, BLOCK_N, GATED)
    sum_groups = sum_rows // ROWS * GROUPS
    following = ()
    following_zero = ()
    if BY_SUM:
        following = _by_chunk(scale, sum_groups, start, STEP, CHUNK, GROUP)
    if zero is not None:
        following_zero = _by_chunk(zero, value_groups, start, STEP, CHUNK, GROUP)

    wait(PDL)
    ms = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY_X))
    live = (ms < rows)[:, None]
    column = gl.arange(0, STEP, gl.SliceLayout(0, COPY_X))[None, :]
    lines = x + ms.to(gl.int64)[:, None] * x_stride + column
    for i in gl.static_range(STAGES - 1):
        inside = live & (start + i < end)
        async_copy.async_copy_global_to_shared(xs.index(i), lines + (start + i) * STEP, inside)
        async_copy.commit_group()

    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    slot = 0
    last = STAGES - 1
    for step in range(start, end):
        async_copy.wait_group(STAGES - 2)
        barrier()
        ahead = step + STAGES - 1
        _copy(ahead, last, spots, scales, ws, ss, WORDS, ahead < end)
        inside = live & (ahead < end)
        async_copy.async_copy_global_to_shared(xs.index(last), lines + ahead * STEP, inside)
        async_copy.commit_group()
        own = following
        own_zero = following_zero
        next_step = gl.minimum(step + 1, STEPS - 1)
        if BY_SUM:
            following = _by_chunk(scale, sum_groups, next_step, STEP, CHUNK, GROUP)
        if zero is not None:
            following_zero = _by_chunk(zero, value_groups, next_step, STEP, CHUNK, GROUP)
        for i in gl.static_range(STEP // CHUNK):
            part = total
            if BY_SUM:
                part = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
            w = _decode(
                slot, i, 0, ws, ss, (), own_zero, KIND, MIDDLE, False, CHUNK, CHUNK, CODES, MMA
            )  # fmt: skip
            a = xs.index(slot).slice(i * CHUNK, CHUNK, 1)
            a = a.load(_rows_layout(BLOCK_M, CHUNK, PER, WARPS))
            a = gl.permute(_ordered_rows(a, HALVES), (1, 0))
            a = gl.convert_layout(a, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
            part = mma_v2(w, a, part)
            if BY_SUM:
                total += part * own[i].to(gl.float32)[:, None]
            else:
                total = part
        last = slot
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)

    SIZE: gl.constexpr = BLOCK_M * BLOCK_N
    complete = True
    if SPLIT > 1:
        inner = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))[:, None] * BLOCK_M
        inner = inner + gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))[None, :]
        inner = partials + tile.to(gl.int64) * (SPLIT * SIZE) + inner
        gl.store(inner + split * SIZE, total)
        barrier()  # all of this program's stores come before its arrival
        complete = gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1
    if complete:
        if SPLIT > 1:
            gl.store(arrivals + tile, 0)
            total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
            if SPLIT * SIZE <= 2048 * WARPS:  # all are in flight together
                for k in gl.static_range(SPLIT):
                    total += gl.load(inner + k * SIZE, cache_modifier=".cg")
            else:
                for k in range(SPLIT):
                    total += gl.load(inner + k * SIZE, cache_modifier=".cg")
        result = _finished(
            total, scale, sum_groups, factor, bias, sum_rows,
            KIND, GROUPS, DIVIDES, FACTOR_ROWS, GATED, GELU,
        )  # fmt: skip
        WIDE: gl.constexpr = min(COLUMNS // 8, 32)
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [WIDE, 32 // WIDE], [1, WARPS], [0, 1])
        result = gl.convert_layout(result, OUT)
        _store(result, residual, out, 0, rows, tile, residual_stride, out_stride, N)


@gluon.jit
def _load_unit(
    unit, end, slot, x, words, scale, ws, xs, ss, row_tiles,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STEP: gl.constexpr, WORDS: gl.constexpr, GATED: gl.constexpr, COPY_W: gl.constexpr,
    COPY_X: gl.constexpr, COPY_S: gl.constexpr,
):  # fmt: skip
    """Start to load a unit: a step of a tile."""
    STEPS: gl.constexpr = K // STEP
    step = unit % STEPS
    item = unit // STEPS
    tile = item // row_tiles
    inside = unit < end
    row = _source(gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_W)), tile, N, BLOCK_N, GATED)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, COPY_W))[None, :]
    spots = words + row.to(gl.int64)[:, None] * (WORDS * STEPS) + step * WORDS + word
    async_copy.async_copy_global_to_shared(ws.index(slot), spots, inside)
    if ss is not None:
        row = _source(gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_S)), tile, N, BLOCK_N, GATED)
        place = gl.arange(0, STEP // 64, gl.SliceLayout(0, COPY_S))[None, :]
        spots = scale + row[:, None] * (K // 64) + step * (STEP // 64) + place
        async_copy.async_copy_global_to_shared(ss.index(slot), spots, inside)
    ms = item % row_tiles * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY_X))
    column = gl.arange(0, STEP, gl.SliceLayout(0, COPY_X))[None, :]
    lines = x + (ms[:, None] * K + step * STEP + column)
    async_copy.async_copy_global_to_shared(xs.index(slot), lines, inside)
    async_copy.commit_group()


@gluon.jit
def _unit_groups(
    pointer, unit, row_tiles, slots,
    N: gl.constexpr, STEPS: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Load what rows share in each chunk of a unit."""
    row = _source(slots, unit // STEPS // row_tiles, N, BLOCK_N, GATED)
    return _by_chunk(pointer, row // ROWS * GROUPS, unit % STEPS, STEP, CHUNK, GROUP)


@gluon.jit
def wide_kernel(
    x,  # of `order_kernel`, with rows for whole tiles
    words, scale, zero, factor, bias, residual, out, partials, arrivals,
    rows, row_tiles, units, residual_stride, out_stride,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    GROUPS: gl.constexpr, MIDDLE: gl.constexpr, DIVIDES: gl.constexpr, FACTOR_ROWS: gl.constexpr,
    GATED: gl.constexpr, GELU: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, SCALED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`tiles_kernel` for Hopper and many rows: each program has an equal share of all units, which
    are the steps of all tiles. Programs that share a tile store their sums, and the last one to
    arrive adds them in their order. Values are decoded while the previous ones are multiplied."""
    PER: gl.constexpr = 4 if KIND == "e4m3" else 8
    WORDS: gl.constexpr = STEP // PER
    STEPS: gl.constexpr = K // STEP
    WARPS: gl.constexpr = gl.num_warps()
    IN_SHARED: gl.constexpr = KIND == "e2m1"
    ONE: gl.constexpr = GROUPS == 1
    CHUNK: gl.constexpr = 64 if IN_SHARED else min(GROUP, 128)
    CHUNKS: gl.constexpr = STEP // CHUNK
    PART: gl.constexpr = min(CHUNK, 64)
    PARTS: gl.constexpr = CHUNK // PART
    BY_SUM: gl.constexpr = not (IN_SHARED or SCALED or ONE)
    COPY_WIDTH: gl.constexpr = WORDS // 4
    COPY_W: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // COPY_WIDTH, COPY_WIDTH], [WARPS, 1], [1, 0]
    )
    COPY_X: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [WARPS, 1], [1, 0])
    COPY_S: gl.constexpr = gl.BlockedLayout([1, STEP // 64], [32, 1], [WARPS, 1], [1, 0])
    CODES: gl.constexpr = _words_layout(BLOCK_N, PART // PER, WARPS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    SHARED_W: gl.constexpr = gl.SwizzledSharedLayout(
        4, 1 if WORDS >= 32 else 2, min(8, WORDS // 4), [1, 0]
    )
    SCALE_ROWS: gl.constexpr = gl.SliceLayout(1, MMA if BY_SUM else CODES)

    program = gl.program_id(0)
    count = gl.num_programs(0)
    start = program * units // count
    end = (program + 1) * units // count
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, WORDS], SHARED_W)
    xs = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, BLOCK_M, STEP], gl.NVMMASharedLayout(2 * PART, 16, 2)
    )
    ss = None
    if IN_SHARED:
        ss = gl.allocate_shared_memory(
            gl.int32, [STAGES, BLOCK_N, STEP // 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    scale_slots = gl.arange(0, BLOCK_N, SCALE_ROWS)
    zero_slots = gl.arange(0, BLOCK_N, gl.SliceLayout(1, CODES))
    own = ()
    own_zero = ()
    following = ()
    following_zero = ()
    second = gl.minimum(start + 1, end - 1)
    if BY_SUM or SCALED:
        own = _unit_groups(
            scale, start, row_tiles, scale_slots, N, STEPS, STEP, CHUNK, GROUP, ROWS, GROUPS,
            BLOCK_N, GATED,
        )  # fmt: skip
        following = _unit_groups(
            scale, second, row_tiles, scale_slots, N, STEPS, STEP, CHUNK, GROUP, ROWS, GROUPS,
            BLOCK_N, GATED,
        )  # fmt: skip
    if zero is not None:
        own_zero = _unit_groups(
            zero, start, row_tiles, zero_slots, N, STEPS, STEP, CHUNK, GROUP, ROWS, GROUPS,
            BLOCK_N, GATED,
        )  # fmt: skip
        following_zero = _unit_groups(
            zero, second, row_tiles, zero_slots, N, STEPS, STEP, CHUNK, GROUP, ROWS, GROUPS,
            BLOCK_N, GATED,
        )  # fmt: skip
    wait(PDL)
    for i in gl.static_range(STAGES - 1):
        _load_unit(
            start + i, end, i, x, words, scale, ws, xs, ss, row_tiles,
            N, K, BLOCK_M, BLOCK_N, STEP, WORDS, GATED, COPY_W, COPY_X, COPY_S,
        )  # fmt: skip
    async_copy.wait_group(STAGES - 2)
    hopper.fence_async_shared()
    barrier()
    slot = 0
    last = STAGES - 1  # the slot of the previous unit
    w = _decode(
        slot, 0, 0, ws, ss, own, own_zero, KIND, MIDDLE, SCALED, CHUNK, PART, CODES, MMA
    )  # fmt: skip
    for item in range(start // STEPS, (end + STEPS - 1) // STEPS):
        first = gl.maximum(start, item * STEPS)
        stop = gl.minimum(end, item * STEPS + STEPS)
        total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
        for unit in range(first, stop):
            after = gl.where(slot == STAGES - 1, 0, slot + 1)
            third = gl.minimum(unit + 2, end - 1)
            later = ()
            later_zero = ()
            if BY_SUM or SCALED:
                later = _unit_groups(
                    scale, third, row_tiles, scale_slots, N, STEPS, STEP, CHUNK, GROUP, ROWS,
                    GROUPS, BLOCK_N, GATED,
                )  # fmt: skip
            if zero is not None:
                later_zero = _unit_groups(
                    zero, third, row_tiles, zero_slots, N, STEPS, STEP, CHUNK, GROUP, ROWS,
                    GROUPS, BLOCK_N, GATED,
                )  # fmt: skip
            for i in gl.static_range(CHUNKS):
                part = total
                if BY_SUM:
                    part = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
                for j in gl.static_range(PARTS):
                    right = xs.index(slot).slice(i * CHUNK + j * PART, PART, 1).permute((1, 0))
                    running = hopper.warpgroup_mma(w, right, part, is_async=True)
                    if j < PARTS - 1:
                        then = _decode(
                            slot, i, j + 1, ws, ss, own, own_zero, KIND, MIDDLE, SCALED, CHUNK,
                            PART, CODES, MMA,
                        )  # fmt: skip
                    elif i < CHUNKS - 1:
                        then = _decode(
                            slot, i + 1, 0, ws, ss, own, own_zero, KIND, MIDDLE, SCALED, CHUNK,
                            PART, CODES, MMA,
                        )  # fmt: skip
                    else:
                        async_copy.wait_group(STAGES - 3)
                        hopper.fence_async_shared()
                        barrier()  # all warps are done with the previous unit
                        _load_unit(
                            unit + STAGES - 1, end, last, x, words, scale, ws, xs, ss, row_tiles,
                            N, K, BLOCK_M, BLOCK_N, STEP, WORDS, GATED, COPY_W, COPY_X, COPY_S,
                        )  # fmt: skip
                        then = _decode(
                            after, 0, 0, ws, ss, following, following_zero, KIND, MIDDLE, SCALED,
                            CHUNK, PART, CODES, MMA,
                        )  # fmt: skip
                    part, _ = hopper.warpgroup_mma_wait(0, deps=[running, w])
                    w = then
                if BY_SUM:
                    total += part * own[i].to(gl.float32)[:, None]
                else:
                    total = part
            own = following
            own_zero = following_zero
            following = later
            following_zero = later_zero
            last = slot
            slot = after
        tile = item // row_tiles
        row_tile = item % row_tiles
        own_rows = _source(gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA)), tile, N, BLOCK_N, GATED)
        SIZE: gl.constexpr = BLOCK_M * BLOCK_N
        complete = True
        inner = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))[:, None] * BLOCK_M
        inner = inner + gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))[None, :]
        inner = partials + inner
        head = ((item * STEPS + 1) * count - 1) // units  # the programs of this tile
        tail = ((item * STEPS + STEPS) * count - 1) // units
        if head < tail:
            own_slot = 2 * program + gl.where(program == head, 1, 0)
            gl.store(inner + own_slot.to(gl.int64) * SIZE, total)
            barrier()  # all of this program's stores come before its arrival
            complete = gl.atomic_add(arrivals + item, 1, sem="acq_rel") == tail - head
        if complete:
            if head < tail:
                gl.store(arrivals + item, 0)
                total = gl.load(inner + (2 * head + 1).to(gl.int64) * SIZE, cache_modifier=".cg")
                for other in range(head + 1, tail + 1, 2):  # two are in flight together
                    spots = inner + (2 * other).to(gl.int64) * SIZE
                    is_second = gl.full([BLOCK_N, BLOCK_M], other < tail, gl.int1, MMA)
                    one = gl.load(spots, cache_modifier=".cg")
                    two = gl.load(spots + 2 * SIZE, is_second, 0.0, cache_modifier=".cg")
                    total = total + one + two
            result = _finished(
                total, scale, own_rows // ROWS, factor, bias, own_rows,
                KIND, GROUPS, DIVIDES, FACTOR_ROWS, GATED, GELU,
            )  # fmt: skip
            first_row = row_tile * BLOCK_M
            _store(result, residual, out, first_row, rows, tile, residual_stride, out_stride, N)
    async_copy.wait_group(0)


@triton.jit(do_not_specialize=["rows"])
def order_kernel(
    x, out, rows, stride,
    K: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [M, K] -> [M, K], in the order of the values in a tensor core."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + at, mask=at < K)
    if HALVES:
        values = tl.permute(tl.reshape(values, [BLOCK // 32, 4, 2, 2, 2]), [0, 3, 4, 1, 2])
    else:
        values = tl.permute(tl.reshape(values, [BLOCK // 16, 4, 2, 2]), [0, 3, 1, 2])
    tl.store(out + row * K + at, tl.reshape(values, [BLOCK]), mask=at < K)
