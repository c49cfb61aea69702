"""Exchange of tensors between ranks: on GPUs through memory that all can write to, or by NCCL
without it, elsewhere by Gloo."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from mmap import mmap
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ReduceOp, distributed_c10d

from strobe.parallel.group import START_SECONDS, RankFailed, not_started, share

if TYPE_CHECKING:
    from strobe.kernels.operands import RowNorm
    from strobe.kernels.ranks import RankMemory
    from strobe.parallel.symmetric_memory import SymmetricMemory

logger = logging.getLogger(__name__)

_MEET_SECONDS = 0.01
_ABORT_SECONDS = 5.0
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""NVLink multicast is a resource of the whole machine, which its other users may need."""


def make_store(port: int = 0) -> TCPStore:
    """Make the store through which ranks of this machine meet; with a port, join that one."""
    if port:
        return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # else it listens on all interfaces
        port = listener.getsockname()[1]
        fd = listener.detach()
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _cuda_runtime() -> Any:
    """Return torch's binding of the CUDA runtime, which it does not annotate."""
    return torch.cuda.cudart()


class TorchGroup:
    """memory: [size, 8] int64 that all ranks share: the last step that a rank began, the last one
    that it launched in whole, the exchanges that it began, and the last step that its device
    finished. on_wait: raises if another rank has ended."""

    def __init__(
        self,
        memory: mmap,
        rank: int,
        size: int,
        on_wait: Callable[[], None],
        store: TCPStore,
        device: torch.device,
    ):
        self.rank = rank
        self.size = size
        self.on_wait = on_wait
        self.failure: RankFailed | None = None
        # Made here: at the end of a program Python starts no more threads.
        self._closing = Event()
        self._ending = Thread(target=self._end, daemon=True)
        self._numbers = np.frombuffer(memory, np.int64, size * 8).reshape(size, -1)
        self._own = self._numbers[rank]
        self._symmetric: SymmetricMemory | None = None
        self._finished: tuple[Tensor, Tensor] | None = None
        self._meet(store)
        backend = "gloo"
        own = None
        if device.type == "cuda":
            backend = "nccl"
            own = device
            os.environ.update(_NO_MULTICAST)
        if dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is in use in this process, maybe by ranks that have not ended; "
                "start another process."
            )
        dist.init_process_group(
            backend,
            store=store,
            timeout=timedelta(seconds=START_SECONDS + 60),
            rank=rank,
            world_size=size,
            device_id=own,
        )
        self._ending.start()
        if own is not None:
            try:
                self._symmetric = self._make_symmetric(store, own)
                self._finished = self._make_finished(memory, own)
            except BaseException:
                self.close()
                raise

    def _meet(self, store: TCPStore) -> None:
        """Wait until all ranks are there. Raises what `on_wait` does if one has ended, which
        torch.distributed would wait for, and RankFailed if one does not come."""
        store.set(f"rank {self.rank}", "")
        started = time.monotonic()
        for rank in range(self.size):
            while not store.check([f"rank {rank}"]):
                self.on_wait()
                if time.monotonic() - started > START_SECONDS:
                    raise not_started(rank)
                time.sleep(_MEET_SECONDS)

    def _make_symmetric(self, store: TCPStore, device: torch.device) -> SymmetricMemory | None:
        """Make symmetric memory if all ranks can."""
        from strobe.parallel.symmetric_memory import SymmetricMemory

        memory = None
        try:
            memory = SymmetricMemory(store, self.rank, self.size, device)
        except RuntimeError as error:
            self.on_wait()
            logger.warning("Ranks exchange tensors by NCCL: %s", error)
        self.on_wait()
        agreed = torch.tensor(int(memory is not None), device=device)
        dist.all_reduce(agreed, ReduceOp.MIN)
        return memory if agreed.item() else None

    def _make_finished(self, memory: mmap, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the number of the last finished step on the device and in the ranks' memory, to
        which the device copies it; None if it cannot."""
        shared = torch.frombuffer(memory, dtype=torch.int64, count=self.size * 8)
        with torch.cuda.device(device):
            if int(_cuda_runtime().cudaHostRegister(shared.data_ptr(), shared.nbytes, 0)):
                with contextlib.suppress(RuntimeError):  # the next operation raises CUDA's error
                    torch.zeros(1, device=device)
                return None
        return torch.zeros(1, dtype=torch.int64, device=device), shared[self.rank * 8 + 3][None]

    @property
    def step(self) -> int:
        return int(self._own[0])

    @step.setter
    def step(self, number: int) -> None:
        self._own[0] = number

    def end_step(self) -> None:
        """Record that the step has been launched, and, once the device has run it, that it has
        finished."""
        self._own[1] = self._own[0]
        if self._finished is None:
            self._own[3] = self._own[0]
        else:
            number, shared = self._finished
            shared.copy_(number.fill_(self.step), non_blocking=True)

    def last_step(self, rank: int) -> int:
        """Return the last step that the rank began."""
        return int(self._numbers[rank, 0])

    def has_launched(self, rank: int) -> bool:
        """Whether the rank has launched this one's step, which its device may not have finished."""
        return bool(self._numbers[rank, 1] == self.step > 0)

    def progress(self, rank: int) -> tuple[int, ...] | None:
        """Return numbers that grow while the rank gets on; None if it has nothing to do, or if it
        may wait for this one."""
        began, launched, exchanges, finished = self._numbers[rank, :4].tolist()
        if not self.step:  # before the first step ranks only exchange tensors
            return None if exchanges >= self._own[2] else (exchanges,)
        if finished == self.step or (launched == self.step and self._own[1] != self.step):
            return None
        return began, launched, exchanges, finished

    def check(self) -> None:
        """Raise RankFailed if the group has ended."""
        self.on_wait()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Abort what runs, so that a GPU does not wait for a rank that has ended, and make room for
        another group of this process."""
        if self._symmetric is not None and not self._closing.is_set():
            self._symmetric.end()
        self._closing.set()
        self._ending.join(_ABORT_SECONDS)  # NCCL ends what runs, and waits for graphs with it

    def _end(self) -> None:
        self._closing.wait()
        abort = distributed_c10d._abort_process_group  # pyright: ignore[reportPrivateUsage]
        try:
            if dist.is_initialized():
                (abort if dist.get_backend() == "nccl" else dist.destroy_process_group)()
        finally:
            if self._finished is not None:
                _cuda_runtime().cudaHostUnregister(self._numbers.ctypes.data)

    def fits(self, x: Tensor) -> bool:
        """Whether `add` and `embed` take tensors like x, and `best` of so many rows."""
        return self._symmetric is not None and self._symmetric.rows.fits(x)

    def _memory_for(self, x: Tensor) -> RankMemory | None:
        """Count an exchange of x; return the memory that it goes through, if any."""
        self._own[2] += 1
        memory = None if self._symmetric is None else self._symmetric.rows
        return memory if memory is not None and memory.takes(x) else None

    def sum(self, x: Tensor) -> Tensor:
        if (memory := self._memory_for(x)) is not None:
            return memory.sum(x)
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def add(
        self,
        part: Tensor,
        residual: Tensor | None = None,
        *,
        next_norm: RowNorm | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """part [R, C] -> residual + the sum of the ranks' parts; as `RankMemory.add`."""
        if not self.fits(part):
            total = self.sum(part)
            return total if residual is None else torch.add(residual, total, out=out), None
        assert self._symmetric is not None
        self._own[2] += 1
        return self._symmetric.rows.add(part, residual, next_norm=next_norm, out=out)

    def embed(self, ids: Tensor, weight: Tensor, first: int) -> Tensor | None:
        """Embed rows, as `RankMemory.embed`; None if they are too wide or GPUs share no memory."""
        if not self.fits(weight[:1].expand(len(ids), -1)):
            return None
        assert self._symmetric is not None
        self._own[2] += 1
        return self._symmetric.rows.embed(ids, weight, first)

    def best(self, values: Tensor, ids: Tensor, margins: Tensor, first: int) -> Tensor:
        """Choose among the ranks' largest logits, as `RankMemory.best`."""
        assert self._symmetric is not None
        self._own[2] += 1
        return self._symmetric.rows.best(values, ids, margins, first)

    def join(self, x: Tensor) -> Tensor:
        if (memory := self._memory_for(x)) is not None:
            return memory.join(x)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    def swap(self, x: Tensor) -> Tensor:
        if (memory := self._memory_for(x)) is not None:
            return memory.swap(x)
        sent = x.contiguous()
        if len(x) % self.size:  # shares overlap
            shares = [share(rank, self.size, len(x)) for rank in range(self.size)]
            sent = torch.cat([x[rows] for rows in shares])
        parts = torch.empty_like(sent)
        dist.all_to_all_single(parts, sent)
        return torch.cat(parts.chunk(self.size), 1)
