# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
"""How programs of several GPUs write to each other's memory and wait for each other.

A rank's memory holds the last numbers of all ranks' programs, int64 [ROWS, SIZE], then rows
[2, SIZE, ROWS] of ROW_BYTES each. RANK: this one; row: the program's; number: count of its runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW_BYTES = tl.constexpr(16384)


@triton.jit
def place_of(addresses, rank, turn, source, row, DTYPE: tl.constexpr, SIZE, ROWS):
    """Return where a rank's memory holds a row of another rank."""
    start = tl.load(addresses + rank) + ROWS * SIZE * 8
    start += ((turn * SIZE + source) * ROWS + row) * ROW_BYTES
    return tl.multiple_of(start.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def write_row(
    values, columns, live, number, row, rank, addresses, DTYPE: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a row into a rank's memory."""
    place = place_of(addresses, rank, number % 2, RANK, row, DTYPE, SIZE, ROWS)
    tl.store(place + columns, values, mask=live)


@triton.jit
def read_row(
    columns, live, number, row, rank, addresses, DTYPE: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read the row that a rank has written into this one's memory."""
    place = place_of(addresses, RANK, number % 2, rank, row, DTYPE, SIZE, ROWS)
    return tl.load(place + columns, mask=live, other=0, cache_modifier=".cg")


@triton.jit
def signal(number, row, addresses, chosen, SIZE: tl.constexpr, RANK: tl.constexpr):
    """Tell ranks that a row is there; after a barrier, which waits for all threads' writes. chosen
    [next power of 2]: which of them. A thread of its own notifies each."""
    ranks = tl.arange(0, triton.next_power_of_2(SIZE))
    numbers = tl.load(addresses + ranks, mask=ranks < SIZE, other=0).to(tl.pointer_type(tl.int64))
    notified = chosen & (ranks != RANK) & (ranks < SIZE)
    tl.atomic_xchg(numbers + row * SIZE + RANK, number, mask=notified, sem="release", scope="sys")


@triton.jit
def await_rows(number, row, addresses, chosen, SIZE: tl.constexpr, RANK: tl.constexpr):
    """Wait for ranks' rows; see `signal`. A barrier must follow."""
    ranks = tl.arange(0, triton.next_power_of_2(SIZE))
    awaited = chosen & (ranks != RANK) & (ranks < SIZE)
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64)) + row * SIZE + ranks
    missing = 1
    while missing > 0:
        seen = tl.atomic_add(own, 0, mask=awaited, sem="acquire", scope="sys")
        missing = tl.sum((awaited & (seen < number)).to(tl.int32), 0)


@triton.jit
def meet(number, row, addresses, SIZE: tl.constexpr, RANK: tl.constexpr):
    """Tell all other ranks that this one's row is there, and wait for theirs."""
    every = tl.arange(0, triton.next_power_of_2(SIZE)) >= 0
    tl.debug_barrier()
    signal(number, row, addresses, every, SIZE, RANK)
    await_rows(number, row, addresses, every, SIZE, RANK)
    tl.debug_barrier()


@triton.jit
def total_of(
    x, columns, live, number, row, addresses, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up the ranks' rows, in their order."""
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            other = read_row(columns, live, number, row, rank, addresses, DTYPE, RANK, SIZE, ROWS)
            total += other.to(tl.float32)
    return total
