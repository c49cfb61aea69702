"""Pages and kept states in host memory, and their copies from and to the device. A row holds a page
of a page group, or a state of all recurrent layers with its window, as bytes."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from strobe.kv.kv_store import KVStore
from strobe.kv.states import StateStore
from strobe.step import HostCopies, HostCopy

STAGING_BYTES = 32 << 20
"""Maximum bytes of pages that are gathered on the device at once, or a page if that is larger."""

_MEASURED_SECONDS = 0.2
"""Seconds of copies that measure a GPU's speed."""


def staging_bytes(page_bytes: int) -> int:
    """Bytes of the device that copies take: pages gathered, and a group's of them once more."""
    return 2 * max(STAGING_BYTES, page_bytes)


class PageRows:
    """Rows of host memory for the pages of one page group, with all of its layers, the target's
    and the drafters'."""

    def __init__(self, layers: Sequence[Tensor], num_pages: int, device: torch.device):
        """layers: as of `KVStore.by_page`."""
        # torch moves words faster than bytes.
        words = all(view.shape[2] % 8 == 0 for view in layers)
        self.device = device
        self.layers = [view.view(torch.int64 if words else torch.uint8) for view in layers]
        self._widths = [len(view) * view.shape[2] for view in self.layers]
        self.rows = _host_memory(num_pages, sum(self._widths), self.layers[0].dtype, device)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.rows.shape[1] * self.rows.dtype.itemsize

    @property
    def batch_size(self) -> int:
        """Pages that are gathered at once."""
        return max(1, STAGING_BYTES // self.page_bytes)

    def save(self, copies: Sequence[HostCopy]) -> None:
        """Copy pages to host memory."""
        for batch in self._batches(copies):
            pages = self.gather([copy.device for copy in batch])
            for first, count, row in _runs([copy.host for copy in batch]):
                part = pages[first : first + count]
                self.rows[row : row + count].copy_(part, non_blocking=True)

    def load(self, copies: Sequence[HostCopy]) -> None:
        """Copy pages to the device."""
        for batch in self._batches(copies):
            staged = self.stage([copy.host for copy in batch])
            index = self._index([copy.device for copy in batch])
            for view, part in zip(self.layers, staged.split(self._widths, 1), strict=True):
                rows = part.view(len(batch), len(view), -1)
                view.index_copy_(1, index, rows.transpose(0, 1))

    def stage(self, rows: Sequence[int]) -> Tensor:
        """Return rows on the device [N, width]."""
        staged = self._empty(len(rows))
        for first, count, row in _runs(rows):
            part = self.rows[row : row + count]
            staged[first : first + count].copy_(part, non_blocking=True)
        return staged

    def gather(self, pages: Sequence[int]) -> Tensor:
        """Return the contents of pages [N, width]."""
        index = self._index(pages)
        gathered = self._empty(len(pages))
        for view, part in zip(self.layers, gathered.split(self._widths, 1), strict=True):
            rows = part.view(len(pages), len(view), -1)
            rows.copy_(view.index_select(1, index).transpose(0, 1))
        return gathered

    def _batches(self, copies: Sequence[HostCopy]) -> Iterator[Sequence[HostCopy]]:
        for first in range(0, len(copies), self.batch_size):
            yield copies[first : first + self.batch_size]

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, self.rows.shape[1], dtype=self.rows.dtype, device=self.device)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages).to(self.device, non_blocking=True)


class HostStore:
    """Rows of host memory, pinned for a GPU, whose copies then run on a stream of their own."""

    def __init__(
        self,
        stores: Sequence[KVStore],
        page_size: int,
        num_pages: Sequence[int],
        *,
        states: StateStore | None = None,
        num_states: int = 0,
        device: torch.device,
    ):
        """stores: the K/V of target and drafters. num_pages: rows for each page group; num_states:
        rows for states."""
        self.device = device
        self.pages: list[PageRows] = []
        for group, count in enumerate(num_pages):
            layers = [view for store in stores for view in store.by_page(page_size, group)]
            self.pages.append(PageRows(layers, count, device))
        self._states: list[tuple[Tensor, Tensor]] = []
        """The host's rows and the device's, of states and of windows."""
        if states is not None and num_states:
            for kept in (states.kept_state, states.kept_window):
                rows = kept.flatten(1)
                own = _host_memory(num_states, rows.shape[1], rows.dtype, device)
                self._states.append((own, rows))
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_ahead = False
        """Whether the stream may have copies that the device's steps have not waited for."""

    @property
    def num_pages(self) -> list[int]:
        """Rows for pages of each page group."""
        return [len(group.rows) for group in self.pages]

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of a page of each page group."""
        return [group.page_bytes for group in self.pages]

    @property
    def num_states(self) -> int:
        return len(self._states[0][0]) if self._states else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of a kept state with its window."""
        return sum(rows[0].nbytes for rows, _ in self._states)

    def copy(self, copies: HostCopies | None) -> None:
        """Queue a plan's copies. Device work queued afterwards waits for the copies of pages that
        it may overwrite, and for all copies of earlier calls."""
        if self.stream is not None and self._is_ahead:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            self._is_ahead = False
        if copies is None:
            return
        self._await_steps()
        with self._on_stream():
            self._save(copies.evicted)
        if self.stream is not None and copies.evicted:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        with self._on_stream():
            self._load(copies.loaded)
            self._save(copies.saved)
        self._is_ahead = bool(copies.loaded or copies.saved)

    def measure(self) -> float:
        """Measure the copy speed to the device in bytes per millisecond, 1 or more. Leaves the
        device's pages unchanged. The link of an idle GPU takes a moment to reach its speed."""
        group = self.pages[0]
        count = min(group.batch_size, len(group.rows))
        times: list[float] = []
        until = time.perf_counter() + (_MEASURED_SECONDS if self.stream is not None else 0.0)
        while len(times) < 3 or time.perf_counter() < until:
            self._synchronize()
            started = time.perf_counter()
            with self._on_stream():
                group.gather([0] * count).copy_(group.stage(range(count)))
            self._synchronize()
            times.append(time.perf_counter() - started)
        return max(count * group.page_bytes / (1e3 * min(times)), 1.0)

    def _await_steps(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    @contextlib.contextmanager
    def _on_stream(self) -> Generator[None]:
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def _synchronize(self) -> None:
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def _save(self, copies: Sequence[HostCopy]) -> None:
        """Copy pages and states to host memory."""
        for group, pages in self._pages_of(copies):
            group.save(pages)
        for host, device in self._states_of(copies):
            host.copy_(device, non_blocking=True)

    def _load(self, copies: Sequence[HostCopy]) -> None:
        """Copy pages and states to the device."""
        for group, pages in self._pages_of(copies):
            group.load(pages)
        for host, device in self._states_of(copies):
            device.copy_(host, non_blocking=True)

    def _pages_of(
        self, copies: Sequence[HostCopy]
    ) -> Iterator[tuple[PageRows, Sequence[HostCopy]]]:
        """Yield each page group's rows with the copies of its pages."""
        for number, group in enumerate(self.pages):
            yield group, [copy for copy in copies if copy.group == number and not copy.is_state]

    def _states_of(self, copies: Sequence[HostCopy]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the host's and the device's tensors of each state to copy, and of its window."""
        for copy in copies:
            if copy.is_state:
                for rows, kept in self._states:
                    yield rows[copy.host], kept[copy.device]


def _host_memory(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeroed rows, pinned for a GPU. torch's own pinned memory would take the next power of
    two."""
    rows = torch.empty(num_rows, width, dtype=dtype).zero_()
    if device.type == "cuda" and rows.numel():
        runtime: Any = torch.cuda.cudart()
        address = rows.data_ptr()
        error = int(runtime.cudaHostRegister(address, rows.nbytes, 0))
        if error:
            raise ValueError(
                f"kv_offload_memory needs {rows.nbytes} bytes of pinned host memory, which the "
                f"system does not give (CUDA error {error}); ask for less."
            )
        weakref.finalize(rows, runtime.cudaHostUnregister, address)
    return rows


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the first, count, first row) of each run of consecutive rows."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield first, i - first, rows[first]
            first = i
