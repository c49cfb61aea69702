"""Division of a machine's GPUs, cores and memory among several engines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from strobe.config import CPU_KV_CACHE, EngineConfig, parse_bytes
from strobe.host.host_memory import free_host_memory
from strobe.host.openmp import usable_cores, user_threads


class Replica(NamedTuple):
    """One of several engines of a server. environment: variables of its process."""

    number: int
    environment: Mapping[str, str]


def make_replicas(
    config: EngineConfig, count: int, environ: Mapping[str, str] = os.environ
) -> list[Replica]:
    """Divide the machine's GPUs and cores among `count` engines. Raises ValueError if
    CUDA_VISIBLE_DEVICES names too few GPUs."""
    ranks = config.tensor_parallel_size
    if config.device.startswith("cuda:"):
        raise ValueError(
            f"device is {config.device!r}, but data_parallel_size is {count}, and each engine has "
            "GPUs of its own; ask for cuda, and choose GPUs by CUDA_VISIBLE_DEVICES."
        )
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    devices = list(map(str, range(count * ranks)))
    if visible is not None:
        devices = [name for name in visible.split(",") if name.strip()]
    if config.device != "cpu" and len(devices) < count * ranks:
        raise ValueError(
            f"data_parallel_size is {count}, which takes {count * ranks} GPUs, but "
            f"CUDA_VISIBLE_DEVICES is {visible!r}; ask for fewer, or for device cpu."
        )
    threads = max(usable_cores() // (count * ranks), 1)
    set_threads = user_threads(environ) or ""
    threads = min(threads, int(set_threads)) if set_threads.isdecimal() else threads
    replicas: list[Replica] = []
    for index in range(count):
        environment = {"OMP_NUM_THREADS": str(threads)}
        if config.device != "cpu":
            own = devices[index * ranks : (index + 1) * ranks]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        replicas.append(Replica(index, environment))
    return replicas


def share_memory(config: EngineConfig, count: int) -> EngineConfig:
    """Return the configuration of each of `count` engines, so that their KV caches together fit a
    CPU's memory. Raises ValueError if kv_cache_memory is too large for that, or kv_offload_memory
    of all engines for the host."""
    if config.kv_offload_memory is not None:
        total = count * parse_bytes(config.kv_offload_memory, "kv_offload_memory")
        free = free_host_memory()
        if total > free:
            raise ValueError(
                f"data_parallel_size is {count} and kv_offload_memory is "
                f"{config.kv_offload_memory}, which takes {total} bytes in all, but cpu has {free} "
                "bytes free; ask for less."
            )
    if config.device != "cpu":
        return config
    free = free_host_memory()
    num_caches = count * config.tensor_parallel_size
    if config.kv_cache_memory is None:
        share = free // (2 * num_caches)
        return config.with_(kv_cache_memory=share) if share < CPU_KV_CACHE else config
    total = num_caches * parse_bytes(config.kv_cache_memory)
    if total > free:
        raise ValueError(
            f"data_parallel_size is {count} and kv_cache_memory is {config.kv_cache_memory}, which "
            f"takes {total} bytes in all, but cpu has {free} bytes free; ask for less."
        )
    return config
