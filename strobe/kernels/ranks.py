# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
"""Exchange of few rows between the GPUs of one machine, in one launch each.

A program writes its row into memory of every other rank, then its number, which grows with every
launch, and waits until the others' numbers have grown as much. Rows go to two places in turns:
when a rank writes to a place again, the others have begun the launch in between, so that they have
read what was there.

Legend: R rows, C columns, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.gemm import DTYPES
from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.rowwise import round_to
from strobe.kernels.workspace import MAX_MARGIN

ROW_BYTES = tl.constexpr(16384)
ENDED = 1 << 62
"""A number that ends all waiting."""


@dataclass(frozen=True)
class RankMemory:
    """addresses: int64 [N], on the device, where this rank finds every rank's memory: the numbers
    int64 [rows, N], then the rows of both places and all ranks. counts: int64 [rows], the launches
    of each program."""

    rank: int
    addresses: Tensor
    counts: Tensor

    @property
    def size(self) -> int:
        return self.addresses.shape[0]

    @property
    def max_rows(self) -> int:
        return self.counts.shape[0]

    @staticmethod
    def bytes_of(rows: int, size: int) -> int:
        """Return the bytes of one rank's memory."""
        return rows * size * (8 + 2 * ROW_BYTES.value)

    def fits(self, x: Tensor) -> bool:
        """Whether a tensor [R, C] can be exchanged; its rows may have a stride."""
        if x.ndim != 2 or x.dtype not in DTYPES or x.stride(1) != 1:
            return False
        return 0 < x.shape[0] <= self.max_rows and x.shape[1] * x.itemsize <= ROW_BYTES.value

    def add(
        self,
        part: Tensor,
        residual: Tensor | None = None,
        *,
        next_norm: tuple[Tensor, float] | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """part [R, C] -> residual + the sum of the ranks' parts, in their order, rounded once; and
        with the weight [C] and epsilon of the next RMSNorm the same after it."""
        out = part.new_empty(part.shape) if out is None else out
        return out, self._sum(part, residual, next_norm, out)

    def embed(self, ids: Tensor, weight: Tensor, first: int) -> Tensor:
        """ids [R] int64 -> [R, H], the embeddings. weight [V, H]: the rank's part of the table,
        which begins at id `first`."""
        out = weight.new_empty(ids.shape[0], weight.shape[1])
        self._sum(weight, None, None, out, ids, first)
        return out

    def _sum(
        self,
        part: Tensor,
        residual: Tensor | None,
        next_norm: tuple[Tensor, float] | None,
        out: Tensor,
        ids: Tensor | None = None,
        first: int = 0,
    ) -> Tensor | None:
        rows, columns = out.shape
        weight, eps = next_norm or (None, 0.0)
        normed = None if weight is None else out.new_empty(out.shape)
        block = triton.next_power_of_2(columns)
        _sum_kernel[(rows,)](
            part,
            ids,
            residual,
            out,
            weight,
            normed,
            self.addresses,
            self.counts,
            part.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            eps,
            first,
            part.shape[0],
            C=columns,
            BLOCK=block,
            DTYPE=DTYPES[part.dtype],
            **self._options(min(max(block // 512, 1), 16)),
        )
        return normed

    def best(self, values: Tensor, ids: Tensor, margins: Tensor, first: int) -> Tensor:
        """values [R] float32, ids [R] int64, margins [R] float32: each row's largest logit of this
        rank's part of the vocabulary, which begins at `first`, its id there, and its margin over
        the second -> the id of the largest one of all ranks, the lowest if several are equal, -1
        for rows with a NaN. Fills margins with those over the second of all."""
        out = torch.empty_like(ids)
        _best_kernel[(ids.shape[0],)](
            values, ids, margins, out, self.addresses, self.counts, first, **self._options(1)
        )
        return out

    def _options(self, warps: int) -> dict[str, object]:
        pdl = supports_pdl(self.counts.device)
        place = {"RANK": self.rank, "SIZE": self.size, "ROWS": self.max_rows}
        return {**place, "PDL": pdl, "num_warps": warps, "launch_pdl": pdl}


@triton.jit
def _place(addresses, rank, turn, source, row, DTYPE: tl.constexpr, SIZE, ROWS):
    """Return where a rank's memory holds a row of another rank."""
    start = tl.load(addresses + rank) + ROWS * SIZE * 8
    start += ((turn * SIZE + source) * ROWS + row) * ROW_BYTES
    return tl.multiple_of(start.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _send(
    values, columns, live, number, row, addresses, DTYPE: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Give a row to all other ranks, and wait for theirs."""
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            place = _place(addresses, rank, number % 2, RANK, row, DTYPE, SIZE, ROWS)
            tl.store(place + columns, values, mask=live)
    tl.debug_barrier()  # all threads' writes, then the number
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            numbers = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(numbers + row * SIZE + RANK, number, sem="release", scope="sys")
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64)) + row * SIZE
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            seen = tl.atomic_add(own + rank, 0, sem="acquire", scope="sys")
            while seen < number:
                seen = tl.atomic_add(own + rank, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["first", "table_rows"])
def _sum_kernel(
    part,  # [R, C]; with ids a table [V, C]
    ids,  # [R] of the table's rows, from `first` on; or None
    residual,  # [R, C]; or None
    out,  # [R, C], which may be residual
    weight,  # [C], of the next norm; or None
    normed,  # [R, C]
    addresses,
    counts,
    part_stride,
    residual_stride,
    out_stride,
    eps,
    first,
    table_rows,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < C
    if weight is not None:
        scale = tl.load(weight + columns, mask=live, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    number = tl.load(counts + row) + 1
    source, here = row, live
    if ids is not None:
        source = tl.load(ids + row) - first
        here = live & (source >= 0) & (source < table_rows)
    x = tl.load(part + source * part_stride + columns, mask=here, other=0.0)
    if residual is not None:
        before = tl.load(residual + row * residual_stride + columns, mask=live, other=0.0)
    _send(x, columns, live, number, row, addresses, DTYPE, RANK, SIZE, ROWS)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            place = _place(addresses, RANK, number % 2, rank, row, DTYPE, SIZE, ROWS)
            other = tl.load(place + columns, mask=live, other=0.0, cache_modifier=".cg")
            total += other.to(tl.float32)
    if residual is not None:
        total += before.to(tl.float32)
    result = round_to(total, DTYPE)
    tl.store(out + row * out_stride + columns, result, mask=live)
    if weight is not None:
        wide = result.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / C + eps) * scale
        tl.store(normed + row * C + columns, round_to(wide, DTYPE), mask=live)
    tl.debug_barrier()  # all threads have read the number
    tl.store(counts + row, number)


@triton.jit(do_not_specialize=["first"])
def _best_kernel(
    values,
    ids,
    margins,
    out,
    addresses,
    counts,
    first,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    number = tl.load(counts + row) + 1
    value, margin = tl.load(values + row), tl.load(margins + row)
    token = tl.load(ids + row).to(tl.int32)
    token = tl.where(token < 0, token, token + first)
    columns = tl.arange(0, 4)
    words = tl.where(columns == 1, token, value.to(tl.int32, bitcast=True))
    words = tl.where(columns == 2, margin.to(tl.int32, bitcast=True), words)
    _send(words, columns, columns < 3, number, row, addresses, tl.int32, RANK, SIZE, ROWS)
    failed = token < 0
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            new, new_token, new_margin = value, token, margin
        else:
            place = _place(addresses, RANK, number % 2, rank, row, tl.int32, SIZE, ROWS)
            new = tl.load(place, cache_modifier=".cg").to(tl.float32, bitcast=True)
            new_token = tl.load(place + 1, cache_modifier=".cg")
            new_margin = tl.load(place + 2, cache_modifier=".cg").to(tl.float32, bitcast=True)
        failed = failed | (new_token < 0)
        if rank == 0:
            best, best_token, best_margin = new, new_token, new_margin
        else:
            wins = new > best
            gap = tl.where(wins, new - best, best - new)
            gap = tl.where(gap == gap, gap, 0.0)  # of infinities
            best_margin = tl.minimum(tl.where(wins, new_margin, best_margin), gap)
            best_token = tl.where(wins, new_token, best_token)
            best = tl.where(wins, new, best)
    tl.store(out + row, tl.where(failed, -1, best_token).to(tl.int64))
    tl.store(margins + row, tl.minimum(tl.where(failed, 0.0, best_margin), MAX_MARGIN))
    tl.debug_barrier()
    tl.store(counts + row, number)
