"""torch's CPU threads: their number, and the way they wait for each other.

torch's wheels bring libgomp, whose threads spin for some 3 ms while they wait for the slowest. If
another process occupies that thread's core, the others spin in vain, and a step takes many times as
long. libgomp reads its environment when torch is imported, so it is set before.

The number of idle cores is measured twice: a process that runs for a moment at import must not take
a thread for good, so a lowered number is raised if cores are idle once the weights are read.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

SPIN_COUNT = 10_000  # some 0.1 ms
LOAD = Path("/proc/loadavg")
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
READS = 5  # of the load at import
LAST_READS = 40  # once the weights are read, if there are fewer threads than cores
READ_INTERVAL = 0.005  # seconds
CHOSEN_THREADS = "STROBE_CHOSEN_THREADS"
"""The variable with the number of threads that Strobe has chosen for a busy machine. Processes that
inherit it choose for themselves."""


def prepare() -> None:
    """Set the variables that the user has not set, unless torch is imported already."""
    if sys.platform == "linux" and "torch" not in sys.modules:
        cores = len(os.sched_getaffinity(0))
        if user_threads(os.environ) is None:
            os.environ.pop("OMP_NUM_THREADS", None)
            os.environ.pop(CHOSEN_THREADS, None)
        os.environ.update(choose_environment(os.environ, usable_cores(), cores))


def user_threads(environ: Mapping[str, str]) -> str | None:
    """Return the number of threads that the user has set; None if there is none, or Strobe's own
    choice in a parent process."""
    threads = environ.get("OMP_NUM_THREADS")
    return None if threads == environ.get(CHOSEN_THREADS) else threads


def idle_threads(environ: MutableMapping[str, str], usable: int, file: Path = LOAD) -> int | None:
    """Return the number of threads to run from now on if Strobe chose fewer at import and the
    machine has idle cores by now, else None. The first call settles the number: a later one
    returns None."""
    chosen = environ.get(CHOSEN_THREADS, "")
    if not chosen or user_threads(environ) is not None:
        return None
    environ[CHOSEN_THREADS] = ""
    threads = min(usable, free_cores(usable, file, reads=LAST_READS))
    return threads if threads > int(chosen) else None


def usable_cores() -> int:
    """Return the number of cores that the process may run on and its CPU quota allows."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores, core_quota() or cores)


def choose_environment(
    environ: Mapping[str, str], usable: int, cores: int, free: int | None = None
) -> dict[str, str]:
    """Return the variables to set. cores: number of cores that the process may run on; usable: of
    these, as many as its CPU quota allows; free: idle cores of the machine, by default measured."""
    free = free_cores(usable) if free is None else free
    variables: dict[str, str] = {}
    threads = min(usable, max(free, 1))
    is_ours = "OMP_NUM_THREADS" not in environ
    if threads < cores and is_ours:
        variables["OMP_NUM_THREADS"] = str(threads)
    if threads < usable and is_ours:
        variables[CHOSEN_THREADS] = str(threads)
    if not any(name in environ for name in WAIT_VARIABLES):
        # Threads of Strobe's choice have a core each, also once their number is raised.
        spins = is_ours or free >= usable
        variables |= (
            {"GOMP_SPINCOUNT": str(SPIN_COUNT)} if spins else {"OMP_WAIT_POLICY": "PASSIVE"}
        )
    return variables


def core_quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return a container's CPU quota in cores, rounded up (cgroup v2 or v1); None without a
    limit."""
    names = ["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]
    for files in names:
        try:
            time_us, period = " ".join([(root / name).read_text() for name in files]).split()
            return max(-(-int(time_us) // int(period)), 1) if int(time_us) > 0 else None
        except (OSError, ValueError, ZeroDivisionError):  # "max" is no limit
            continue
    return None


def free_cores(enough: int, file: Path = LOAD, reads: int = READS) -> int:
    """Return the number of idle cores: the maximum of several reads, which stop at `enough`."""
    free = 0
    for read in range(reads):
        time.sleep(READ_INTERVAL * (read > 0))
        try:
            running = int(file.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            return enough
        free = max(free, (os.cpu_count() or 1) - (running - 1))
        if free >= enough:
            break
    return free
