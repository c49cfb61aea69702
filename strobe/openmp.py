"""Threads of torch on a CPU: how many, and how they wait for each other.

torch's wheels bring libgomp, whose threads wait for the last of them by spinning, for some 3 ms.
Where another process has that one's core, the others keep theirs for nothing, and a step takes many
times as long. libgomp reads its environment when torch is imported, so that it is set before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

SPINS = 10_000  # some 0.1 ms
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
READS, BETWEEN = 5, 0.005  # of the load; seconds


def prepare() -> None:
    """Set what the user has not set; nothing once torch is imported."""
    if sys.platform == "linux" and "torch" not in sys.modules:
        cores, allowed = len(os.sched_getaffinity(0)), quota()
        busy = is_busy(min(cores, allowed or cores))
        os.environ.update(chosen(os.environ, cores, allowed, busy))


def chosen(
    environ: Mapping[str, str], cores: int, allowed: int | None, busy: bool
) -> dict[str, str]:
    """The variables to set. cores: that the process may run on; allowed: as many as its quota is
    worth; busy: whether others run on them."""
    found: dict[str, str] = {}
    if allowed is not None and allowed < cores and "OMP_NUM_THREADS" not in environ:
        found["OMP_NUM_THREADS"] = str(allowed)
    if not any(name in environ for name in WAITING):
        found |= {"OMP_WAIT_POLICY": "PASSIVE"} if busy else {"GOMP_SPINCOUNT": str(SPINS)}
    return found


def quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The cores that a container's CPU time is worth, rounded up (cgroup v2 or v1); None without a
    limit."""
    names = ["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]
    for files in names:
        try:
            time_us, period = " ".join([(root / name).read_text() for name in files]).split()
            return max(-(-int(time_us) // int(period)), 1) if int(time_us) > 0 else None
        except (OSError, ValueError, ZeroDivisionError):  # "max" is no limit
            continue
    return None


def is_busy(threads: int, file: Path = Path("/proc/loadavg")) -> bool:
    """Whether so many threads find less cores than that free, in each of several looks."""
    for look in range(READS):
        time.sleep(BETWEEN * (look > 0))
        try:
            running = int(file.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            return False
        if (os.cpu_count() or 1) - (running - 1) >= threads:
            return False
    return True
