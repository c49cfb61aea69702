"""How much memory a machine has left."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int:
    """Bytes that could still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # What Linux says is available, caches that can be dropped included; elsewhere half of all.
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = _field(Path("/proc/meminfo"), "MemAvailable:", 1024, whole // 2)
    return min(room, _container_room(room))


def _container_room(default: int, root: Path = Path("/sys/fs/cgroup")) -> int:
    """What the container's limit leaves (cgroup v2), where there is one."""
    try:
        limit, used = [(root / f"memory.{name}").read_text().strip() for name in ("max", "current")]
    except OSError:
        return default
    if limit == "max":
        return default
    return int(limit) - int(used) + _field(root / "memory.stat", "inactive_file", 1, 0)


def _field(path: Path, name: str, unit: int, default: int) -> int:
    """The number behind a name in a file of the kernel's, in bytes."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return default
    return next((int(row[1]) * unit for row in rows if row[:1] == [name]), default)
