"""A checkpoint's tensors: files opened, names known, nothing read before it is asked for."""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strobe.hub.files import weight_files
from strobe.models.config_readers.tensors import own_name
from strobe.models.weight_mapping import WeightPart, copy

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes by safetensors' names."""

AT_ONCE = 8 << 20
"""Bytes that are copied before their pages are let go."""


class _Entry(NamedTuple):
    """Where a tensor is: its file, and its first byte and the one behind its last there."""

    file: _File
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _File:
    """One file of tensors, mapped into memory. Raises ValueError when it is damaged."""

    def __init__(self, path: Path):
        if not path.exists():
            raise ValueError(f"{path} does not exist; download or save the checkpoint again.")
        try:
            with safe_open(path, framework="pt", device="cpu"):
                pass  # which checks the header against the file
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except RuntimeError as error:
            raise ValueError(
                f"{path} could not be mapped ({error}); raise the limit on this process's memory."
            ) from None
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is damaged or cut short ({error}); download or save it again."
            ) from None
        with warnings.catch_warnings():  # torch warns of memory that must not be written to
            warnings.simplefilter("ignore")
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def entries(self) -> Iterator[tuple[str, _Entry]]:
        size = 8 + int.from_bytes(self.map[:8], "little")
        for key, value in json.loads(self.map[8:size]).items():
            if key != "__metadata__":
                start, end = value["data_offsets"]
                where = size + start, size + end
                yield key, _Entry(self, value["dtype"], tuple(value["shape"]), *where)

    def release(self, start: int, end: int) -> None:
        """Let the pages of these bytes go; they are read again if they are needed again."""
        start -= start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED, start, end - start)


class Checkpoint:
    """The safetensors of one directory, mapped but not read.

    Raises ValueError when a file is missing, damaged or cut short.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._entries: dict[str, _Entry] = {}
        for name in weight_files(directory):
            found = _File(directory / name).entries()
            for key, entry in sorted(found, key=lambda item: item[1].start):
                own = own_name(key)
                if own in self._entries:
                    raise ValueError(
                        f"{directory / name}: tensor {key} is there twice; download or save the "
                        "checkpoint again."
                    )
                self._entries[own] = entry

    def dtypes(self) -> dict[str, str]:
        """The tensors' dtypes under safetensors' names, in the order in which they are stored."""
        return {name: entry.dtype for name, entry in self._entries.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def bytes_of(self, name: str) -> int:
        return self._entries[name].end - self._entries[name].start

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored: the file's own pages, read when they are first touched, and
        not to be written to."""
        entry = self._entries[name]
        data, dtype = entry.file.bytes[entry.start : entry.end], TORCH[entry.dtype]
        if entry.start % dtype.itemsize:  # older writers aligned nothing
            data = data.clone()
        return data.view(dtype).view(entry.shape)

    def fill(self, out: Tensor, part: WeightPart) -> None:
        """Fill one part of a parameter. Pages are let go as soon as they were read, so that the
        host holds no second copy of the weights."""
        entries = [self._entries[name] for name in part.sources]
        tensors = [self.read(name) for name in part.sources]
        if part.fill is not copy or out.ndim == 0:
            part.fill(out, *tensors)
            for entry in entries:
                entry.file.release(entry.start, entry.end)
            return
        (entry,), (stored,) = entries, tensors
        start, count = entry.start, max(AT_ONCE // stored[:1].nbytes, 1)
        for into, some in zip(out.split(count), stored.split(count), strict=True):
            copy(into, some)
            entry.file.release(start, start + some.nbytes)
            start += some.nbytes
