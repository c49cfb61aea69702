"""Room in the KV cache for all requests of a benchmark at once."""

from __future__ import annotations

from dataclasses import replace

from strobe.config import CPU_KV_CACHE, EngineConfig
from strobe.parallel.devices import choose_device


def with_cache_room(config: EngineConfig) -> EngineConfig:
    """Return a config with the largest default KV cache on a CPU, whose own default is for short
    requests: a benchmark's are long, and none may be preempted."""
    if config.kv_cache_memory is not None or choose_device(config.device).type != "cpu":
        return config
    return replace(config, kv_cache_memory=CPU_KV_CACHE)
