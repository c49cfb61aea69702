# pyright: basic, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false
"""Experts of few rows: routing, two grouped GEMMs with the activation between them, and each row's
weighted sum. Experts that no row chose are not read, and padding rows choose none.

    routing.py        each row's experts and weights; pairs of a row and an expert, sorted by expert
                      and cut into blocks
    _grouped_kernel   a tile of an expert's weight times a block of its rows; twice. For MXFP4 in
                      bfloat16: mxfp4.py; for other codes: coded_experts.py
    _sum_kernel       each row's outputs, added in the order of its experts

More than MAX_ROWS rows use torch's grouped GEMMs between these kernels.

Legend: T rows, H hidden size, E experts of inner size I, k experts per row, P = T k pairs, row
after row; W [N, K] an expert's weight. No result depends on the order in which programs run, and a
row's bits do not depend on the other rows in a bucket of row counts. The torch twin is
`strobe.kernels.reference_experts`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.coded import CodedExperts, pointers
from strobe.kernels.coded_experts import coded_experts_kernel, coded_options
from strobe.kernels.experts_table import MAX_ROWS, ExpertsConfig, Tile, choose
from strobe.kernels.experts_tile import block_of, columns_of, finish, weight_rows
from strobe.kernels.gemm import DTYPES, INTERPRETED
from strobe.kernels.gemm_table import Weight
from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.reference_experts import Gate, Linear, Routing, grouped_gemm, has_grouped
from strobe.kernels.routing import Routed, route
from strobe.kernels.rowwise import round_to, row_part, silu_mul
from strobe.kernels.unpack import PackedWeight, e2m1, e4m3

try:
    from strobe.kernels.mxfp4 import instructions, mxfp4_kernel
except (AttributeError, ImportError):
    HAS_GLUON = False
else:
    HAS_GLUON = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
"""Whether Triton has what `mxfp4.py` uses of Gluon; without it MXFP4 is unpacked slowly."""

__all__ = ["PackedWeight", "experts", "serves"]

_ACTIVATIONS: dict[str, int] = {"silu": 1, "gelu_tanh": 2, "clamped": 3}


@triton.jit
def _grouped_kernel(
    x,  # [T, K], or with DOWN [P, K] in the order of `pairs`
    weight,  # [E, N, K], or packed as in unpack.py
    scale,  # of packed weights; or None
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
    LINE: tl.constexpr,  # bytes or, of E2M1, words of a packed row
    E2M1: tl.constexpr,
    GROUP: tl.constexpr,  # values of E4M3 that share a scale
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
    sources = weight_rows(tile, ws, N, BLOCK_N, ACTIVATION)
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
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if scale is None:
            spots = weight + expert.to(tl.int64) * (N * K) + sources[:, None] * K + ks[None, :]
            for k in tl.range(0, K, BLOCK_K):
                if TAIL:
                    w = tl.load(spots + k, (k + ks < K)[None, :], other=0.0)
                else:
                    w = tl.load(spots + k)
                if INTERPRETED:
                    w = w.to(tl.float32)
                a = tl.trans(columns_of(lines, live, k, ks, K, TAIL))
                total = tl.dot(w, a, total, input_precision="ieee")
        elif E2M1:
            spots = weight + expert.to(tl.int64) * (N * LINE) + sources[:, None] * LINE
            scales = scale + expert.to(tl.int64) * ((K + 127) // 128 * N) + sources[:, None]
            for k in tl.range(0, K, BLOCK_K):
                column = (k + ks)[None, :]
                word = column // 64 * 8 + column % 8 // 2 * 2 + column // 32 % 2
                words = tl.load(spots + word, column < K, 0)
                exponents = tl.load(scales + column // 128 * N, column < K, 0)
                w = e2m1(words, exponents, column)
                a = tl.trans(columns_of(lines, live, k, ks, K, TAIL))
                total = tl.dot(w.to(a.dtype), a, total, input_precision="ieee")
        else:
            BY_ROW: tl.constexpr = GROUP >= K
            spots = weight + expert.to(tl.int64) * (N * LINE) + sources[:, None] * LINE
            spots += ks[None, :]
            GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
            scales = scale + expert.to(tl.int64) * (GROUPS * N) + sources
            if not BY_ROW:
                factor = tl.load(scales)
            for k in tl.range(0, K, BLOCK_K):
                if TAIL:
                    w = tl.load(spots + k, (k + ks < K)[None, :], other=0)
                else:
                    w = tl.load(spots + k)
                w = e4m3(w, DTYPE)
                a = tl.trans(columns_of(lines, live, k, ks, K, TAIL))
                if BY_ROW:
                    total = tl.dot(w, a, total, input_precision="ieee")
                else:
                    total += tl.dot(w, a, input_precision="ieee") * factor[:, None]
                    # Load one iteration ahead: the pipeline skips loads as narrow as this.
                    after = (k + BLOCK_K) // GROUP
                    factor = tl.load(scales + after * N, after < GROUPS, other=0.0)
            if BY_ROW:
                total *= tl.load(scales)[:, None]
        finish(
            total, bias, shares, y, expert, sources, pair, place, live, tile, limit,
            N=N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, ACTIVATION=ACTIVATION, DOWN=DOWN, DTYPE=DTYPE,
        )  # fmt: skip


@triton.jit
def _sum_kernel(
    y,  # [P, H]
    ids,  # int32 [P]
    places,  # int32 [P], of the pairs in y; or None if they are in order
    shares,  # fp32 [P], to multiply y with; or None
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
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        computed = tl.load(ids + pair) < E
        place = pair if places is None else tl.load(places + pair).to(tl.int64)
        part = tl.load(y + place * H + column, inside & computed, 0.0).to(tl.float32)
        total += part if shares is None else part * tl.load(shares + pair, computed, 0.0)
    if extra is not None:
        total += tl.load(extra + row * extra_stride + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * H + column, round_to(total, out.dtype.element_ty), inside)


class Projection(NamedTuple):
    """One linear layer of each expert: weights [E, N, K] and biases [E, N]."""

    weight: Weight | PackedWeight | CodedExperts
    bias: Tensor | None = None


class KernelExperts(NamedTuple):
    """A layer's experts as the kernels read them, and the routing of rows to them."""

    routing: Routing
    gate_up: Projection
    down: Projection
    gate: Gate

    @property
    def count(self) -> int:
        """Experts at hand, with a shared one."""
        return self.gate_up.weight.shape[0]


def grouped(
    x: Tensor,
    projection: Projection,
    routed: Routed,
    *,
    tile: Tile,
    block_m: int,
    activation: Gate | None,
    warmup: bool = False,
) -> Tensor:
    """x [T, H] -> [P, I] by the first GEMM, which has an activation, or [P, I] -> [P, H] by the
    second. `warmup` only compiles the kernel."""
    weight = projection.weight
    number = routed.ids.numel()
    count, n, _ = weight.shape
    outputs = n if activation is None else n // 2
    y = x.new_empty(number, outputs)
    pdl = supports_pdl(x.device)
    grid = (triton.cdiv(n, tile.block_n) * routed.num_blocks,)
    kernel = _kernel_of(weight, x.dtype, tile=tile, block_m=block_m)
    options = kernel.options
    if warmup:
        options["grid"] = grid
    (kernel.function.warmup if warmup else kernel.function[grid])(
        x,
        *kernel.tensors,
        projection.bias,
        routed.ids,
        routed.pairs,
        routed.blocks,
        routed.weights,
        y,
        x.stride(0),
        0.0 if activation is None else activation.limit,
        E=count,
        TOP_K=routed.ids.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        ACTIVATION=_ACTIVATIONS[activation.name] if activation else 0,
        DOWN=activation is None,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
        **options,
    )
    return y


class _Kernel(NamedTuple):
    """A kernel for a weight, the weight's tensors, and the options that depend on them."""

    function: Any
    tensors: tuple[Tensor | None, ...]
    options: dict[str, Any]


def _kernel_of(
    weight: Weight | PackedWeight | CodedExperts, dtype: torch.dtype, *, tile: Tile, block_m: int
) -> _Kernel:
    """Return the kernel that multiplies x of a dtype by a weight."""
    _, n, k = weight.shape
    if isinstance(weight, CodedExperts):
        options = coded_options(weight, tile.block_k)
        options |= {"DTYPE": DTYPES[dtype], "num_stages": tile.stages}
        return _Kernel(coded_experts_kernel, pointers(weight.codes)[:-1], options)
    kind = ""
    group = 0
    if isinstance(weight, PackedWeight):
        kind = weight.kind
        group = weight.group
    data = weight.data
    options: dict[str, Any] = {"N": n, "K": k}
    if kind == "e2m1":
        data = data.view(torch.int32)
    if kind == "e2m1" and dtype == torch.bfloat16 and HAS_GLUON and not INTERPRETED:
        options |= {"STAGES": tile.stages, **instructions(block_m)}
        return _Kernel(mxfp4_kernel, (data, weight.scale), options)
    block_k = tile.block_k
    if kind == "e4m3" and group < k:
        block_k = math.gcd(block_k, group)
    options |= {
        "LINE": data.shape[2],
        "E2M1": kind == "e2m1",
        "GROUP": group,
        "BLOCK_K": block_k,
        "DTYPE": DTYPES[dtype],
        "num_stages": 1 if kind == "e2m1" else tile.stages,
    }
    return _Kernel(_grouped_kernel, (data, weight.scale), options)


def serves(x: Tensor, gate_up: Linear) -> bool:
    """Whether `experts` can compute x [T, H]."""
    is_plain = gate_up.format is None and gate_up.held_experts is None
    return x.shape[0] <= MAX_ROWS or (is_plain and has_grouped(x))


def experts(
    x: Tensor,
    logits: Tensor,
    layer: KernelExperts,
    extra: Tensor | None,
    *,
    sizes: Tensor | None = None,
    config: ExpertsConfig | None = None,
) -> Tensor:
    """x [T, H], logits [T, E] ([T, E + 1] with a shared expert), extra [T, H] -> extra + the
    weighted outputs of each row's experts [T, H]. sizes [S] int64: rows of each span; rows after
    them are padding and choose no experts. config: the table's if None."""
    routing = layer.routing
    if x.shape[0] > MAX_ROWS:
        routed = route(logits, routing, sizes, 1, by_pair=True)
        return _many(x, routed, layer, extra)
    if config is None:
        weight = layer.gate_up.weight
        kind = "" if isinstance(weight, Weight) else weight.kind
        shape = weight.shape[0] - routing.shared, *weight.shape[1:]
        config = choose(x.shape[0], shape, x.dtype, device=x.device, packed=kind)
    routed = route(logits, routing, sizes, config.block_m, by_pair=config.by_pair)
    inner = grouped(
        x,
        layer.gate_up,
        routed,
        tile=config.gate_up,
        block_m=config.block_m,
        activation=layer.gate,
    )
    y = grouped(
        inner,
        layer.down,
        routed,
        tile=config.down,
        block_m=config.block_m,
        activation=None,
    )
    return _add_up(y, routed, extra, layer.count)


def _add_up(
    y: Tensor, routed: Routed, extra: Tensor | None, count: int, places: Tensor | None = None
) -> Tensor:
    """y [P, H] -> [T, H]: the sum of each row's outputs and of extra. places: where they are in y,
    which is not yet multiplied by their weights; None if they are in order and multiplied."""
    size = y.shape[1]
    rows, top_k = routed.ids.shape
    out = y.new_empty(rows, size)
    block = min(triton.next_power_of_2(size), 512)
    pdl = supports_pdl(y.device)
    _sum_kernel[(rows, triton.cdiv(size, block))](
        y,
        routed.ids,
        places,
        None if places is None else routed.weights,
        extra,
        out,
        0 if extra is None else extra.stride(0),
        H=size,
        E=count,
        TOP_K=top_k,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def _many(x: Tensor, routed: Routed, layer: KernelExperts, extra: Tensor | None) -> Tensor:
    """Compute the experts of many rows by torch's grouped GEMMs; see `experts`."""
    count = layer.count
    of_pair, order = routed.ids.flatten().sort(stable=True)
    every = torch.arange(count, dtype=torch.int32, device=x.device)
    ends = torch.searchsorted(of_pair, every, right=True, out_int32=True)
    places = torch.empty_like(of_pair)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=x.device)

    def linear(x: Tensor, projection: Projection) -> Tensor:
        assert isinstance(projection.weight, Weight)
        y = grouped_gemm(x, projection.weight.data, ends)
        bias = projection.bias
        return y if bias is None else y.add_(bias.index_select(0, of_pair.clamp(max=count - 1)))

    inner = linear(x.index_select(0, order // routed.ids.shape[1]), layer.gate_up)
    if layer.gate.name == "clamped":
        inner = layer.gate(inner)
    else:
        inner = silu_mul(inner, gelu=layer.gate.name == "gelu_tanh")
    return _add_up(linear(inner, layer.down), routed, extra, count, places=places)
