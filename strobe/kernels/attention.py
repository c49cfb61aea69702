# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false
"""Attention of ragged rows over the paged cache: one kernel for prefill, decode, verify and draft.

Legend: T rows of a batch, S spans, Hq query and Hkv key-value heads, G = Hq / Hkv, D head size.

A block is BLOCK_M (row, head) pairs of one span that share a key-value head: pair m is row m // G,
head m % G. The keys that any of its rows sees are split into pieces, one program each:

    0 ....... begin .......................................... end ........ starts + sizes
                |  piece 0  |  piece 1  |  piece 2  |  piece 3  |
                     dense ..................... free             keys that every row sees
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.attention_table import AttentionConfig, config_of
from strobe.kernels.gemm_table import shared_memory
from strobe.kernels.pdl import pdl_wait, supports_pdl

if TYPE_CHECKING:
    from strobe.attention.mask import LayerMask

PIECE_KEYS = 128  # minimum keys of a piece; for smaller ones, combining costs more than it saves
PROGRAMS_PER_SM = 1  # target of the number of pieces
FAN_IN = 8  # pieces combined at once
COMBINED = 512  # elements of each piece that a program combines

_LOG2_E = tl.constexpr(math.log2(math.e))
_LOWEST = tl.constexpr(-1.0e38)  # finite: exp2(_LOWEST - _LOWEST) is a number


@triton.jit
def _attend(
    state, q, cache, table, begin, end, last, floor, ceiling,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Add the keys [begin, end) to the state: weighted values [M, D], maxima [M], sums of weights
    [M], and the table entries of the first keys.

    last: the last key that may be read. Row m sees keys in [floor[m], ceiling[m]).
    """
    acc, top, total, entries = state
    columns = tl.arange(0, D)
    for key in tl.range(begin, end, BLOCK_N):
        keys = key + tl.arange(0, BLOCK_N)
        # Repeat the last key instead of masking: 0 * NaN from an unwritten slot would be NaN.
        slots = entries.to(tl.int32) + (tl.minimum(keys, last) if MASKED else keys)
        rows = cache + slots.to(tl.int64)[:, None] * (2 * HEADS * D) + columns[None, :]
        # Load one iteration ahead and carry the loaded value itself: the pipeline hoists only
        # loads, and would wait here for anything computed from them.
        entries = tl.load(table + tl.minimum(keys + BLOCK_N, last) // PAGE)
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
    out, state, first, pairs, head, size, sinks, value_scale,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write the outputs of (row, head) pairs of a span whose first row is `first`."""
    acc, top, total = state
    if SINKS:
        # A sink adds to the denominator only.
        sink = tl.load(sinks + head * G + pairs % G).to(tl.float32) * _LOG2_E
        peak = tl.maximum(top, sink)
        decay = tl.exp2(top - peak)
        result = acc * (decay / (total * decay + tl.exp2(sink - peak)))[:, None]
    else:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]  # 0 for a row that sees nothing
    result *= value_scale
    cells = ((first + pairs // G) * HEADS + head) * (G * D) + pairs % G * D
    cells = out + cells[:, None] + tl.arange(0, D)[None, :]
    tl.store(cells, result.to(out.dtype.element_ty), mask=(pairs < size * G)[:, None])


@triton.jit
def _extent(start, size, first, final, window, limit, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Return [begin, end) of the keys below `limit` that any row of a block sees, for rows at
    positions first to final."""
    begin = 0
    end = tl.minimum(start + size, limit)
    if CAUSAL:
        end = tl.minimum(end, final + 1)
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0)
        if not CAUSAL:
            end = tl.minimum(end, final + window)
    return begin, end


@triton.jit
def _pieces(begin, end, splits, BLOCK_N: tl.constexpr, PIECE: tl.constexpr):
    """Return the keys per piece, and the number of pieces."""
    share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_N) * BLOCK_N
    share = tl.maximum(share, PIECE)
    return share, tl.maximum(tl.cdiv(end - begin, share), 1)


@triton.jit(do_not_specialize=["columns", "limit", "blocks", "splits", "window"])
def _attention(
    queries, kv, out, starts, sizes, row_starts, tables, table_rows, sinks, partials, stats,
    stride, columns, limit, blocks, splits, window, value_scale,
    SCALE: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNMASKED: tl.constexpr,
    SPLIT: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    head = unit % HEADS  # heads vary fastest: concurrent programs read from the same slots
    place = unit // HEADS
    span = place // blocks
    block = blocks - 1 - place % blocks  # blocks with the largest number of keys first
    size = tl.load(sizes + span).to(tl.int32)  # four loads in flight together
    start = tl.load(starts + span).to(tl.int32)
    first_row = tl.load(row_starts + span)
    table = tables + tl.load(table_rows + span) * columns
    if block * BLOCK_M >= size * G:
        return
    first = start + block * BLOCK_M // G  # the positions of the first row and the final one
    final = start + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // G, size - 1)

    begin, end = _extent(start, size, first, final, window, limit, CAUSAL, WINDOWED)
    dense = 0
    free = end
    if CAUSAL:
        free = tl.minimum(end, first + 1)
    if WINDOWED:
        dense = tl.maximum(final - window + 1, 0)
        if not CAUSAL:
            free = tl.minimum(end, first + window)
    if SPLIT:
        piece = tl.program_id(2)
        share, pieces = _pieces(begin, end, splits, BLOCK_N, PIECE)
        if piece >= pieces:
            return
        begin += piece * share
        end = tl.minimum(begin + share, end)

    keys = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
    entries = tl.load(table + keys // PAGE)
    pairs = block * BLOCK_M + tl.arange(0, BLOCK_M)
    position = start + pairs // G
    row = first_row + pairs // G
    cells = (head * G + pairs % G)[:, None] * D + tl.arange(0, D)[None, :]
    # Geometry and tables, loaded above, are written by kernels that have finished by now.
    pdl_wait(PDL)
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
    state = acc, top, total, entries
    if UNMASKED:
        # Full blocks of keys between `inner` and `outer` are visible to every row: no mask.
        inner = begin
        if WINDOWED:
            inner = begin + tl.cdiv(tl.maximum(dense - begin, 0), BLOCK_N) * BLOCK_N
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
        _write(out, state, first_row, pairs, head, size, sinks, value_scale, G, HEADS, D, SINKS)
    else:
        # Partial results for _combine.
        part = unit * splits + piece
        offsets = tl.arange(0, BLOCK_M)
        partial = partials + part.to(tl.int64) * (BLOCK_M * D)
        partial = partial + offsets[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(partial, acc, mask=(pairs < size * G)[:, None])
        tl.store(stats + part * (2 * BLOCK_M) + offsets, top)
        tl.store(stats + part * (2 * BLOCK_M) + BLOCK_M + offsets, total)


@triton.jit(do_not_specialize=["limit", "blocks", "splits", "window"])
def _combine(
    out, starts, sizes, row_starts, sinks, partials, stats, limit, blocks, splits, window,
    value_scale,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr, FAN_IN: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of a block's pieces, in order, for PAIRS of its pairs."""
    unit = tl.program_id(0)
    head = unit % HEADS
    place = unit // HEADS
    span = place // blocks
    block = blocks - 1 - place % blocks
    size = tl.load(sizes + span).to(tl.int32)
    start = tl.load(starts + span).to(tl.int32)
    first_row = tl.load(row_starts + span)
    offsets = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
    pairs = block * BLOCK_M + offsets
    first = start + block * BLOCK_M // G
    final = start + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // G, size - 1)
    begin, end = _extent(start, size, first, final, window, limit, CAUSAL, WINDOWED)
    _, pieces = _pieces(begin, end, splits, BLOCK_N, PIECE)
    first_part = unit * splits
    used = (pairs < size * G)[:, None]
    pdl_wait(PDL)  # before any return, since the next kernel relies on it
    if pieces == 1 or block * BLOCK_M + tl.program_id(2) * PAIRS >= size * G:
        return
    acc = tl.zeros([PAIRS, D], tl.float32)
    top = tl.full([PAIRS], _LOWEST, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    cells = offsets[:, None] * D + tl.arange(0, D)[None, :]
    for piece in tl.range(0, pieces, FAN_IN):
        peak = top
        for i in tl.static_range(FAN_IN):
            spots = stats + (first_part + piece + i) * (2 * BLOCK_M) + offsets
            peak = tl.maximum(peak, tl.load(spots, mask=piece + i < pieces, other=_LOWEST))
        decay = tl.exp2(top - peak)
        acc *= decay[:, None]
        total *= decay
        top = peak
        for i in tl.static_range(FAN_IN):  # unrolled: all loads are in flight together
            spots = stats + (first_part + piece + i) * (2 * BLOCK_M) + offsets
            exists = piece + i < pieces
            weight = tl.exp2(tl.load(spots, mask=exists, other=_LOWEST) - peak)
            total += weight * tl.load(spots + BLOCK_M, mask=exists, other=0.0)
            part = partials + (first_part + piece + i).to(tl.int64) * (BLOCK_M * D) + cells
            acc += weight[:, None] * tl.load(part, mask=used & exists, other=0.0)
    state = acc, top, total
    _write(out, state, first_row, pairs, head, size, sinks, value_scale, G, HEADS, D, SINKS)


# The interpreter has no tl.dot in bfloat16: it computes in float32.
_INTERPRETED = not isinstance(_attention, triton.JITFunction)
_NO_WINDOW = 1 << 30
_MAX_PIECES = 64
_PAIRS = 64  # pairs of each program's result that fit into a workspace


class AttentionWorkspace:
    """Partial results of blocks that are split into pieces. All layers and models may share it if
    their launches run on one stream."""

    def __init__(self, device: torch.device, head_dim: int, programs: int | None = None):
        """head_dim: maximum over all models. programs: target number of programs when blocks are
        split."""
        self.shared_memory = shared_memory(device)
        self.head_dim = head_dim
        self.programs = programs or self.programs_of(device)
        pairs = self.programs * _PAIRS
        self.partials = torch.empty(pairs * head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(pairs * 2, dtype=torch.float32, device=device)

    @staticmethod
    def programs_of(device: torch.device) -> int:
        """Return PROGRAMS_PER_SM for each multiprocessor; a small number in the interpreter."""
        if device.type != "cuda":
            return 16
        return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count

    @staticmethod
    def nbytes(head_dim: int, programs: int) -> int:
        """Return a workspace's bytes: 4.4 MB for 132 programs and a head size of 128."""
        return programs * 4 * _PAIRS * (head_dim + 2)


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
    limit: int | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    value_scale: float = 1.0,
    config: AttentionConfig | None = None,
) -> Tensor:
    """q [T, Hq, D], kv [slots, 2, Hkv, D] (keys, values) -> [T, Hq * D].

    Span s has the rows row_starts[s] .. + sizes[s], none if its size is 0. Its row i is at position
    starts[s] + i and sees keys below starts[s] + sizes[s] as `mask` says. Position p is in slot
    tables[table_rows[s], p // page_size] + p. The rows' own keys and values are in kv already.
    starts, sizes, row_starts, table_rows [S] and tables [N, columns] are int64 and contiguous; the
    kernel launched just before must not write them, since they are read while it still runs.
    longest: an upper bound of the sizes. limit: rows see only keys at lower positions; default: the
    end of the tables. sinks [Hq]: one more logit per head, without a value. scale: of the logits,
    default D ** -0.5. value_scale: of the outputs. Rows of q may have a stride. Outputs of rows in
    no span are undefined.

    Online softmax: FlashAttention-2, arXiv:2307.08691. Splitting the keys: Flash-Decoding, 2023.
    """
    rows, heads, dim = q.shape
    kv_heads = kv.shape[2]
    group = heads // kv.shape[2]
    if config is None:
        config = config_of(
            head_dim=dim,
            pairs=longest * group,
            spans=sizes.shape[0],
            kv_heads=kv_heads,
            dtype=q.dtype,
            kv_dtype=kv.dtype,
            programs=workspace.programs,
            shared=workspace.shared_memory,
        )
    columns = tables.shape[1]
    max_keys = columns * page_size
    if mask.window is not None:
        max_keys = min(max_keys, mask.window * (1 if mask.causal else 2) + longest)
    blocks = -(-longest * group // config.pairs)
    units = sizes.shape[0] * blocks * kv_heads
    room = workspace.programs * _PAIRS // max(_PAIRS, config.pairs)
    splits = max(1, min(room // units, -(-max_keys // PIECE_KEYS), _MAX_PIECES))
    assert dim <= workspace.head_dim
    assert starts.is_contiguous()
    pdl = supports_pdl(q.device)
    out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    limit = columns * page_size if limit is None else min(limit, columns * page_size)
    window = mask.window or _NO_WINDOW
    is_windowed = mask.window is not None
    has_sinks = sinks is not None
    logits = q if sinks is None else sinks  # without sinks, any pointer: it is not read
    _attention[(units, 1, splits)](
        q,
        kv,
        out,
        starts,
        sizes,
        row_starts,
        tables,
        table_rows,
        logits,
        workspace.partials,
        workspace.stats,
        q.stride(0),
        columns,
        limit,
        blocks,
        splits,
        window,
        value_scale,
        SCALE=(dim**-0.5 if scale is None else scale) * math.log2(math.e),
        G=group,
        HEADS=kv_heads,
        D=dim,
        PAGE=page_size,
        CAUSAL=mask.causal,
        WINDOWED=is_windowed,
        SINKS=has_sinks,
        UPCAST=_INTERPRETED,
        BLOCK_M=config.pairs,
        BLOCK_N=config.keys,
        UNMASKED=config.unmasked_loop,
        SPLIT=splits > 1,
        PIECE=PIECE_KEYS,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )
    if splits > 1:
        fan_in = min(int(triton.next_power_of_2(splits)), FAN_IN)
        pairs = min(COMBINED // dim, config.pairs)
        _combine[(units, 1, -(-config.pairs // pairs))](
            out,
            starts,
            sizes,
            row_starts,
            logits,
            workspace.partials,
            workspace.stats,
            limit,
            blocks,
            splits,
            window,
            value_scale,
            G=group,
            HEADS=kv_heads,
            D=dim,
            PAGE=page_size,
            CAUSAL=mask.causal,
            WINDOWED=is_windowed,
            SINKS=has_sinks,
            BLOCK_M=config.pairs,
            BLOCK_N=config.keys,
            PIECE=PIECE_KEYS,
            FAN_IN=fan_in,
            PAIRS=pairs,
            PDL=pdl,
            num_warps=1,
            launch_pdl=pdl,
        )
    return out
