# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
"""Exchange of rows between the GPUs of one machine.

A program writes its row into memory of every other rank, then its number, which grows with every
launch, and waits until the others' numbers have grown as much. Rows go to two places in turns. A
rank writes to a place again two launches later; by then all ranks have begun the launch in between,
so they have read the place. More rows than there are programs take several launches.

Large sums of three ranks or more take two steps within a launch: each row goes to one rank, its
owner, which adds it up and sends the sum to the others. A rank that has the owner's sum knows that
all ranks have begun the launch.

Programs of a launch need not all fit on a GPU: GPUs start them in order, though CUDA does not
promise it, so that the first unfinished one runs on all ranks.

Legend: R rows, C columns, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.gemm import DTYPES
from strobe.kernels.operands import RowNorm
from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.peer_memory import (
    ROW_BYTES,
    await_rows,
    meet,
    place_of,
    read_row,
    signal,
    total_of,
    write_row,
)
from strobe.kernels.rowwise import round_to
from strobe.kernels.workspace import MAX_MARGIN

_OWNER_BYTES = 1 << 20
"""Rows have owners if that saves writing this many bytes or more: the second wait takes about 2.5
us, in which NVLink moves 1 MiB."""
ENDED = 1 << 62
"""A number that ends all waiting."""


@dataclass(frozen=True)
class RankMemory:
    """addresses: int64 [N], on the device, where this rank finds every rank's memory: the numbers
    int64 [rows, N], then the rows of both places and all ranks, aligned to 16 bytes. counts: int64
    [rows], runs of each program; the number of rows limits the programs of a launch."""

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

    def takes(self, x: Tensor) -> bool:
        """Whether tensors like x can be exchanged."""
        return x.ndim == 2 and x.dtype in DTYPES and x.numel() > 0

    def fits(self, x: Tensor) -> bool:
        """Whether tensors like x [R, C] can be added to others; their rows may have a stride."""
        return self.takes(x) and x.stride(1) == 1 and x.shape[1] * x.itemsize <= ROW_BYTES.value

    def add(
        self,
        part: Tensor,
        residual: Tensor | None = None,
        *,
        next_norm: RowNorm | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """part [R, C] -> residual + the sum of the ranks' parts, in their order, rounded once; and
        with the next RMSNorm the same after it."""
        out = part.new_empty(part.shape) if out is None else out
        return out, self._sum(part, out, residual=residual, next_norm=next_norm)

    def sum(self, x: Tensor) -> Tensor:
        """x [R, C] -> the sum of the ranks' tensors, in their order."""
        rows, columns = x.shape
        pieces = triton.cdiv(columns * x.itemsize, ROW_BYTES.value)  # of a row
        if missing := -columns % pieces:
            x = F.pad(x, (0, missing))
        return self.add(x.reshape(rows * pieces, -1))[0].view(rows, -1)[:, :columns]

    def embed(self, ids: Tensor, weight: Tensor, first: int) -> Tensor:
        """ids [R] int64 -> [R, H], the embeddings. weight [V, H]: the rank's part of the table,
        which begins at id `first`."""
        out = weight.new_empty(ids.shape[0], weight.shape[1])
        self._sum(weight, out, ids=ids, first=first)
        return out

    def _sum(
        self,
        part: Tensor,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        next_norm: RowNorm | None = None,
        ids: Tensor | None = None,
        first: int = 0,
    ) -> Tensor | None:
        rows, columns = out.shape
        normed = None if next_norm is None else out.new_empty(out.shape)
        block = triton.next_power_of_2(columns)
        saved = rows * columns * out.itemsize * (self.size - 1) * (self.size - 2) // self.size
        for first_row in range(0, rows, self.max_rows):
            _sum_kernel[(min(rows - first_row, self.max_rows),)](
                part,
                ids,
                residual,
                out,
                None if next_norm is None else next_norm.weight,
                normed,
                self.addresses,
                self.counts,
                part.stride(0),
                0 if residual is None else residual.stride(0),
                out.stride(0),
                0.0 if next_norm is None else next_norm.eps,
                first,
                part.shape[0],
                first_row,
                C=columns,
                BLOCK=block,
                DTYPE=DTYPES[part.dtype],
                OWNED=saved >= _OWNER_BYTES,
                **self._options(min(max(block // 512, 1), 16)),
            )
        return normed

    def best(self, values: Tensor, ids: Tensor, margins: Tensor, first: int) -> Tensor:
        """values [R] float32, ids [R] int64, margins [R] float32: each row's largest logit of this
        rank's part of the vocabulary, which begins at `first`, its id there, and its margin over
        the second -> the id of the largest one of all ranks, the lowest if several are equal, -1
        for rows with a NaN. Fills margins with those over the second of all."""
        out = torch.empty_like(ids)
        rows = ids.shape[0]
        for first_row in range(0, rows, self.max_rows):
            _best_kernel[(min(rows - first_row, self.max_rows),)](
                values,
                ids,
                margins,
                out,
                self.addresses,
                self.counts,
                first,
                first_row,
                **self._options(1),
            )
        return out

    def join(self, x: Tensor) -> Tensor:
        """x [R, C] -> [R, N * C], the ranks' columns."""
        return self._gather(x, len(x))

    def swap(self, x: Tensor) -> Tensor:
        """x [R, C] -> [ceil(R / N), N * C], the ranks' columns of this rank's `share` of rows."""
        return self._gather(x, -(-len(x) // self.size))

    def _gather(self, x: Tensor, rows: int) -> Tensor:
        """Give every rank so many rows: all, or its share."""
        columns = x.shape[1]
        x = x.contiguous()
        out = x.new_empty(rows, self.size * columns)
        block = min(triton.next_power_of_2(columns), ROW_BYTES.value // x.itemsize)
        pieces = triton.cdiv(columns, block)  # of a row
        for first in range(0, rows * pieces, self.max_rows):
            _gather_kernel[(min(rows * pieces - first, self.max_rows),)](
                x,
                out,
                self.addresses,
                self.counts,
                rows,
                len(x) - rows,
                columns,
                pieces,
                first,
                BLOCK=block,
                DTYPE=DTYPES[x.dtype],
                **self._options(min(max(block // 512, 1), 16)),
            )
        return out

    def _options(self, warps: int) -> dict[str, object]:
        pdl = supports_pdl(self.counts.device)
        place = {"RANK": self.rank, "SIZE": self.size, "ROWS": self.max_rows}
        return {**place, "PDL": pdl, "num_warps": warps, "launch_pdl": pdl}


@triton.jit(do_not_specialize=["first", "table_rows", "first_row"])
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
    first_row,  # of this launch
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    OWNED: tl.constexpr,  # whether each row has a rank that adds it up
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program + first_row
    columns = tl.arange(0, BLOCK)
    live = columns < C
    if weight is not None:
        scale = tl.load(weight + columns, mask=live, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    number = tl.load(counts + program) + 1
    source = row
    here = live
    if ids is not None:
        source = tl.load(ids + row) - first
        here = live & (source >= 0) & (source < table_rows)
    x = tl.load(part + source * part_stride + columns, mask=here, other=0.0)
    before = tl.zeros([BLOCK], tl.float32)
    if residual is not None:
        before += tl.load(residual + row * residual_stride + columns, mask=live, other=0.0)
    if OWNED:
        owner = program % SIZE
        result = x
        is_owner = tl.arange(0, triton.next_power_of_2(SIZE)) == owner
        if owner == RANK:
            await_rows(number, program, addresses, ~is_owner, SIZE, RANK)
            tl.debug_barrier()
            total = total_of(
                x, columns, live, number, program, addresses, BLOCK, DTYPE, RANK, SIZE, ROWS
            )
            result = round_to(total + before, DTYPE)
            for rank in tl.static_range(SIZE):
                if rank != RANK:
                    write_row(
                        result, columns, live, number, program, rank, addresses, DTYPE, RANK, SIZE,
                        ROWS,
                    )  # fmt: skip
            tl.debug_barrier()
            signal(number, program, addresses, ~is_owner, SIZE, RANK)
        else:
            write_row(x, columns, live, number, program, owner, addresses, DTYPE, RANK, SIZE, ROWS)
            tl.debug_barrier()
            signal(number, program, addresses, is_owner, SIZE, RANK)
            await_rows(number, program, addresses, is_owner, SIZE, RANK)
            tl.debug_barrier()
            result = read_row(
                columns, live, number, program, owner, addresses, DTYPE, RANK, SIZE, ROWS
            )
    else:
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                write_row(
                    x, columns, live, number, program, rank, addresses, DTYPE, RANK, SIZE, ROWS
                )
        meet(number, program, addresses, SIZE, RANK)
        total = total_of(
            x, columns, live, number, program, addresses, BLOCK, DTYPE, RANK, SIZE, ROWS
        )
        result = round_to(total + before, DTYPE)
    tl.store(out + row * out_stride + columns, result, mask=live)
    if weight is not None:
        wide = result.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / C + eps) * scale
        tl.store(normed + row * C + columns, round_to(wide, DTYPE), mask=live)
    tl.debug_barrier()  # all threads have read the number
    tl.store(counts + program, number)


@triton.jit(do_not_specialize=["rows", "last", "pieces", "first"])
def _gather_kernel(
    x,  # [R, C]
    out,  # [rows, SIZE * C]
    addresses,
    counts,
    rows,  # that a rank gets
    last,  # the last rank's first one; 0 if all get the same
    C,
    pieces,  # of a row
    first,  # piece of this launch
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    number = tl.load(counts + program) + 1
    row = (program + first) // pieces
    places = tl.arange(0, BLOCK)
    columns = (program + first) % pieces * BLOCK + places
    live = columns < C
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            source = x + (tl.minimum(rank * rows, last) + row) * C
            piece = tl.load(source + columns, mask=live, other=0.0)
            write_row(
                piece, places, live, number, program, rank, addresses, DTYPE, RANK, SIZE, ROWS
            )
    meet(number, program, addresses, SIZE, RANK)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            source = x + (tl.minimum(rank * rows, last) + row) * C
            piece = tl.load(source + columns, mask=live, other=0.0)
        else:
            piece = read_row(
                places, live, number, program, rank, addresses, DTYPE, RANK, SIZE, ROWS
            )
        tl.store(out + (row * SIZE + rank) * C + columns, piece, mask=live)
    tl.debug_barrier()
    tl.store(counts + program, number)


@triton.jit(do_not_specialize=["first", "first_row"])
def _best_kernel(
    values,
    ids,
    margins,
    out,
    addresses,
    counts,
    first,
    first_row,  # of this launch
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program + first_row
    pdl_wait(PDL)
    number = tl.load(counts + program) + 1
    value = tl.load(values + row)
    margin = tl.load(margins + row)
    token = tl.load(ids + row).to(tl.int32)
    token = tl.where(token < 0, token, token + first)
    columns = tl.arange(0, 4)
    words = tl.where(columns == 1, token, value.to(tl.int32, bitcast=True))
    words = tl.where(columns == 2, margin.to(tl.int32, bitcast=True), words)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            write_row(
                words, columns, columns < 3, number, program, rank, addresses, tl.int32, RANK, SIZE,
                ROWS,
            )  # fmt: skip
    meet(number, program, addresses, SIZE, RANK)
    failed = token < 0
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            new = value
            new_token = token
            new_margin = margin
        else:
            place = place_of(addresses, RANK, number % 2, rank, program, tl.int32, SIZE, ROWS)
            new = tl.load(place, cache_modifier=".cg").to(tl.float32, bitcast=True)
            new_token = tl.load(place + 1, cache_modifier=".cg")
            new_margin = tl.load(place + 2, cache_modifier=".cg").to(tl.float32, bitcast=True)
        failed = failed | (new_token < 0)
        if rank == 0:
            best = new
            best_token = new_token
            best_margin = new_margin
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
    tl.store(counts + program, number)
