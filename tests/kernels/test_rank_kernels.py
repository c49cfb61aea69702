"""Exchanges between ranks, whose memory is all on one device here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from strobe.kernels import ranks as ranks_module
from strobe.kernels.operands import RowNorm
from strobe.kernels.ranks import ENDED, RankMemory
from strobe.kernels.reference_rowwise import rms_norm
from strobe.parallel.group import share
from strobe.parallel.torch_group import TorchGroup
from strobe.sampling.sampler import best_two
from tests.support.full_marks import full_where

ROWS = 6  # whose numbers, of any number of ranks, take a multiple of 16 bytes


class Ranks:
    """Ranks that run one after the other: first each sends its rows and waits for nobody, then each
    receives. Sums of rows with owners are sent in a second round. As there are two places for a
    row, a call may have two launches."""

    def __init__(self, size: int, device: torch.device):
        room = RankMemory.bytes_of(ROWS, size)
        self.buffers = [torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(size)]
        self.numbers = [b[: ROWS * size * 8].view(torch.int64) for b in self.buffers]
        addresses = torch.tensor([b.data_ptr() for b in self.buffers], device=device)
        self.memories = [
            RankMemory(rank, addresses, torch.zeros(ROWS, dtype=torch.int64, device=device))
            for rank in range(size)
        ]

    def run(self, call: Callable[..., Any], *args: Any) -> list[Any]:
        """Return every rank's result."""
        for numbers in self.numbers:
            numbers.fill_(ENDED)
        for memory in self.memories * 2:
            before = memory.counts.clone()
            call(memory, *args)
            memory.counts.copy_(before)
        return [call(memory, *args) for memory in self.memories]


def add(
    memory: RankMemory, parts: Sequence[Tensor], residual: Tensor | None, norm: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    next_norm = None if norm is None else RowNorm(norm, 1e-6)
    return memory.add(parts[memory.rank], residual, next_norm=next_norm)


@pytest.fixture(params=[ranks_module._OWNER_BYTES, 1], ids=["", "owners"])
def owner_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_OWNER_BYTES", request.param)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        pytest.param(size, dtype, marks=[] if i == j else [pytest.mark.full])
        for i, size in enumerate((1, 2, 4))
        for j, dtype in enumerate((torch.float16, torch.float32, torch.bfloat16))
    ],
)
@pytest.mark.usefixtures("owner_bytes")
def test_sum(size: int, dtype: torch.dtype, device: torch.device):
    """With numbers of rows that change, so that rows are at different places, and more of them than
    a launch has."""
    ranks = Ranks(size, device)
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 96), (ROWS, 128), (2, 1000), (ROWS + 3, 96)):
        made = torch.randn(size + 1, rows, columns, generator=generator).to(device, dtype)
        *parts, residual = made.unbind()
        norm = torch.rand(columns, generator=generator).to(device, dtype)
        total = torch.zeros_like(residual, dtype=torch.float32)
        for part in parts:
            total += part.float()
        expected = (total + residual.float()).to(dtype)
        for out, normed in ranks.run(add, parts, residual, norm):
            assert torch.equal(out, expected)
            torch.testing.assert_close(normed, rms_norm(expected, norm, 1e-6))
        for out, normed in ranks.run(add, parts, None, None):
            assert torch.equal(out, total.to(dtype))
            assert normed is None


def test_sum_of_rows_with_a_stride_replaces_the_residual(device: torch.device):
    ranks = Ranks(2, device)
    wide = torch.arange(2 * 3 * 64, dtype=torch.float32, device=device).view(2, 3, 64)
    residual = torch.ones(3, 96, device=device)[:, :32]
    streams = {memory.rank: residual.clone() for memory in ranks.memories}

    def add_in_place(memory: RankMemory) -> Tensor:
        stream = streams[memory.rank] = residual.clone()
        return memory.add(wide[memory.rank, :, 16:48], stream, out=stream)[0]

    for rank, out in enumerate(ranks.run(add_in_place)):
        assert out is streams[rank]
        assert torch.equal(out, wide[:, :, 16:48].sum(0) + 1)


@pytest.mark.usefixtures("owner_bytes")
def test_sum_of_wide_rows(device: torch.device):
    parts = torch.randn(3, 2, 8200, generator=torch.Generator().manual_seed(0)).to(device)
    for total in Ranks(3, device).run(lambda m: m.sum(parts[m.rank])):
        assert torch.equal(total, parts[0] + parts[1] + parts[2])


@full_where(lambda rows, dtype: (rows % 2 == 0) is (dtype is torch.float32))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "rows", "columns"), [
    (1, 3, 7), (2, 4, 3), (2, 5, 1000), (3, 7, 4000), (4, 2, 20000), (3, 1, 40000),
])  # fmt: skip
def test_join_and_swap(
    size: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device
):
    """Also in several pieces, of which the last is shorter, and with shares that overlap."""
    ranks = Ranks(size, device)
    parts = torch.randn(size, rows, columns, generator=torch.Generator().manual_seed(0))
    parts = parts.to(device, dtype)
    whole = torch.cat(parts.unbind(), 1)
    swapped = ranks.run(lambda m: m.swap(parts[m.rank]))
    for rank, own in enumerate(swapped):
        assert torch.equal(own, whole[share(rank, size, rows)])
    for joined in ranks.run(lambda m: m.join(parts[m.rank])):
        assert torch.equal(joined, whole)


@pytest.mark.usefixtures("owner_bytes")
def test_embed(device: torch.device):
    table = torch.randn(10, 64, generator=torch.Generator().manual_seed(0)).to(device)
    parts, ids = table.split(4), torch.tensor([9, 0, 4, 3, 3, 8, 5], device=device)
    for rows in Ranks(3, device).run(lambda m: m.embed(ids, parts[m.rank], 4 * m.rank)):
        assert torch.equal(rows, table[ids])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_best(size: int, device: torch.device):
    """Ties, NaN and infinities; logits of one rank and of many have the same best one."""
    logits = torch.randn(ROWS + 2, 32 * size, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, 5] = logits[0, -3] = 9.0
    logits[1, -1] = float("nan")
    logits[2, [1, 2]] = float("inf")
    logits[3, -2] = float("inf")
    expected, expected_margins = best_two(logits)
    parts = [part.contiguous() for part in logits.chunk(size, 1)]

    def best(memory: RankMemory) -> tuple[Tensor, Tensor]:
        ids, margins = best_two(parts[memory.rank])
        values = parts[memory.rank].amax(1)
        return memory.best(values, ids, margins, 32 * memory.rank), margins

    for ids, margins in Ranks(size, device).run(best):
        assert torch.equal(ids, expected)
        known = expected >= 0
        torch.testing.assert_close(margins[known], expected_margins[known])
        assert (margins >= 0).all()


def test_torch_distributed_exchanges_nothing(device: torch.device):
    """NCCL in a captured graph keeps a group from ending; here torch.distributed would raise, as
    there is no group of it. More rows than a launch has, and wider ones than its memory."""
    group = object.__new__(TorchGroup)
    group.size, group._own = 1, np.zeros(8, np.int64)
    group._symmetric = cast(Any, SimpleNamespace(rows=Ranks(1, device).memories[0]))
    for rows, columns in ((1, 1), (2 * ROWS + 1, 40), (2, 5000)):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device)
        for exchange in (group.sum, group.join, group.swap, lambda x: group.add(x)[0]):
            assert torch.equal(exchange(x), x)
    assert group._own[2] == 12


def test_what_does_not_fit(device: torch.device):
    (memory,) = Ranks(1, device).memories
    x = torch.zeros(ROWS, 8192, dtype=torch.bfloat16, device=device)
    assert memory.fits(x)
    assert memory.fits(x[:, ::2]) is False
    assert not memory.fits(x.float())
    for other in (x[:0], x.long(), x[0]):
        assert not memory.fits(other)
        assert not memory.takes(other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="ranks wait for each other on a GPU")
def test_ranks_that_run_at_once(monkeypatch: pytest.MonkeyPatch):
    """Random exchanges, owned sums among them, of ranks that have a stream each."""
    monkeypatch.setattr(ranks_module, "_OWNER_BYTES", 3000)
    device, size = torch.device("cuda"), 3
    ranks, chooser = Ranks(size, device), random.Random(0)
    parts = torch.randn(size, 2 * ROWS, 300, generator=torch.Generator().manual_seed(0)).to(device)
    total, whole = parts[0] + parts[1] + parts[2], torch.cat(list(parts), 1)
    table = parts.flatten(0, 1)
    ids = torch.arange(len(table), device=device).flip(0)
    calls: list[Callable[[RankMemory], Tensor]] = [
        lambda m: m.sum(parts[m.rank]),
        lambda m: m.sum(parts[m.rank, :2]),
        lambda m: m.join(parts[m.rank, :3]),
        lambda m: m.swap(parts[m.rank]),
        lambda m: m.embed(ids, parts[m.rank], m.rank * len(parts[0])),
    ]
    swapped = [whole[share(rank, size, len(whole))] for rank in range(size)]
    same = [[one] * size for one in (total, total[:2], whole[:3], table[ids])]
    expected = [*same[:3], swapped, same[3]]
    for call in calls:  # loads the kernels
        ranks.run(call)
    for numbers in ranks.numbers:
        numbers.zero_()
    for memory in ranks.memories:
        memory.counts.zero_()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(size)]
    chosen = [chooser.randrange(len(calls)) for _ in range(200)]
    found: list[list[Tensor]] = [[] for _ in chosen]
    for i, number in enumerate(chosen):
        for memory, stream in zip(ranks.memories, streams, strict=True):
            with torch.cuda.stream(stream):
                found[i].append(calls[number](memory))
    torch.cuda.synchronize()
    for number, results in zip(chosen, found, strict=True):
        for result, want in zip(results, expected[number], strict=True):
            assert torch.equal(result, want)
