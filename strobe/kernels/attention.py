# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false
"""Attention of ragged rows over the paged cache: one kernel for prefill, decode, verify and draft.

Legend: T rows of a batch, S spans, Hq query and Hkv key-value heads, G = Hq / Hkv, D head size.

A block is BLOCK_M (row, head) pairs of one span that share a key-value head: pair m is row m // G,
head m % G. The keys that any of its rows sees are divided into pieces, one program each:

    0 ....... begin .......................................... end ........ starts + sizes
                |  piece 0  |  piece 1  |  piece 2  |  piece 3  |
                     settled ................... free             keys that every row sees
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.dependent import dependent, follow

if TYPE_CHECKING:
    from strobe.attention.mask import LayerMask

FEW_HEADS = 64  # spans times key-value heads up to which blocks are small
PIECE_KEYS = 128  # at least; with fewer keys, adding results up costs more than was shared
PROGRAMS_PER_SM = 2  # that the number of pieces aims at

_LOWEST = tl.constexpr(-1.0e38)  # finite: exp2(_LOWEST - _LOWEST) is a number
_FAN_IN = tl.constexpr(8)  # results one program adds up; of more pieces, groups of so many


class Config(NamedTuple):
    """How a block is computed.

    pairs: of (row, head) in a block, 16 or more. keys: per iteration, a divisor of PIECE_KEYS.
    apart: whether keys that every row sees get a loop of their own, without a mask; it pays where
    arithmetic takes the time and not memory.
    """

    pairs: int
    keys: int
    warps: int
    stages: int
    apart: bool


# By head size, pairs of the longest span (16, 32, 64, or 128 for more) and bytes of a stored
# number; 4 for models in float32, which no tensor core takes and which run out of registers first.
CONFIGS: dict[tuple[int, int, int], Config] = {
    (64, 16, 1): Config(16, 128, 4, 4, False),
    (64, 32, 1): Config(32, 128, 4, 4, False),
    (64, 64, 1): Config(64, 64, 4, 4, False),
    (64, 128, 1): Config(128, 64, 8, 3, True),
    (64, 16, 2): Config(16, 128, 4, 3, False),
    (64, 32, 2): Config(32, 128, 4, 3, False),
    (64, 64, 2): Config(64, 64, 4, 4, False),
    (64, 128, 2): Config(128, 128, 8, 3, True),
    (64, 16, 4): Config(16, 32, 4, 2, False),
    (64, 32, 4): Config(32, 32, 8, 2, False),
    (64, 64, 4): Config(64, 32, 8, 2, False),
    (64, 128, 4): Config(64, 32, 8, 2, False),
    (128, 16, 1): Config(16, 128, 4, 3, False),
    (128, 32, 1): Config(32, 128, 4, 3, False),
    (128, 64, 1): Config(64, 64, 4, 4, False),
    (128, 128, 1): Config(128, 64, 8, 3, True),
    (128, 16, 2): Config(16, 64, 4, 4, False),
    (128, 32, 2): Config(32, 64, 4, 3, False),
    (128, 64, 2): Config(64, 32, 4, 4, False),
    (128, 128, 2): Config(128, 128, 8, 3, False),
    (128, 16, 4): Config(16, 16, 4, 2, False),
    (128, 32, 4): Config(32, 16, 8, 2, False),
    (128, 64, 4): Config(32, 16, 8, 2, False),
    (128, 128, 4): Config(32, 16, 8, 2, False),
    (256, 16, 1): Config(16, 32, 4, 4, False),
    (256, 32, 1): Config(32, 32, 4, 4, False),
    (256, 64, 1): Config(64, 32, 8, 4, False),
    (256, 128, 1): Config(64, 32, 8, 3, True),
    (256, 16, 2): Config(16, 32, 4, 4, False),
    (256, 32, 2): Config(32, 32, 4, 3, False),
    (256, 64, 2): Config(64, 32, 8, 4, False),
    (256, 128, 2): Config(128, 32, 8, 3, True),
    (256, 16, 4): Config(16, 16, 4, 2, False),
    (256, 32, 4): Config(16, 16, 4, 2, False),
    (256, 64, 4): Config(16, 16, 4, 2, False),
    (256, 128, 4): Config(16, 16, 4, 2, False),
}


@triton.jit
def _attend(
    state, q, cache, table, begin, end, last, floor, ceiling,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Add the keys [begin, end) to state: weighted values [M, D], maxima [M], weights [M], and the
    table's entries for the first keys.

    last: the last key that may be read. Row m sees keys in [floor[m], ceiling[m]).
    """
    acc, top, total, entries = state
    columns = tl.arange(0, D)
    for key in tl.range(begin, end, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        # The last key again, not a masked load: 0 * NaN of a slot nobody wrote would be NaN.
        slots = entries + (tl.minimum(keys, last) if MASKED else keys)
        rows = cache + slots.to(tl.int64)[:, None] * (2 * HEADS * D) + columns[None, :]
        # One iteration ahead, so that keys can be loaded as early as the pipeline wants.
        entries = tl.load(table + tl.minimum(keys + BLOCK_N, last) // PAGE).to(tl.int32)
        k = tl.load(rows).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = keys[None, :] < ceiling[:, None]
            if WINDOWED:
                seen &= keys[None, :] >= floor[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, 1) * SCALE)
        p = tl.exp2(scores * SCALE - peak[:, None])
        decay = tl.exp2(top - peak)
        top = peak
        total = total * decay + tl.sum(p, 1)
        v = tl.load(rows + HEADS * D).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, top, total, entries


@triton.jit
def _write(
    out, state, first, pairs, head, size, G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr
):
    """Write the outputs of some pairs of a span whose first row is `first`."""
    acc, _, total = state
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # 0 for a row that sees nothing
    cells = ((first + pairs // G) * HEADS + head) * (G * D) + pairs % G * D
    cells = out + cells[:, None] + tl.arange(0, D)[None, :]
    tl.store(cells, result.to(out.dtype.element_ty), mask=(pairs < size * G)[:, None])


@triton.jit
def _leave(partials, stats, place, state, pairs, used, BLOCK_M: tl.constexpr, D: tl.constexpr):
    """Write a result to its place, for the program that adds up. used: pairs in this block."""
    acc, top, total = state
    cells = place * (BLOCK_M * D) + pairs[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(partials + cells, acc, mask=(pairs < used)[:, None], cache_modifier=".cg")
    tl.store(stats + place * (2 * BLOCK_M) + pairs, top, cache_modifier=".cg")
    tl.store(stats + place * (2 * BLOCK_M) + BLOCK_M + pairs, total, cache_modifier=".cg")


@triton.jit
def _is_last(counter, expected):
    """Whether all others have left their results; the counter is then 0 for the next launch."""
    tl.debug_barrier()  # the atomic is one thread's and speaks for what all have written
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _add_up(
    partials, stats, place, count, pairs, used,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Add up `count` results from `place` on, STEP apart, in this order whoever does it."""
    parts = tl.arange(0, _FAN_IN)[:, None]
    others = stats + (place + parts * STEP) * (2 * BLOCK_M) + pairs[None, :]
    tops = tl.load(others, mask=parts < count, other=_LOWEST, cache_modifier=".cg")
    totals = tl.load(others + BLOCK_M, mask=parts < count, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 0)
    total = tl.sum(tl.exp2(tops - top[None, :]) * totals, 0)
    cells = pairs[:, None] * D + tl.arange(0, D)[None, :]
    acc = tl.zeros([pairs.shape[0], D], tl.float32)
    for i in tl.range(0, count, num_stages=3):
        other = stats + (place + i * STEP) * (2 * BLOCK_M) + pairs
        weight = tl.exp2(tl.load(other, cache_modifier=".cg") - top)
        part = partials + (place + i * STEP) * (BLOCK_M * D) + cells
        part = tl.load(part, mask=(pairs < used)[:, None], other=0.0, cache_modifier=".cg")
        acc += weight[:, None] * part
    return acc, top, total


@triton.jit(do_not_specialize=["columns", "blocks", "splits", "window", "num_counters"])
def _attention(
    queries, kv, out, starts, sizes, row_starts, tables, table_rows, partials, stats, counters,
    stride, columns, blocks, splits, window, num_counters,
    SCALE: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, APART: tl.constexpr,
    SPLIT: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    head = tl.program_id(1)
    span = place // blocks
    block = blocks - 1 - place % blocks  # those with most keys first
    size = tl.load(sizes + span).to(tl.int32)  # all four in one go: memory is far away
    start = tl.load(starts + span).to(tl.int32)
    first_row = tl.load(row_starts + span)
    table = tables + tl.load(table_rows + span) * columns
    if block * BLOCK_M >= size * G:
        return
    first = start + block * BLOCK_M // G  # the positions of the first row and the final one
    final = start + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // G, size - 1)

    begin = 0
    settled = 0
    end = tl.minimum(start + size, columns * PAGE)
    free = end
    if CAUSAL:
        end = tl.minimum(end, final + 1)
        free = tl.minimum(end, first + 1)
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0)
        settled = tl.maximum(final - window + 1, 0)
        if not CAUSAL:
            end = tl.minimum(end, final + window)
            free = tl.minimum(end, first + window)
    if SPLIT:
        piece = tl.program_id(2)
        share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_N) * BLOCK_N
        share = tl.maximum(share, PIECE)
        pieces = tl.maximum(tl.cdiv(end - begin, share), 1)
        if piece >= pieces:
            return
        begin += piece * share
        end = tl.minimum(begin + share, end)

    keys = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
    entries = tl.load(table + keys // PAGE).to(tl.int32)
    pairs = block * BLOCK_M + tl.arange(0, BLOCK_M)
    position = start + pairs // G
    row = first_row + pairs // G
    cells = (head * G + pairs % G)[:, None] * D + tl.arange(0, D)[None, :]
    # Geometry and tables come from kernels before the one before, which are done by now.
    follow(PDL)
    q = queries + row[:, None] * stride + cells
    q = tl.load(q, mask=(pairs < size * G)[:, None], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    cache = kv + head * D
    floor = position - window + 1
    ceiling = tl.minimum(position + (1 if CAUSAL else window), end)

    acc = tl.zeros([BLOCK_M, D], tl.float32)
    top = tl.full([BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    CHUNK: tl.constexpr = min(BLOCK_M, 8192 // D)  # 32 KiB of a result
    state = acc, top, total, entries
    if APART:
        # Whole blocks of keys that every row sees lie between.
        inner = begin
        if WINDOWED:
            inner = begin + tl.cdiv(tl.maximum(settled - begin, 0), BLOCK_N) * BLOCK_N
            inner = tl.minimum(inner, end)
            state = _attend(
                state, q, cache, table, begin, inner, end - 1, floor, ceiling,
                SCALE, HEADS, D, PAGE, BLOCK_N, True, WINDOWED,
            )  # fmt: skip
        outer = inner + tl.maximum(tl.minimum(free, end) - inner, 0) // BLOCK_N * BLOCK_N
        state = _attend(
            state, q, cache, table, inner, outer, end - 1, floor, ceiling,
            SCALE, HEADS, D, PAGE, BLOCK_N, False, WINDOWED,
        )  # fmt: skip
        begin = outer
    state = _attend(
        state, q, cache, table, begin, end, end - 1, floor, ceiling,
        SCALE, HEADS, D, PAGE, BLOCK_N, True, WINDOWED,
    )  # fmt: skip

    acc, top, total, _ = state
    state = acc, top, total
    if not SPLIT or pieces == 1:
        _write(out, state, first_row, pairs, head, size, G, HEADS, D)
    else:
        used = size * G - block * BLOCK_M
        unit = place * HEADS + head
        whole = unit * splits
        group = piece // _FAN_IN
        groups = tl.cdiv(pieces, _FAN_IN)
        part = whole + group * _FAN_IN
        count = tl.minimum(pieces - group * _FAN_IN, _FAN_IN)
        _leave(partials, stats, whole + piece, state, tl.arange(0, BLOCK_M), used, BLOCK_M, D)
        if _is_last(counters + whole + group, count):
            for chunk in range(0, BLOCK_M, CHUNK):
                some = chunk + tl.arange(0, CHUNK)
                result = _add_up(partials, stats, part, count, some, used, 1, BLOCK_M, D)
                if groups == 1:
                    _write(out, result, first_row, block * BLOCK_M + some, head, size, G, HEADS, D)
                else:
                    tl.debug_barrier()  # all threads have read what the sum now replaces
                    _leave(partials, stats, part, result, some, used, BLOCK_M, D)
            if groups > 1:  # noqa: SIM102
                if _is_last(counters + num_counters + unit, groups):
                    for chunk in range(0, BLOCK_M, CHUNK):
                        some = chunk + tl.arange(0, CHUNK)
                        result = _add_up(
                            partials, stats, whole, groups, some, used, _FAN_IN, BLOCK_M, D
                        )
                        _write(
                            out, result, first_row, block * BLOCK_M + some, head, size, G, HEADS, D
                        )


# The interpreter has no products in bfloat16: it computes in float32.
_INTERPRETED = not isinstance(_attention, triton.JITFunction)
_NO_WINDOW = 1 << 30
_MOST_PIECES = _FAN_IN.value**2  # two rounds add up so many
_PAIRS = 64  # of each program's result that a workspace has room for


class AttentionWorkspace:
    """Where programs that share a block leave their results; one serves all layers and models.
    A launch leaves it as it was; launches that use it must follow one another on one stream."""

    def __init__(self, device: torch.device, head_dim: int, programs: int | None = None):
        """head_dim: the largest there is. programs: that a launch with divided blocks aims at."""
        self.head_dim = head_dim
        self.programs = programs or self.programs_of(device)
        pairs = self.programs * _PAIRS
        self.partials = torch.empty(pairs * head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(pairs * 2, dtype=torch.float32, device=device)
        self.counters = torch.zeros(self.programs * 2, dtype=torch.int32, device=device)

    @staticmethod
    def programs_of(device: torch.device) -> int:
        """PROGRAMS_PER_SM for each multiprocessor; few in the interpreter."""
        if device.type != "cuda":
            return 16
        return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count

    @staticmethod
    def nbytes(head_dim: int, programs: int) -> int:
        """Bytes of a workspace: 8.8 MB for 264 programs and a head size of 128."""
        return programs * (4 * _PAIRS * (head_dim + 2) + 4 * 2)


def config_of(head_dim: int, pairs: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Config:
    """The configuration for a model of `dtype` whose longest span has so many pairs."""
    block = min(max(int(triton.next_power_of_2(pairs)), 16), 128)
    return CONFIGS[head_dim, block, 4 if dtype == torch.float32 else kv_dtype.itemsize]


def paged_attention(
    q: Tensor,
    kv: Tensor,
    *,
    starts: Tensor,
    sizes: Tensor,
    row_starts: Tensor,
    tables: Tensor,
    table_rows: Tensor,
    page_size: int,
    mask: LayerMask,
    longest: int,
    workspace: AttentionWorkspace,
    scale: float | None = None,
    config: Config | None = None,
) -> Tensor:
    """q [T, Hq, D], kv [slots, 2, Hkv, D] (keys, values) -> [T, Hq * D].

    Span s has the rows row_starts[s] .. + sizes[s], none if its size is 0; its row i stands at
    position starts[s] + i and sees keys below starts[s] + sizes[s] as `mask` says. Position p lies
    in slot tables[table_rows[s], p // page_size] + p. starts, sizes, row_starts, table_rows [S] and
    tables [N, columns] are int64 and contiguous, and not what the kernel launched just before
    writes: they are read while it still runs. No size exceeds `longest`. Rows of no span are left
    undefined. Rows of q may lie further apart than Hq * D. Their own keys and values are in kv
    already. scale: of q k, default D ** -0.5.

    Online softmax: FlashAttention-2, arXiv:2307.08691. Division of the keys: Flash-Decoding, 2023.
    """
    rows, heads, dim = q.shape
    kv_heads, group = kv.shape[2], heads // kv.shape[2]
    if config is None:
        few = 16 < longest * group <= 64 and sizes.shape[0] * kv_heads <= FEW_HEADS
        config = config_of(dim, 32 if few else longest * group, q.dtype, kv.dtype)
    columns = tables.shape[1]
    most = columns * page_size
    if mask.window is not None:
        most = min(most, mask.window * (1 if mask.causal else 2) + longest)
    blocks = -(-longest * group // config.pairs)
    units = sizes.shape[0] * blocks * kv_heads
    room = workspace.programs * _PAIRS // max(_PAIRS, config.pairs)
    splits = max(1, min(room // units, -(-most // PIECE_KEYS), _MOST_PIECES))
    assert dim <= workspace.head_dim
    assert starts.is_contiguous()
    pdl = dependent(q.device)
    out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    _attention[(units // kv_heads, kv_heads, splits)](
        q, kv, out, starts, sizes, row_starts, tables, table_rows,
        workspace.partials, workspace.stats, workspace.counters,
        q.stride(0), columns, blocks, splits, mask.window or _NO_WINDOW, workspace.programs,
        (dim**-0.5 if scale is None else scale) * math.log2(math.e),
        group, kv_heads, dim, page_size, mask.causal, mask.window is not None, _INTERPRETED,
        config.pairs, config.keys, config.apart, splits > 1, PIECE_KEYS, pdl,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out
