# pyright: basic, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""GEMMs with few rows, y = x Wᵀ, which are bound by reading W, so fused operations are nearly free.

Legend: M rows of x (1 to 128), K columns of x, W [N, K] row-major (gated: [2N, K], gate rows then
up rows), y [M, N]. The tile of W is the left operand of the dot, because tensor cores need 64 rows
there, and x often has at most 16 in a decode step.

A program multiplies `block_n` rows of W by all of x over one of `split_k` ranges of K. With more
than one range, partial sums go to the workspace in fp32, and the last program to arrive at a tile
adds them in the order of the ranges. Without floating-point atomics, a row's result is bitwise the
same in every run, and independent of the other rows within a bucket of row counts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from strobe.kernels.gemm_table import GROUP, Gemm, GemmConfig, Weight, block_m, bucket_of
from strobe.kernels.operands import Epilogue, Input, Scaled
from strobe.kernels.pdl import supports_pdl
from strobe.kernels.rowwise import gated, round_to
from strobe.kernels.workspace import MAX_MARGIN, MIN_KEY, Workspace

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter stores bf16 and fp8 as integers: it truncates, and cannot multiply them."""

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _e4m3(value):
    """Round fp32, |value| <= 448, to e4m3; in the interpreter, to fp32 values on e4m3's grid."""
    if INTERPRETED:
        bits = value.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        small = (value + 24576.0) - 24576.0  # below 2**-6 the grid's step is 2**-9
        result = tl.where(tl.abs(value) < 0.015625, small, normal)
    else:
        result = value.to(tl.float8e4nv)
    return result


@triton.jit
def _prefetch(pointers, BYTES: tl.constexpr):
    """Prefetch `BYTES` from each pointer on into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _keys(logits, ns):
    """Return int64 keys in the order of (logit, lowest id first); NaN is above all, with id -1."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    order = tl.where(logits == logits, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)
    low = tl.where(logits == logits, (0x7FFFFFFF - ns).to(tl.int64), 0x80000000)
    return (order.to(tl.int64) << 32) | low


@triton.jit
def _logit(keys):
    """Return a key's logit in float32."""
    order = (keys >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _gemm(
    x,  # [M, K]
    x_scale,  # [M] fp32: x is e4m3 already; or None
    weight,  # [N, K], gated [2N, K]
    descriptor,  # of weight, for TMA; or None
    weight_scale,  # [N] fp32, gated [2N]; or None
    bias,  # [N], gated [2N]; or None
    norm_weight,  # [K]; or None
    sums,  # fp32 [M, PARTS] of squares, if x must still be divided by its rms; or None
    residual,  # [M, N]; or None
    y,  # [M, N]; with ARGMAX [M] int64
    next_weight,  # [N], of the next norm; or None
    next_x,  # [M, N]: y times next_weight
    next_sums,  # fp32 [M, tiles]: squares of y
    partials,  # fp32 [tiles, SPLIT, BLOCK_M, BLOCK_N], then squares [tiles, SPLIT, BLOCK_M]
    arrivals,  # int32 [tiles], zero between launches
    best,  # int64 [BLOCK_M], and with margins [BLOCK_M] second keys; MIN_KEY between launches
    margins,  # fp32 [M] of an ARGMAX: largest logit minus the second, up to MAX_MARGIN; or None
    largest,  # fp32 [M] of an ARGMAX: the logit itself; or None
    rows,  # M
    x_stride,
    residual_stride,
    y_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ARGMAX: tl.constexpr,
    DTYPE: tl.constexpr,  # of the model
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,  # PARTS or the next power of two
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    NORM: tl.constexpr = norm_weight is not None
    FP8: tl.constexpr = weight_scale is not None
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TAIL: tl.constexpr = K % BLOCK_K != 0

    tile = tl.program_id(0) // SPLIT
    split = tl.program_id(0) % SPLIT
    first = split * BLOCKS // SPLIT
    last = (split + 1) * BLOCKS // SPLIT

    ms = tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    ws = tl.arange(0, BLOCK_N)
    live = ms < rows
    # Rows of W in this tile; rows past the end repeat the last one and are not stored.
    ns = tile * COLUMNS + ws % COLUMNS
    sources = tl.minimum(ns, N - 1) + ws // COLUMNS * N
    start = weight + tl.minimum(tile * COLUMNS, N - 1).to(tl.int64) * K
    offsets = (sources - tl.minimum(tile * COLUMNS, N - 1)) * K

    if PDL:
        # No kernel writes the weights, so they can be read while the previous one still runs.
        if PREFETCH > 0:
            _prefetch(start + offsets + first * BLOCK_K, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Load the epilogue's inputs now if registers allow, so that they arrive during the loop.
    EARLY: tl.constexpr = BLOCK_M <= 32
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    stored = live[:, None] & (columns < N)[None, :]
    if EARLY:
        if sums is not None:
            ids = tl.arange(0, WIDTH)
            places = sums + ms[:, None] * PARTS + ids[None, :]
            words = tl.load(places, mask=live[:, None] & (ids < PARTS)[None, :], other=0.0)
        if residual is not None:
            lines = residual + ms[:, None] * residual_stride + columns[None, :]
            before = tl.load(lines, mask=stored, other=0.0)
        if next_weight is not None:
            scale = tl.load(next_weight + columns, mask=columns < N, other=0.0)

    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    if NORM:
        after = first * BLOCK_K + ks
        gain = tl.load(norm_weight + after, mask=after < K, other=0.0)
    for block in tl.range(first, last):
        k = block * BLOCK_K
        inside = (k + ks < K) if TAIL else tl.full([BLOCK_K], True, tl.int1)
        if descriptor is None:
            spots = start + k + offsets[:, None] + ks[None, :]
            w = tl.load(spots, mask=inside[None, :], other=0.0)
        else:
            if GATED:
                w = tl.reshape(descriptor.load([0, tile * COLUMNS, k]), [BLOCK_N, BLOCK_K])
            else:
                w = descriptor.load([tile * COLUMNS, k])
        a = tl.load(
            x + k + ms[:, None] * x_stride + ks[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        )
        if NORM:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            wide = wide * gain.to(tl.float32)[None, :]
            # Load one iteration ahead: the pipeline skips loads as narrow as this.
            after = k + BLOCK_K + ks
            gain = tl.load(norm_weight + after, mask=after < K, other=0.0)
            a = wide if GROUPS else round_to(wide, DTYPE)
        if GROUPS:
            wide = a.to(tl.float32)
            top = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-12)
            a = _e4m3(wide * (448.0 / top)[:, None])
        if INTERPRETED:
            w = w.to(tl.float32)
            a = a.to(tl.float32)
        if GROUPS:
            total += tl.dot(w, tl.trans(a)) * (top * (1.0 / 448.0))[None, :]
        elif FP8:
            # fp8 sums keep 14 bits inside the tensor cores: add them in fp32 every 128 columns.
            total = tl.dot(w, tl.trans(a), total, max_num_imprecise_acc=min(BLOCK_K, 128))
        else:
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")

    inner = ms[None, :] * BLOCK_N + ws[:, None]
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    norms = partials + TILES * SPLIT * SIZE + tile * (SPLIT * BLOCK_M) + ms
    partials += tile.to(tl.int64) * (SPLIT * SIZE)
    complete = True
    if SPLIT > 1:
        tl.store(partials + split * SIZE + inner, total, mask=live[None, :])
        if NORM:
            tl.store(norms + split * BLOCK_M, squares, mask=live)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        complete = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1
    if complete:
        if SPLIT > 1:
            tl.store(arrivals + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            squares = tl.zeros([BLOCK_M], tl.float32)
            # Unrolled, all loads are in flight together; a large tile has no registers for that.
            for part in tl.range(0, SPLIT, loop_unroll_factor=SPLIT if SPLIT * SIZE <= 8192 else 1):
                total += tl.load(
                    partials + part * SIZE + inner,
                    mask=live[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                if NORM:
                    squares += tl.load(
                        norms + part * BLOCK_M, mask=live, other=0.0, cache_modifier=".cg"
                    )
        if sums is not None:
            if EARLY:
                squares = tl.sum(words, axis=1)
            else:
                squares = tl.zeros([BLOCK_M], tl.float32)
                slots = tl.arange(0, 16)
                for part in tl.static_range(0, PARTS, 16):  # unrolled: all in flight together
                    places = sums + ms[:, None] * PARTS + part + slots[None, :]
                    in_range = live[:, None] & (part + slots < PARTS)[None, :]
                    squares += tl.sum(tl.load(places, mask=in_range, other=0.0), axis=1)
        if NORM or sums is not None:
            total *= (1.0 / tl.sqrt_rn(squares / K + eps))[None, :]
        if FP8:
            total *= tl.load(weight_scale + sources)[:, None]
            if not GROUPS:
                total *= tl.load(x_scale + ms, mask=live, other=0.0)[None, :]
        if bias is not None:
            total += tl.load(bias + sources).to(tl.float32)[:, None]
        if ARGMAX:
            logits = round_to(total, DTYPE)
            keys = tl.where((ns < N)[:, None], _keys(logits.to(tl.float32), ns[:, None]), MIN_KEY)
            first_key = tl.max(keys, axis=0)
            before = tl.atomic_max(best + ms, first_key, mask=live, sem="relaxed")
            if margins is not None:
                # Whenever two keys compete for the maximum, the smaller one may be the second.
                is_other = (ns < N)[:, None] & (keys != first_key[None, :])
                second = tl.max(tl.where(is_other, logits.to(tl.float32), float("-inf")), axis=0)
                key2 = _keys(second, tl.zeros([BLOCK_M], tl.int32))
                key2 = tl.maximum(key2, tl.minimum(before, first_key))
                tl.atomic_max(best + BLOCK_M + ms, key2, mask=live, sem="relaxed")
            tl.debug_barrier()
            if tl.atomic_add(arrivals + TILES, 1, sem="acq_rel") == TILES - 1:
                tl.store(arrivals + TILES, 0)
                key = tl.load(best + ms, mask=live, other=0, cache_modifier=".cg")
                tl.store(y + ms, 0x7FFFFFFF - (key & 0xFFFFFFFF), mask=live)
                if largest is not None:
                    tl.store(largest + ms, _logit(key), mask=live)
                if margins is not None:
                    key2 = tl.load(best + BLOCK_M + ms, mask=live, other=0, cache_modifier=".cg")
                    margin = _logit(key) - _logit(key2)
                    margin = tl.where(margin == margin, margin, 0.0)
                    tl.store(margins + ms, tl.minimum(margin, MAX_MARGIN), mask=live)
                tl.debug_barrier()  # all threads of a row have read it
                tl.store(best + ms, tl.full([BLOCK_M], MIN_KEY, tl.int64))
                if margins is not None:
                    tl.store(best + BLOCK_M + ms, tl.full([BLOCK_M], MIN_KEY, tl.int64))
        else:
            out = tl.trans(total)
            if GATED:
                gate, up = tl.split(tl.permute(tl.reshape(out, [BLOCK_M, 2, COLUMNS]), [0, 2, 1]))
                out = gated(gate, up, GELU)
            if residual is not None:
                if not EARLY:
                    lines = residual + ms[:, None] * residual_stride + columns[None, :]
                    before = tl.load(lines, mask=stored, other=0.0)
                out += before.to(tl.float32)
            result = round_to(out, DTYPE)
            tl.store(y + ms[:, None] * y_stride + columns[None, :], result, mask=stored)
            if next_weight is not None:
                wide = tl.where(stored, result.to(tl.float32), 0.0)
                tl.store(next_sums + ms * TILES + tile, tl.sum(wide * wide, axis=1), mask=live)
                if not EARLY:
                    scale = tl.load(next_weight + columns, mask=columns < N, other=0.0)
                tl.store(
                    next_x + ms[:, None] * N + columns[None, :],
                    round_to(wide * scale.to(tl.float32)[None, :], DTYPE),
                    mask=stored,
                )


def launch(
    config: GemmConfig,
    gemm: Gemm,
    workspace: Workspace,
    x: Input,
    weight: Weight,
    epilogue: Epilogue,
    *,
    warmup: bool = False,
) -> Scaled | None:
    """Launch the kernel with `config`, a Triton one, to write epilogue.out; `warmup` only compiles
    it. Returns the result as prepared for the epilogue's next norm."""
    out = epilogue.out
    assert out is not None
    rows = x.rows.shape[0]
    bucket = block_m(bucket_of(rows))
    tiles = config.tiles(gemm)
    split = 1 if gemm.argmax else config.split_k
    workspace.reserve(tiles * split * bucket * (config.block_n + 1) if split > 1 else 0, tiles + 1)
    groups = gemm.fp8 and x.scale is None
    assert config.block_k == GROUP or not groups
    assert gemm.n * gemm.k < 2**31 or not gemm.gated  # offsets from the first row
    pdl = supports_pdl(x.rows.device)
    prepared = None
    if epilogue.next_norm is not None:
        squares = out.new_empty(rows, tiles, dtype=torch.float32)
        prepared = Scaled(out.new_empty(out.shape), squares)
    data = x.rows if x.scaled is None else x.scaled.data
    sums = None if x.scaled is None else x.scaled.sums
    num_parts = 0 if sums is None else sums.shape[1]
    residual = epilogue.residual
    kernel: Any = _gemm.warmup if warmup else _gemm[(tiles * split,)]
    kernel(
        data,
        x.scale,
        weight.data,
        _descriptor(config, gemm, weight) if config.tma else None,
        weight.scale,
        epilogue.bias,
        None if x.norm is None or sums is not None else x.norm.weight,
        sums,
        residual,
        out,
        epilogue.next_norm,
        None if prepared is None else prepared.data,
        None if prepared is None else prepared.sums,
        workspace.partials,
        workspace.arrived,
        workspace.best,
        None if epilogue.argmax is None else epilogue.argmax.margins,
        None if epilogue.argmax is None else epilogue.argmax.largest,
        rows,
        data.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        0.0 if x.norm is None else x.norm.eps,
        N=gemm.outputs,
        K=gemm.k,
        BLOCK_M=bucket,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT=split,
        GATED=gemm.gated,
        GELU=epilogue.activation == "gelu_tanh",
        ARGMAX=gemm.argmax,
        DTYPE=DTYPES[gemm.dtype],
        PARTS=num_parts,
        WIDTH=int(triton.next_power_of_2(num_parts)),
        GROUPS=groups,
        PDL=pdl,
        PREFETCH=_prefetched(config, gemm, split),
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
        **({"grid": (tiles * split,)} if warmup else {}),
    )
    return prepared


def _descriptor(config: GemmConfig, gemm: Gemm, weight: Weight) -> TensorDescriptor:
    """Return the tiles of W for the tensor memory accelerator."""
    columns = gemm.outputs
    shape = [columns, gemm.k]
    block = [config.block_n, config.block_k]
    if gemm.gated:
        shape = [2, *shape]
        block = [2, config.block_n // 2, config.block_k]
    strides = [columns * gemm.k, gemm.k, 1][-len(shape) :]
    return TensorDescriptor(weight.data, shape, strides, block)


def _prefetched(config: GemmConfig, gemm: Gemm, split: int) -> int:
    """Return the bytes of each row of W to prefetch, a multiple of 16."""
    if gemm.k * gemm.item % 16:
        return 0
    # Ranges of K start at multiples of block_k; only the last one may reach the end of W.
    blocks = -(-gemm.k // config.block_k)
    range_bytes = (gemm.k - (split - 1) * blocks // split * config.block_k) * gemm.item
    return min(config.prefetch, range_bytes) // 16 * 16
