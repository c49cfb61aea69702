"""Engines of several ranks in the threads of one process, to compare with an engine alone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.parallel.group import RankFailed, share
from strobe.ranks.leader import of_rank
from strobe.step import Plan

SECONDS = 60.0


class Exchange:
    """The ranks' tensors, and the barrier before reading them. They are written at two places in
    turn: a rank that writes to a place again has passed the barrier at which all had read it."""

    def __init__(self, size: int):
        self.size = size
        self.places = [[torch.empty(0)] * size for _ in range(2)]
        self.barrier = threading.Barrier(size, timeout=SECONDS)


class ThreadGroup:
    """A rank among the threads of a process."""

    def __init__(self, exchange: Exchange, rank: int):
        self.exchange, self.rank, self.size = exchange, rank, exchange.size
        self.next_place = 0
        self.failure: RankFailed | None = None

    def end_step(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        if self.exchange.barrier.broken:
            raise threading.BrokenBarrierError

    def _gather(self, x: Tensor) -> list[Tensor]:
        """Return the ranks' tensors, which must not be changed."""
        parts = self.exchange.places[self.next_place]
        self.next_place = 1 - self.next_place
        parts[self.rank] = x.clone()
        self.exchange.barrier.wait()
        return list(parts)

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._gather(x)).sum(0)

    def join(self, x: Tensor) -> Tensor:
        return torch.cat(self._gather(x), 1)

    def swap(self, x: Tensor) -> Tensor:
        return torch.cat(self._gather(x), 1)[share(self.rank, self.size, len(x))]


@contextmanager
def ranks(config: EngineConfig, size: int, **options: Any) -> Iterator[Engine]:
    """Yield the first of `size` ranks; the others follow it. options: of the first engine."""
    resolved = resolve(config.with_(tensor_parallel_size=size))
    exchange = Exchange(size)
    plans = [queue.Queue[tuple[Plan, int] | None]() for _ in range(size)]
    errors: list[BaseException] = []

    def make(rank: int, **options: Any) -> Engine:
        own = of_rank(resolved, rank)
        return Engine(
            replace(own, split=replace(own.split, group=ThreadGroup(exchange, rank))), **options
        )

    def guarded(run: Callable[[int], None], rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)
            exchange.barrier.abort()

    def follow(rank: int) -> None:
        engine = make(rank)
        while (message := plans[rank].get()) is not None:
            engine.follow(*message)

    def send(plan: Plan, in_flight: int) -> None:
        for inbox in plans[1:]:
            inbox.put((plan, in_flight))

    threads = [threading.Thread(target=guarded, args=(follow, r)) for r in range(1, size)]
    for thread in threads:
        thread.start()
    try:
        yield make(0, on_launch=send, **options)
    except BaseException:
        exchange.barrier.abort()
        raise
    finally:
        for inbox in plans:
            inbox.put(None)
        for thread in threads:
            thread.join(SECONDS)
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if real:
            raise real[0]
