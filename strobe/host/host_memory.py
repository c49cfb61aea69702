"""The host's memory: what is free, and returning what this process has freed. Imports no torch."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def free_host_memory() -> int:
    """Return the bytes that can still be allocated: on Linux MemAvailable, which includes droppable
    caches, elsewhere half of all memory; in a container no more than its limit leaves."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = _field(Path("/proc/meminfo"), "MemAvailable:", 1024, whole // 2)
    return min(room, _container_room(room))


def trim_heap() -> None:
    """Return freed memory to the system, if the C library supports it. The library otherwise keeps
    nearly all of it after objects of many sizes: weights before packing, compiled grammars."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _container_room(default: int, root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes left under the container's limit (cgroup v2), or the default if none."""
    try:
        limit, used = [(root / f"memory.{name}").read_text().strip() for name in ("max", "current")]
    except OSError:
        return default
    if limit == "max":
        return default
    return int(limit) - int(used) + _field(root / "memory.stat", "inactive_file", 1, 0)


def _field(path: Path, name: str, unit: int, default: int) -> int:
    """Return the number after a name in a kernel file, in bytes."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return default
    return next((int(row[1]) * unit for row in rows if row[:1] == [name]), default)
