"""Memory of GPUs of one machine that all of them can write to.

torch.distributed maps it; `strobe.kernels.ranks` exchanges through it, in captured graphs too.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Store

from strobe.kernels.ranks import ENDED, RankMemory

if TYPE_CHECKING:
    from torch._C._distributed_c10d import (
        _SymmetricMemory,  # pyright: ignore[reportPrivateUsage]
    )

_MAP_SECONDS = timedelta(seconds=20)
_numbers = count()


class SymmetricMemory:
    """Raises RuntimeError unless the GPUs can write to each other's memory."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device):
        rows = 1024 if size <= 4 else 512  # 134 MB for four or eight ranks
        self._buffer = symmetric.empty(
            RankMemory.bytes_of(rows, size), dtype=torch.uint8, device=device
        )
        self._buffer.zero_()
        torch.cuda.synchronize(device)
        self._mapped = _map(self._buffer, store, rank, size)
        addresses = torch.tensor(self._mapped.buffer_ptrs, device=device)
        counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self.rows = RankMemory(rank, addresses, counts)
        # Copied by the GPU's copy engine, while its multiprocessors wait.
        self._stream = torch.cuda.Stream(device)
        self._ended = torch.full((rows, size), ENDED).pin_memory()

    def end(self) -> None:
        """End all waiting for other ranks; what is exchanged then has no meaning."""
        numbers = self._buffer[: self._ended.nbytes].view(torch.int64)
        with torch.cuda.stream(self._stream):
            numbers.copy_(self._ended.flatten(), non_blocking=True)


def _map(buffer: Tensor, store: Store, rank: int, size: int) -> _SymmetricMemory:
    """Map the ranks' buffers. torch keeps a group's store by its name, for which each group needs
    its own."""
    name = f"strobe-{next(_numbers)}"
    counted = _CountedStore(store)
    c10d: Any = _distributed_c10d
    c10d._SymmetricMemory.set_group_info(name, rank, size, counted)
    group = c10d.ProcessGroup(counted, rank, size)
    group._set_group_name(name)
    c10d._register_process_group(name, group)
    return c10d._SymmetricMemory.rendezvous(buffer, name)


class _CountedStore(Store):
    """Counts the exchanges of one group. torch counts the exchanges of a process, in keys
    ".../number/rank": a process that was in a group before would wait for numbers that the others,
    which were not, never reach."""

    def __init__(self, store: Store):
        super().__init__()
        self._store = store
        self._first: int | None = None

    def _key(self, key: str) -> str:
        head, number, rank = key.rsplit("/", 2)
        self._first = int(number) if self._first is None else self._first
        return f"{head}/{int(number) - self._first}/{rank}"

    def set(self, key: str, value: str) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], timeout: timedelta = _MAP_SECONDS) -> None:
        self._store.wait([self._key(key) for key in keys], timeout)
