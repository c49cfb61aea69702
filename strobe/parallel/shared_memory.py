"""Exchange of tensors between processes of one machine through shared memory, for CPUs.

No network takes part. Each rank writes its tensor to a place of its own, then the collective's
number; it reads the others' places once they have written the number. Places are used in turn, so
that no rank overwrites a tensor that another still reads: a rank that has written the next number
has read everything of the one before.

    numbers [size, 8] int64        collective, its step, at even and at odd numbers, ...: a cache
                                   line for each rank
    data    [2, size, PLACE]       bytes

Processors must make writes visible in order, as x86 does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from mmap import mmap

import torch
from torch import Tensor

from strobe.parallel.group import STALL_SECONDS, START_SECONDS, RankFailed, not_started, share

PLACE = 1 << 20
"""Bytes of a rank's place; larger tensors are exchanged in parts."""
_LINE = 64
_SPINS = 200
_CHECK_SECONDS = 0.01
_YIELD_SECONDS = 0.1
"""How long a waiting rank only yields its processor; afterwards it sleeps between looks."""
_SLEEP_SECONDS = 0.001


def memory_size(size: int) -> int:
    """Return the bytes that a group of `size` ranks shares."""
    return size * (_LINE + 2 * PLACE)


class SharedMemoryGroup:
    """on_wait: called while waiting; raises if another rank has ended. step: number of the step
    that runs, 0 while starting. failure: why the group has ended."""

    def __init__(self, memory: mmap, rank: int, size: int, on_wait: Callable[[], None]):
        self.rank = rank
        self.size = size
        self.on_wait = on_wait
        self.step = 0
        self.failure: RankFailed | None = None
        self._numbers = memoryview(memory)[: size * _LINE].cast("q", (size, _LINE // 8))
        data = torch.frombuffer(memory, dtype=torch.uint8, offset=size * _LINE)
        self._places = data.view(2, size, PLACE)
        self._views: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}
        self._count = 0

    def check(self) -> None:
        """Raise RankFailed if the group has ended."""
        self.on_wait()
        if self.failure is not None:
            raise self.failure

    def end_step(self) -> None:
        """Do nothing: each exchange records the step."""

    def close(self) -> None:
        """Do nothing: a rank that waits checks the others itself."""

    def last_step(self, rank: int) -> int:
        """Return the step of the rank's last collective."""
        return self._numbers[rank, 1 + (self._numbers[rank, 0] & 1)]

    def sum(self, x: Tensor) -> Tensor:
        out = x.contiguous()
        whole = out.view(-1)
        for part in [whole] if x.nbytes <= PLACE else whole.split(PLACE // x.itemsize):
            first, *others = self._exchange(part)
            torch.add(first, others[0], out=part)
            for other in others[1:]:
                part += other
        return out

    def join(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        out = x.new_empty(rows, self.size, columns)
        for first in range(0, columns, PLACE // x.itemsize):
            piece = x[:, first : first + PLACE // x.itemsize]
            width = piece.shape[1]
            height = PLACE // (width * x.itemsize)
            for start in range(0, rows, height):
                block = piece[start : start + height]
                for rank, part in enumerate(self._exchange(block.flatten())):
                    out[start : start + height, rank, first : first + width] = part.view_as(block)
        return out.view(rows, self.size * columns)

    def swap(self, x: Tensor) -> Tensor:
        return self.join(x)[share(self.rank, self.size, len(x))]

    def _exchange(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return every rank's values x [n], valid until the next exchange."""
        self._count += 1
        count = self._count
        turn = self._count & 1
        numbers = self._numbers
        ranks = range(self.size)
        key = turn, x.numel(), x.dtype
        views = self._views.get(key)
        if views is None:
            views = self._places[turn, :, : x.nbytes].view(x.dtype).unbind()
            self._views[key] = views
        views[self.rank].copy_(x)
        numbers[self.rank, 1 + turn] = self.step
        numbers[self.rank, 0] = count
        for rank in ranks:
            if numbers[rank, 0] < count:
                self._wait(rank, count)
        steps = [numbers[rank, 1 + turn] for rank in ranks]
        if steps.count(self.step) < self.size:
            self.failure = RankFailed(f"The ranks are out of step: they run the steps {steps}.")
            raise self.failure
        return views

    def _wait(self, rank: int, count: int) -> None:
        """Wait until the rank reaches a collective. Raises RankFailed if it has stalled."""
        spins = 0
        started = time.monotonic()
        checked = 0.0
        while self._numbers[rank, 0] < count:
            spins += 1
            if spins < _SPINS:
                continue
            waited = time.monotonic() - started
            if waited < _YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_SECONDS)
            if waited - checked < _CHECK_SECONDS:
                continue
            checked = waited
            self.check()
            if waited > (STALL_SECONDS if self.step else START_SECONDS):
                self.failure = self._stalled(rank, count, waited)
                raise self.failure

    def _stalled(self, rank: int, count: int, waited: float) -> RankFailed:
        if not self._numbers[rank, 0]:
            return not_started(rank)
        return RankFailed(
            f"Rank {rank} has stalled: its last exchange of tensors was number "
            f"{self._numbers[rank, 0]}, in step {self.last_step(rank)}, and rank {self.rank} has "
            f"waited for number {count}, in step {self.step}, for {waited:.0f} s."
        )
