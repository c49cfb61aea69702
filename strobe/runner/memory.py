"""Bytes to pages: how much K/V fits, decided before the pool is made."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from strobe.config import EngineConfig, Limits, parse_bytes
from strobe.kv.store import KVSpec

_CPU_DEFAULT = 1 << 30
_GPU_SHARE = 0.85


def free_memory(device: torch.device) -> int:
    """Bytes that could still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def plan_pages(
    config: EngineConfig, limits: Limits, groups: Sequence[KVSpec], device: torch.device
) -> int:
    """Pages of all KV groups together, the reserved one included. Called with the weights loaded.

    Raises ValueError when what is asked for does not fit, or holds less than one full context.
    """
    per_page = sum(group.bytes_per_page(limits.page_size) for group in groups)
    useful = limits.max_num_seqs * limits.max_pages + 1
    least = limits.max_pages + 1
    free = free_memory(device)
    if config.kv_cache_memory is not None:
        budget = parse_bytes(config.kv_cache_memory)
        if budget > free:
            raise ValueError(
                f"kv_cache_memory is {config.kv_cache_memory} ({budget} bytes), but {device} has "
                f"{free} bytes free; ask for less."
            )
    elif device.type == "cuda":
        budget = int(free * _GPU_SHARE)
    else:
        budget = min(max(_CPU_DEFAULT, least * per_page), free // 2)
    pages = min(budget // per_page, useful)
    if pages < least:
        raise ValueError(
            f"{budget} bytes of KV cache hold {max(pages - 1, 0) * limits.page_size} tokens, but "
            f"max_model_len is {limits.max_model_len}; raise kv_cache_memory to "
            f"{least * per_page} bytes or lower max_model_len."
        )
    return pages
