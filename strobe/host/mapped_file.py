"""A file as a tensor of bytes over its own pages, which can be released after reading."""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path

import torch


class MappedFile:
    """A file mapped into memory. bytes: its content, read-only. Raises OSError."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():  # torch warns about read-only memory
            warnings.simplefilter("ignore")
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def release(self, start: int, end: int) -> None:
        """Release the pages of these bytes. They are read again on the next access."""
        start -= start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED, start, end - start)
