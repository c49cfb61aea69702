"""Exchanges between the GPUs of this machine: checked against their definition, then timed.

    python benchmarks/exchanges.py [--ranks 2] [--columns 4096] [--rounds 200]

Random sums (with residual and norm, too), largest logits, embeddings, joins and swaps must have the
right bits on all ranks. The times are microseconds of one exchange within a captured graph of ten,
next to NCCL's all-reduce, launched one by one.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from mmap import mmap
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from strobe.kernels.operands import RowNorm
from strobe.kernels.reference_rowwise import rms_norm
from strobe.parallel.group import share
from strobe.parallel.shared_memory import memory_size
from strobe.parallel.torch_group import TorchGroup, make_store

WIDTHS = (3, 64, 1000, 4096, 5120, 8192, 12288, 40000)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    store = make_store()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(memory_size(options.ranks))
        mp.spawn(run, (options, store.port, file.name), options.ranks)
    return 0


def run(rank: int, options: argparse.Namespace, port: int, path: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with open(path, "r+b") as file:
        memory = mmap(file.fileno(), memory_size(options.ranks))
    group = TorchGroup(memory, rank, options.ranks, lambda: None, make_store(port), device)
    check(group, options.rounds)
    if rank == 0:
        print(f"{options.rounds} random exchanges of {options.ranks} ranks have the right bits.")
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16")
        print(f"{'rows':>6}{'sum':>9}{'NCCL':>9}{'swap':>9}")
    for rows in (1, 16, 64, 128, 256, 512, 1024, 4096):
        x = torch.randn(rows, options.columns, device=device).bfloat16()
        norm = torch.rand(options.columns, device=device).bfloat16()
        residual, logits = x.clone(), torch.randn(rows, 16384, device=device)
        times = [
            captured(partial(group.add, x, residual, next_norm=RowNorm(norm, 1e-6))),
            seconds(partial(dist.all_reduce, x), 10),
            captured(partial(group.swap, logits)),
        ]
        if rank == 0:
            print(f"{rows:6}" + "".join(f"{1e6 * t:9.1f}" for t in times), flush=True)
    group.close()


def check(group: TorchGroup, rounds: int) -> None:
    """Raise AssertionError if an exchange has wrong bits. All ranks make all ranks' tensors."""
    chooser, made = random.Random(0), torch.Generator(device="cuda").manual_seed(0)
    for _ in range(rounds):
        rows, columns = chooser.choice((1, 5, 16, 300, 512, 1500)), chooser.choice(WIDTHS)
        dtype = chooser.choice((torch.bfloat16, torch.float32))
        shape = group.size + 1, rows, columns
        *parts, residual = torch.randn(shape, device="cuda", generator=made).to(dtype).unbind()
        norm = torch.rand(columns, device="cuda", generator=made).to(dtype)
        own = parts[group.rank]
        total = torch.zeros_like(own, dtype=torch.float32)
        for part in parts:
            total += part.float()
        assert torch.equal(group.sum(own.clone()), total.to(dtype)), ("sum", rows, columns)
        if group.fits(own):
            expected = (total + residual.float()).to(dtype)
            found, normed = group.add(own, residual, next_norm=RowNorm(norm, 1e-6))
            assert torch.equal(found, expected), ("add", rows, columns)
            assert normed is not None
            torch.testing.assert_close(normed, rms_norm(expected, norm, 1e-6))
            check_choice(group, parts)
        whole = torch.cat(parts, 1)
        assert torch.equal(group.join(own), whole), ("join", rows, columns)
        swapped = whole[share(group.rank, group.size, rows)]
        assert torch.equal(group.swap(own), swapped), ("swap", rows, columns)


def check_choice(group: TorchGroup, parts: Sequence[Tensor]) -> None:
    """Check the largest logits, if parts are the ranks' logits, and rows of an embedding."""
    own, (rows, columns) = parts[group.rank], parts[0].shape
    best, second = own.float().topk(2).values.T.contiguous()
    margins = best - second
    found = group.best(best, own.float().argmax(1), margins, group.rank * columns)
    logits = torch.cat(list(parts), 1).float()
    assert torch.equal(found, logits.argmax(1)), ("best", rows, columns)
    best, second = logits.topk(2).values.unbind(1)
    torch.testing.assert_close(margins, best - second)
    ids = torch.arange(rows * group.size, device="cuda").flip(0)
    embedded = group.embed(ids, own, group.rank * rows)
    assert embedded is not None
    assert torch.equal(embedded, torch.cat(list(parts))[ids]), ("embed", rows, columns)


def captured(call: Callable[[], Any]) -> float:
    """Return the seconds of a call in a captured graph of ten."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return seconds(graph.replay, 10) / 10


def seconds(call: Callable[[], Any], rounds: int) -> float:
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / rounds


if __name__ == "__main__":
    raise SystemExit(main())
