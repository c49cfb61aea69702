"""Settings of an engine in which all requests of a benchmark run at once."""

from __future__ import annotations

from dataclasses import replace

from strobe.config import CPU_KV_CACHE, EngineConfig
from strobe.parallel.devices import choose_device
from strobe.tools.bench.bench_settings import RandomWeights


def with_cache_room(config: EngineConfig) -> EngineConfig:
    """Return a config with the largest default KV cache on a CPU, whose own default is for short
    requests: a benchmark's are long, and none may be preempted."""
    if config.kv_cache_memory is not None or choose_device(config.device).type != "cpu":
        return config
    return replace(config, kv_cache_memory=CPU_KV_CACHE)


def with_random_models(
    config: EngineConfig, load_format: RandomWeights, max_requests: int
) -> EngineConfig:
    """Return a config for so many requests at once, random weights and no cached prefix."""
    return with_cache_room(
        replace(
            config,
            load_format=load_format,
            max_num_seqs=max_requests,
            enable_prefix_caching=False,
        )
    )
