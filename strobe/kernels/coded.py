# pyright: basic, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Products with weights that are stored in codes, whose values exist only in registers.

    _part_kernel        the columns of few rows as `_gemm_kernel` reads them
    _gemm_kernel        tiles x splits programs: residual + act(x Wᵀ + bias) for few rows
    _dequantize_kernel  the values of a weight in x's dtype, for many rows of x

The usual forms of codes, with x in bfloat16, have a kernel of their own in coded_tiles.py.

Codes are read as words of 32 bits, PER values each. A tensor core multiplies value j of W words by
columns j, j + PER, ... of x, so that no code moves to another thread. A value is rounded once to
x's dtype, and the factor of all values multiplies the sum. Legend: M rows of x, W [N, K], G groups
of columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.gemm import DTYPES
from strobe.kernels.gemm_table import shared_memory
from strobe.kernels.operands import Epilogue
from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.rowwise import INTERPRETED, gated, round_to, silu_mul
from strobe.kernels.workspace import Workspace

try:
    from strobe.kernels.coded_tiles import order_kernel, tiles_kernel, wide_kernel
except (AttributeError, ImportError):
    HAS_TILES = False
else:
    HAS_TILES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
"""Whether Triton has what `coded_tiles.py` uses of Gluon."""

MUCH_MEMORY = 160 << 10
"""Bytes of shared memory that hold the largest tiles."""
TILE_N = 64
TILE_WORDS = 16
"""Of `_dequantize_kernel`."""


class Codes(NamedTuple):
    """A weight [N, K] in codes.

    kind: "int4" and "int8" (codes above `zero`), "s8" (signed bytes), "e2m1" and "e4m3". codes
    [N, bytes] uint8, of 4 bits two a byte, the first in the low bits. scale [N / rows, G], of
    `group` columns and `rows` rows each; in bytes if it is e4m3. zero: of the scale's shape;
    middle: where there is no zero. factor: of all values, or with `divides` their divisor; several
    belong to equal parts of the rows. index [K]: the group of each column, if groups are not
    neighbors.
    """

    kind: str
    codes: Tensor
    scale: Tensor
    inputs: int
    group: int
    rows: int = 1
    zero: Tensor | None = None
    middle: int = 0
    factor: Tensor | None = None
    divides: bool = False
    index: Tensor | None = None

    @property
    def halves(self) -> bool:
        """Whether a byte holds two codes."""
        return self.kind in ("int4", "e2m1")

    @property
    def per_word(self) -> int:
        """Values in 32 bits."""
        return 8 if self.halves else 4

    @property
    def has_words(self) -> bool:
        """Whether kernels can read words, each in one group of columns."""
        whole = self.codes.is_contiguous() and self.codes.shape[1] % 4 == 0
        return whole and (self.index is not None or self.group % self.per_word == 0)

    @property
    def factor_rows(self) -> int:
        """Rows that share a factor; 0 if all do."""
        if self.factor is None or self.factor.numel() == 1:
            return 0
        return len(self.codes) // self.factor.numel()

    def part(self, first: int, last: int) -> Codes:
        """Return rows first to last - 1, which do not divide what shares a scale or a factor."""
        rows = self.rows
        grid = slice(first // rows, -(-last // rows))
        factor = self.factor
        if self.factor_rows and factor is not None:
            factor = factor[first // self.factor_rows : last // self.factor_rows]
        return self._replace(
            codes=self.codes[first:last],
            scale=self.scale[grid],
            zero=None if self.zero is None else self.zero[grid],
            factor=factor,
        )


class CodedWeight(NamedTuple):
    """Weights whose outputs follow one another; see `Codes`."""

    parts: tuple[Codes, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(len(part.codes) for part in self.parts), self.parts[0].inputs))


class CodedExperts(NamedTuple):
    """Weights [E, N, K] of experts: `codes` of a weight [E * N, K]."""

    codes: Codes
    count: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, len(self.codes.codes) // self.count, self.codes.inputs

    @property
    def kind(self) -> str:
        return self.codes.kind

    def dense_experts(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return the values of experts first to last - 1 in dtype."""
        _, outputs, inputs = self.shape
        part = self.codes.part(first * outputs, last * outputs)
        return dequantized(part, dtype).view(last - first, outputs, inputs)


class Tile(NamedTuple):
    """The division of a product: rows of W and words of a program's step, and the minimum number of
    programs."""

    rows: int
    words: int
    programs: int
    warps: int


STAGES = 3
"""Steps whose loads are in flight together, where shared memory holds them."""
_OTHER_BYTES = 40 << 10
"""Of shared memory, in addition to these loads."""


def tile_of(weight: Codes, block_m: int, shared: int) -> Tile:
    """Return the tile for rows of x, rounded up to a power of two from 16 on, in `shared` bytes.

    Measured on an H100 with the layers of Qwen3-8B."""
    if block_m >= 64 and shared < MUCH_MEMORY:
        return Tile(rows=64, words=16, programs=264, warps=4)
    if block_m >= 64:
        return Tile(rows=128, words=16, programs=264, warps=8)
    if block_m == 32:
        return Tile(rows=64, words=16, programs=528, warps=2)
    if not weight.halves:
        return Tile(rows=32, words=32, programs=1056, warps=2)
    if weight.kind == "e2m1":
        return Tile(rows=32, words=16, programs=1056, warps=2)
    if weight.group >= 128:
        return Tile(rows=64, words=16, programs=528, warps=4)
    return Tile(rows=64, words=32, programs=528, warps=2)


def _stages(tile: Tile, block_m: int, per_word: int, itemsize: int, shared: int) -> int:
    """Return the number of steps, up to STAGES, whose loads fit into `shared` bytes."""
    step = tile.words * (4 * tile.rows + block_m * per_word * itemsize)
    return max(1, min(STAGES, (shared - _OTHER_BYTES) // step))


def _assembly(start: str, of_byte: str, count: int, per_byte: int) -> str:
    """Return PTX that decodes two words into `count` registers of two values each: `of_byte` for
    each of the 4 bytes. {low} and {high} select, for `prmt`, the byte of both words for the low or
    the high byte of each half of a register."""
    steps = [
        of_byte.format(
            low=f"0x{byte + 4}{byte + 4}{byte + 4}{byte}",
            high=f"0x{byte + 4}{byte}{byte}{byte}",
            first=per_byte * byte,
            second=per_byte * byte + 1,
            one=f"${count}",
            other=f"${count + 1}",
            scale=f"${count + 2}",
            zero=f"${count + 3}",
        )
        for byte in range(4)
    ]
    return "{" + start + "".join(steps) + "}"


_INT4 = tl.constexpr(
    _assembly(
        """
        .reg .b32 pair, code, one, none;
        mov.b32 one, 0x3F803F80;
        mov.b32 none, 0x80008000;
        """,
        """
        prmt.b32 pair, {one}, {other}, {low};
        lop3.b32 code, pair, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 code, code, one, {zero};
        fma.rn.bf16x2 ${first}, code, {scale}, none;
        shr.b32 pair, pair, 4;
        lop3.b32 code, pair, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 code, code, one, {zero};
        fma.rn.bf16x2 ${second}, code, {scale}, none;
        """,
        count=8,
        per_byte=2,
    )
)
_E2M1 = tl.constexpr(
    _assembly(
        """
        .reg .b32 pair, sign, size, none;
        mov.b32 none, 0x80008000;
        """,
        """
        prmt.b32 pair, {one}, {other}, {high};
        shl.b32 sign, pair, 4;
        and.b32 sign, sign, 0x80008000;
        shr.b32 size, pair, 2;
        lop3.b32 size, size, 0x01C001C0, sign, 0xEA;
        fma.rn.bf16x2 ${first}, size, {scale}, none;
        and.b32 sign, pair, 0x80008000;
        shr.b32 size, pair, 6;
        lop3.b32 size, size, 0x01C001C0, sign, 0xEA;
        fma.rn.bf16x2 ${second}, size, {scale}, none;
        """,
        count=8,
        per_byte=2,
    )
)
_E4M3 = tl.constexpr(
    _assembly(
        """
        .reg .b32 pair, size, power, none;
        mov.b32 power, 0x7B807B80;  // 2^120, twice
        mov.b32 none, 0x80008000;
        """,
        """
        prmt.b32 pair, {one}, {other}, {high};
        shr.b32 size, pair, 4;
        and.b32 size, size, 0x07F007F0;
        lop3.b32 size, pair, 0x80008000, size, 0xEA;
        fma.rn.bf16x2 ${first}, size, power, none;
        """,
        count=4,
        per_byte=1,
    )
)


@triton.jit
def _int4_pairs(words, scale, zero):
    """Return 8 bfloat16 tensors: (code - zero) x scale of each code, from 128 + code. scale and
    zero are of the shape of words, zero as -(128 + zero)."""
    return tl.inline_asm_elementwise(
        _INT4,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [words, scale, zero],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _e2m1_pairs(words, scale):
    """Return 8 bfloat16 tensors: value x 2**-126 x scale of each code."""
    return tl.inline_asm_elementwise(
        _E2M1,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [words, scale],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _e4m3_pairs(words):
    """Return 4 bfloat16 tensors: the value of each byte."""
    return tl.inline_asm_elementwise(
        _E4M3,
        "=&r,=&r,=&r,=&r,r,r",
        [words],
        dtype=(tl.bfloat16,) * 4,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _e4m3(byte):
    """Return the values of bytes, in int32, in float32."""
    bits = ((byte & 128) << 24) | ((byte & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _size(code, zero, KIND: tl.constexpr):
    """Return the values of codes, in int32, without their scale, in float32."""
    if KIND == "e2m1":
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        value = bits.to(tl.float32, bitcast=True) * 2.0**126
    elif KIND == "e4m3":
        value = _e4m3(code)
    else:
        if KIND == "s8":
            code = code ^ 128
        # 2**23 + code is the float whose last bits are the code.
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    return value


@triton.jit
def load_factor(factor_ptr, n, ROWS: tl.constexpr):
    """Return the factors of rows n, 1 if there is none. ROWS: number of rows that share one; 0:
    all do."""
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + (n // ROWS if ROWS else 0))
    return factor


@triton.jit
def decode(
    code, scale, zero, factor, KIND: tl.constexpr, MIDDLE: tl.constexpr, DIVIDES: tl.constexpr
):
    """Return the values of codes in float32. A zero of 0 and a factor of 1 change nothing."""
    value = _size(code, MIDDLE + zero + (128 if KIND == "s8" else 0), KIND) * scale_values(scale)
    return tl.div_rn(value, factor) if DIVIDES else value * factor


@triton.jit
def _by_group(
    pointer, row, block, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    PER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Load what the groups of a block of words share -> [BN, 1] if they are one group, else
    [BN, W]. row [BN]: where the groups of each row begin."""
    if GROUPS == 1 or GROUP % (PER * WORDS) == 0:
        loaded = tl.load(pointer + (row + block * (WORDS * PER) // GROUP)[:, None])
    else:
        at = block * WORDS + tl.arange(0, WORDS)
        places = row[:, None] + (at * PER // GROUP)[None, :]
        if K % (WORDS * PER) == 0:
            loaded = tl.load(pointer + places)
        else:
            loaded = tl.load(pointer + places, mask=(at < K // PER)[None, :], other=0)
    return loaded


@triton.jit
def scale_values(stored):
    """Return scales in float32; bytes are e4m3."""
    if stored.dtype == tl.uint8:  # noqa: SIM108
        scale = _e4m3(stored.to(tl.int32))
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def _values(
    words, scale, zero,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, PER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return PER tensors of values [BN, W] in DTYPE, without the factor of all values.

    scale, zero: of `_by_group`; zero may be None. e2m1 values in bfloat16 with scales in e4m3 are
    2**-8 of themselves.
    """
    FAST: tl.constexpr = not INTERPRETED and tl.bfloat16 == DTYPE
    SCALE: tl.constexpr = scale.dtype
    offset = tl.full(words.shape, 128 if KIND == "s8" else MIDDLE, tl.float32)
    if zero is not None:
        offset += zero.to(tl.float32)
    scale = tl.broadcast_to(scale_values(scale), words.shape)
    if FAST and KIND == "int4" and tl.bfloat16 == SCALE:
        result = _int4_pairs(words, scale.to(DTYPE), (-128.0 - offset).to(DTYPE))
    elif FAST and KIND == "e2m1" and tl.uint8 == SCALE:
        result = _e2m1_pairs(words, (scale * 2.0**118).to(DTYPE))
    else:
        if FAST and KIND == "e4m3":
            plain = _e4m3_pairs(words)
        elif FAST and KIND == "int4":
            one = tl.full(words.shape, 1.0, DTYPE)
            plain = _int4_pairs(words, one, (-128.0 - offset).to(DTYPE))
        else:
            plain = ()
            for j in tl.static_range(PER):
                plain = plain + (_size(_code(words, j, PER), offset, KIND),)  # noqa: RUF005
        result = ()
        for j in tl.static_range(PER):
            value = plain[j].to(tl.float32) * scale
            result = result + (value.to(DTYPE),)  # noqa: RUF005
    return result


@triton.jit
def _scattered_values(
    words, row, block, scale_ptr, zero_ptr, index_ptr,
    K: tl.constexpr, KIND: tl.constexpr, MIDDLE: tl.constexpr, PER: tl.constexpr,
    WORDS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the same where each column has a group of its own."""
    at = block * WORDS + tl.arange(0, WORDS)
    result = ()
    for j in tl.static_range(PER):
        group = tl.load(index_ptr + at * PER + j, mask=at < K // PER, other=0)
        places = row[:, None] + group[None, :]
        offset = tl.full(words.shape, 128 if KIND == "s8" else MIDDLE, tl.float32)
        if zero_ptr is not None:
            offset += tl.load(zero_ptr + places).to(tl.float32)
        value = _size(_code(words, j, PER), offset, KIND)
        value *= scale_values(tl.load(scale_ptr + places))
        result = result + (value.to(DTYPE),)  # noqa: RUF005
    return result


@triton.jit
def _code(words, J: tl.constexpr, PER: tl.constexpr):
    """Return code J of each word."""
    return (words >> (32 // PER * J)) & (2 ** (32 // PER) - 1)


@triton.jit(do_not_specialize=["rows"])
def _gemm_kernel(
    x,  # of `_part_kernel`
    words_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, bias, residual, out, partials,
    arrivals, rows, residual_stride, out_stride,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, MIDDLE: tl.constexpr,
    DIVIDES: tl.constexpr, FACTOR_ROWS: tl.constexpr, DTYPE: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies BLOCK_N rows of W by all of x over one of SPLIT ranges of K, as in
    gemm.py; N: columns of out. The last program to arrive adds the ranges in their order."""
    pdl_wait(PDL)
    PER: tl.constexpr = 8 if HALVES else 4
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    BLOCKS: tl.constexpr = (K + WORDS * PER - 1) // (WORDS * PER)
    TAIL: tl.constexpr = K % (WORDS * PER) != 0
    tile = tl.program_id(0) // SPLIT
    split = tl.program_id(0) % SPLIT
    ms = tl.arange(0, BLOCK_M)
    live = ms < rows
    ws = tl.arange(0, BLOCK_N)
    ns = tile * COLUMNS + ws % COLUMNS
    sources = tl.minimum(ns, N - 1) + ws // COLUMNS * N  # rows past the end are not stored
    spots = words_ptr + sources.to(tl.int64)[:, None] * (K // PER)
    row = sources // ROWS * GROUPS
    start = split * BLOCKS // SPLIT
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if index_ptr is None:
        # Loaded one iteration ahead: the pipeline skips loads as narrow as these.
        scale = _by_group(scale_ptr, row, start, K, GROUP, GROUPS, PER, WORDS)
        zero = scale if zero_ptr is None else _by_group(
            zero_ptr, row, start, K, GROUP, GROUPS, PER, WORDS
        )  # fmt: skip
    for block in tl.range(start, (split + 1) * BLOCKS // SPLIT):
        at = block * WORDS + tl.arange(0, WORDS)
        if TAIL:
            words = tl.load(spots + at[None, :], mask=(at < K // PER)[None, :], other=0)
        else:
            words = tl.load(spots + at[None, :])
        parts = ()
        for j in tl.static_range(PER):
            lines = x + (j * rows + ms)[:, None] * (K // PER) + at[None, :]
            there = live[:, None] & (at < K // PER)[None, :] if TAIL else live[:, None]
            parts = parts + (tl.load(lines, mask=there, other=0.0),)  # noqa: RUF005
        if index_ptr is None:
            own_scale = scale
            own_zero = None if zero_ptr is None else zero
            following = tl.minimum(block + 1, BLOCKS - 1)
            scale = _by_group(scale_ptr, row, following, K, GROUP, GROUPS, PER, WORDS)
            if zero_ptr is not None:
                zero = _by_group(zero_ptr, row, following, K, GROUP, GROUPS, PER, WORDS)
            values = _values(words, own_scale, own_zero, KIND, MIDDLE, PER, DTYPE)
        else:
            values = _scattered_values(
                words, row, block, scale_ptr, zero_ptr, index_ptr, K, KIND, MIDDLE, PER, WORDS,
                DTYPE,
            )  # fmt: skip
        for j in tl.static_range(PER):
            w = values[j]
            a = parts[j]
            if INTERPRETED:
                w = w.to(tl.float32)
                a = a.to(tl.float32)
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    complete = True
    if SPLIT > 1:
        inner = partials + tile.to(tl.int64) * (SPLIT * SIZE) + ms[None, :] * BLOCK_N + ws[:, None]
        tl.store(inner + split * SIZE, total, mask=live[None, :])
        tl.debug_barrier()  # all of this program's stores come before its arrival
        complete = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1
    if complete:
        if SPLIT > 1:
            tl.store(arrivals + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in tl.range(0, SPLIT, loop_unroll_factor=SPLIT if SPLIT * SIZE <= 8192 else 1):
                total += tl.load(
                    inner + part * SIZE, mask=live[None, :], other=0.0, cache_modifier=".cg"
                )
        SCALE: tl.constexpr = scale_ptr.dtype.element_ty
        SMALL: tl.constexpr = KIND == "e2m1" and tl.uint8 == SCALE and tl.bfloat16 == DTYPE
        if SMALL and index_ptr is None and not INTERPRETED:
            total *= 256.0  # see `_values`
        if factor_ptr is not None:
            factor = load_factor(factor_ptr, sources[:, None], FACTOR_ROWS)
            total = tl.div_rn(total, factor) if DIVIDES else total * factor
        if bias is not None:
            total += tl.load(bias + sources).to(tl.float32)[:, None]
        result = tl.trans(total)
        if GATED:
            pairs = tl.permute(tl.reshape(result, [BLOCK_M, 2, COLUMNS]), [0, 2, 1])
            gate, up = tl.split(pairs)
            result = gated(gate, up, GELU)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        stored = live[:, None] & (columns < N)[None, :]
        if residual is not None:
            lines = residual + ms[:, None] * residual_stride + columns[None, :]
            result += tl.load(lines, mask=stored, other=0.0).to(tl.float32)
        ends = out + ms[:, None] * out_stride + columns[None, :]
        tl.store(ends, round_to(result, DTYPE), mask=stored)


@triton.jit
def _joined(values, N: tl.constexpr, WORDS: tl.constexpr, PER: tl.constexpr):
    """PER tensors [N, W], of columns j, j + PER, ... -> [N, W * PER]."""
    a = values[0]
    b = values[1]
    c = values[2]
    d = values[3]
    if PER == 8:
        a = tl.join(a, values[4])
        b = tl.join(b, values[5])
        c = tl.join(c, values[6])
        d = tl.join(d, values[7])
    even = tl.reshape(tl.join(a, c), [N, WORDS, PER // 2])
    odd = tl.reshape(tl.join(b, d), [N, WORDS, PER // 2])
    return tl.reshape(tl.join(even, odd), [N, WORDS * PER])


@triton.jit
def _dequantize_kernel(
    words_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, out,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, MIDDLE: tl.constexpr,
    DIVIDES: tl.constexpr, FACTOR_ROWS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    PER: tl.constexpr = 8 if HALVES else 4
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * WORDS
    at = first + tl.arange(0, WORDS)
    real = n < N
    inside = real[:, None] & (at < K // PER)[None, :]
    n = tl.minimum(n, N - 1)
    spots = words_ptr + n.to(tl.int64)[:, None] * (K // PER) + at[None, :]
    words = tl.load(spots, mask=inside, other=0)
    row = n // ROWS * GROUPS
    block = tl.program_id(1)
    if index_ptr is None:
        scale = _by_group(scale_ptr, row, block, K, GROUP, GROUPS, PER, WORDS)
        zero = None if zero_ptr is None else _by_group(
            zero_ptr, row, block, K, GROUP, GROUPS, PER, WORDS
        )  # fmt: skip
        values = _values(words, scale, zero, KIND, MIDDLE, PER, tl.float32)
    else:
        values = _scattered_values(
            words, row, block, scale_ptr, zero_ptr, index_ptr, K, KIND, MIDDLE, PER, WORDS,
            tl.float32,
        )  # fmt: skip
    value = _joined(values, BLOCK_N, WORDS, PER)
    if factor_ptr is not None:
        factor = load_factor(factor_ptr, n[:, None], FACTOR_ROWS)
        value = tl.div_rn(value, factor) if DIVIDES else value * factor
    ks = first * PER + tl.arange(0, WORDS * PER)
    stored = real[:, None] & (ks < K)[None, :]
    tl.store(out + n.to(tl.int64)[:, None] * K + ks[None, :], round_to(value, DTYPE), mask=stored)


def coded_gemm(x: Tensor, weight: CodedWeight, epilogue: Epilogue, workspace: Workspace) -> Tensor:
    """x [M, K] -> residual + act(x Wᵀ + bias) [M, N] in x's dtype; the epilogue has no other."""
    is_small = x.element_size() == 2 or shared_memory(x.device) >= MUCH_MEMORY
    few = x.shape[0] <= (128 if is_small else 64)
    few = few or all(has_tiles(x, part) and fast_tile(part, x.shape[0]) for part in weight.parts)
    if few and (len(weight.parts) == 1 or not epilogue.gated):
        return _fused(x, weight, epilogue, workspace)
    y = x.new_empty(x.shape[0], weight.shape[0])
    if few:
        _fused(x, weight, Epilogue(bias=epilogue.bias, out=y), workspace)
    else:
        first = 0
        for part in weight.parts:
            last = first + len(part.codes)
            torch.mm(x, dequantized(part, x.dtype).t(), out=y[:, first:last])
            first = last
        if epilogue.bias is not None:
            y += epilogue.bias
    if epilogue.gated:
        y = silu_mul(y, gelu=epilogue.activation == "gelu_tanh")
    if epilogue.residual is not None:
        return torch.add(epilogue.residual, y, out=epilogue.out)
    return y if epilogue.out is None else epilogue.out.copy_(y)


def _fused(x: Tensor, weight: CodedWeight, epilogue: Epilogue, workspace: Workspace) -> Tensor:
    """Run a kernel for each part."""
    out = epilogue.out
    if out is None:
        outputs = weight.shape[0] // 2 if epilogue.gated else weight.shape[0]
        out = x.new_empty(x.shape[0], outputs)
    if len(weight.parts) == 1:
        _multiply(x, weight.parts[0], epilogue._replace(out=out), workspace)
        return out
    first = 0
    for part in weight.parts:
        own = slice(first, first + len(part.codes))
        bias = epilogue.bias
        residual = epilogue.residual
        of_part = Epilogue(
            bias=None if bias is None else bias[own],
            residual=None if residual is None else residual[:, own],
            out=out[:, own],
        )
        _multiply(x, part, of_part, workspace)
        first = own.stop
    return out


class FastTile(NamedTuple):
    """The division of a product in `coded_tiles.py`: rows of x and of W, columns of a step, the
    minimum number of programs, warps, steps in flight, and whether `wide_kernel` multiplies."""

    block_m: int
    rows: int
    step: int
    programs: int
    warps: int
    stages: int
    wide: bool = False


WIDE_ROWS = 256
"""Maximum rows of x for `wide_kernel`; with more, values in memory win."""


def fast_tile(weight: Codes, rows: int) -> FastTile | None:
    """Return the tile for rows of x, None if `coded_tiles.py` does not multiply so many.

    Measured on an H100 with the layers of Qwen3-8B and Qwen3.8-27B."""
    is_hopper = triton.runtime.driver.active.get_current_target().arch // 10 == 9
    block_m = min(max(1 << (rows - 1).bit_length(), 8), 128)
    step = 256 if weight.halves and weight.inputs % 256 == 0 else 128
    if rows > 64:
        if rows > WIDE_ROWS or not is_hopper:
            return None
        stages = 4 if weight.halves else 3
        return FastTile(
            block_m=block_m, rows=128, step=128, programs=132, warps=8, stages=stages, wide=True
        )
    if rows > 32:
        if not is_hopper:
            return None
        stages = 3 if step == 256 else 4
        return FastTile(
            block_m=block_m, rows=128, step=step, programs=132, warps=8, stages=stages, wide=True
        )
    if not weight.halves:
        if rows <= 8:
            return FastTile(block_m=block_m, rows=128, step=128, programs=264, warps=8, stages=4)
        stages = 3 if rows <= 16 else 4
        return FastTile(block_m=block_m, rows=64, step=128, programs=264, warps=4, stages=stages)
    if rows > 16:
        return FastTile(block_m=block_m, rows=64, step=step, programs=264, warps=4, stages=3)
    stages = 3 if rows > 8 else 4
    if len(weight.codes) > 8192 or weight.kind == "e2m1":
        return FastTile(block_m=block_m, rows=32, step=step, programs=528, warps=2, stages=stages)
    return FastTile(block_m=block_m, rows=64, step=step, programs=396, warps=4, stages=stages)


def has_tiles(x: Tensor, weight: Codes) -> bool:
    """Whether `coded_tiles.py` multiplies x by weights of this form."""
    if not HAS_TILES or INTERPRETED.value or x.dtype != torch.bfloat16 or x.stride(0) % 8:
        return False
    if weight.index is not None or weight.inputs % 128 or not weight.scale.is_contiguous():
        return False
    has_groups = weight.group % 128 == 0
    if weight.kind == "e2m1":
        return weight.group == 16 and weight.scale.dtype == torch.uint8
    if weight.kind == "e4m3":
        return has_groups and weight.zero is None
    return weight.kind == "int4" and (has_groups or weight.group in (32, 64))


def multiply_tiles(
    x: Tensor, weight: Codes, epilogue: Epilogue, workspace: Workspace, tile: FastTile
) -> None:
    """Run a kernel of `coded_tiles.py`."""
    rows = x.shape[0]
    residual = epilogue.residual
    out = epilogue.out
    assert out is not None
    size = tile.block_m * tile.rows
    tiles = -(-len(weight.codes) // tile.rows)
    steps = weight.inputs // tile.step
    scale = weight.scale
    if weight.kind == "e2m1":
        scale = scale.view(torch.int32)
    pdl = supports_pdl(x.device)
    options = constants(weight)
    del options["HALVES"]
    kernel: Any
    if tile.wide:
        row_tiles = -(-rows // tile.block_m)
        units = tiles * row_tiles * steps
        programs = max(1, min(tile.programs, units // 4))
        workspace.reserve(2 * programs * size, tiles * row_tiles)
        x = _ordered(x, padded=row_tiles * tile.block_m, halves=weight.halves)
        kernel = wide_kernel
        options["row_tiles"] = row_tiles
        options["units"] = units
        options["SCALED"] = weight.kind == "int4" and scale.dtype == torch.bfloat16
    else:
        split = max(1, min(-(-tile.programs // tiles), steps // 2, 16))
        programs = tiles * split
        workspace.reserve(programs * size if split > 1 else 0, tiles)
        kernel = tiles_kernel
        options["x_stride"] = x.stride(0)
        options["SPLIT"] = split
    kernel[(programs,)](
        x, weight.codes.view(torch.int32), scale, weight.zero, weight.factor, epilogue.bias,
        residual, out, workspace.partials, workspace.arrived, rows=rows,
        residual_stride=0 if residual is None else residual.stride(0), out_stride=out.stride(0),
        **options, N=out.shape[1],
        GATED=epilogue.gated, GELU=epilogue.activation == "gelu_tanh", BLOCK_M=tile.block_m,
        BLOCK_N=tile.rows, STEP=tile.step, STAGES=tile.stages, PDL=pdl, num_warps=tile.warps,
        launch_pdl=pdl,
    )  # fmt: skip


def _ordered(x: Tensor, *, padded: int, halves: bool) -> Tensor:
    """Return x with columns in the order of a tensor core, in `padded` rows."""
    rows, inputs = x.shape
    out = x.new_empty(padded, inputs)
    pdl = supports_pdl(x.device)
    order_kernel[rows, -(-inputs // 2048)](
        x, out, rows, x.stride(0), K=inputs, HALVES=halves, BLOCK=2048, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def _multiply(x: Tensor, weight: Codes, epilogue: Epilogue, workspace: Workspace) -> None:
    rows = x.shape[0]
    residual = epilogue.residual
    out = epilogue.out
    assert out is not None
    fast = fast_tile(weight, rows) if has_tiles(x, weight) else None
    if fast is not None:
        multiply_tiles(x, weight, epilogue, workspace, fast)
        return
    block_m = max(1 << (rows - 1).bit_length(), 16)
    shared = shared_memory(x.device)
    tile = tile_of(weight, block_m, shared)
    outputs = len(weight.codes)
    tiles = -(-outputs // tile.rows)
    blocks = -(-weight.inputs // (tile.words * weight.per_word))
    split = max(1, min(-(-tile.programs // tiles), blocks // 4, 16))
    sums = tiles * split * block_m * tile.rows if split > 1 else 0
    workspace.reserve(sums, tiles)
    stages = _stages(tile, block_m, weight.per_word, x.element_size(), shared)
    pdl = supports_pdl(x.device)
    _gemm_kernel[(tiles * split,)](
        _parted(x, weight.per_word), weight.codes.view(torch.int32), *pointers(weight)[1:],
        epilogue.bias, residual, out, workspace.partials, workspace.arrived, rows,
        0 if residual is None else residual.stride(0), out.stride(0), **constants(weight),
        DTYPE=DTYPES[x.dtype], N=outputs // 2 if epilogue.gated else outputs, GATED=epilogue.gated,
        GELU=epilogue.activation == "gelu_tanh", BLOCK_M=block_m, BLOCK_N=tile.rows,
        WORDS=tile.words, SPLIT=split, PDL=pdl, num_warps=tile.warps, num_stages=stages,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _part_kernel(
    x, out, rows, stride,
    WIDTH: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for j in tl.static_range(PER):
        values = tl.load(x + row * stride + at * PER + j, mask=at < WIDTH)
        tl.store(out + (j * rows + row) * WIDTH + at, values, mask=at < WIDTH)


def _parted(x: Tensor, per: int) -> Tensor:
    """x [M, K] -> [per, M, K / per]: columns j, j + per, ..."""
    rows, inputs = x.shape
    out = x.new_empty(per, rows, inputs // per)
    pdl = supports_pdl(x.device)
    _part_kernel[rows, -(-inputs // per // 256)](
        x, out, rows, x.stride(0), WIDTH=inputs // per, PER=per, BLOCK=256, PDL=pdl, num_warps=2,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def dequantized(weight: Codes, dtype: torch.dtype) -> Tensor:
    """Return the values [N, K] in dtype, rounded once."""
    outputs = len(weight.codes)
    out = torch.empty(outputs, weight.inputs, dtype=dtype, device=weight.codes.device)
    pdl = supports_pdl(out.device)
    columns = triton.cdiv(weight.inputs, TILE_WORDS * weight.per_word)
    _dequantize_kernel[triton.cdiv(outputs, TILE_N), columns](
        weight.codes.view(torch.int32), *pointers(weight)[1:], out, **constants(weight),
        DTYPE=DTYPES[dtype], N=outputs, BLOCK_N=TILE_N,
        WORDS=TILE_WORDS, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def pointers(weight: Codes) -> tuple[Tensor | None, ...]:
    """Return the tensors of a weight: codes, scale, zero, factor and index."""
    return weight.codes, weight.scale, weight.zero, weight.factor, weight.index


def constants(weight: Codes) -> dict[str, object]:
    """Return the constants of kernels that read a weight."""
    return {
        "K": weight.inputs,
        "KIND": weight.kind,
        "HALVES": weight.halves,
        "GROUP": weight.group,
        "ROWS": weight.rows,
        "GROUPS": weight.scale.shape[1],
        "MIDDLE": weight.middle,
        "DIVIDES": weight.divides,
        "FACTOR_ROWS": weight.factor_rows,
    }
