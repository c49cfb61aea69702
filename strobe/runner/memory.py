"""Converts a memory budget to pages of K/V, before the pool is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strobe.config import CPU_KV_CACHE, EngineConfig, Limits, parse_bytes
from strobe.host.free_memory import free_memory
from strobe.kv.kv_store import KVSpec
from strobe.models.model_config import DecoderConfig
from strobe.runner.buckets import MAX_CAPTURED_ROWS
from strobe.sampling.sampling_state import SamplingState

_GPU_SHARE = 0.92
_SHORT_REQUEST = 256
"""Tokens of a request. A CPU's cache has room for max_num_seqs of these, or for one full context if
that is more."""


class MemoryBudget:
    """A device's free bytes, of which each part of an engine reserves its own before the rest
    becomes pages of K/V."""

    def __init__(self, device: torch.device, sharers: int = 1):
        """sharers: processes that share the device's memory."""
        self.device = device
        self.free = free_memory(device) // sharers

    def reserve(self, subject: str, size: int, hint: str) -> None:
        """Take bytes away. subject: what takes them, with its verb; hint: what to do if they do not
        fit. Raises ValueError then."""
        if size >= self.free:
            raise ValueError(self.shortage(subject, size, hint))
        self.free -= size

    def shortage(self, subject: str, size: int, hint: str) -> str:
        """Return the sentence that says so many bytes do not fit."""
        return f"{subject} {size} bytes, but {self.device} has {self.free} bytes free; {hint}."


def plan_pages(
    config: EngineConfig,
    limits: Limits,
    groups: Sequence[KVSpec],
    device: torch.device,
    *,
    weights: int = 0,
    states: int = 0,
    kept_states: int = 0,
    sampling: int = 0,
    scratch: int = 0,
    host: int = 0,
) -> int:
    """Return the number of pages, the same for all KV groups, the reserved one included.

    weights: bytes of weights still to be loaded; states: bytes of recurrent states, and kept_states
    of those in the prefix cache; sampling: bytes of the sampling tables unless they are part of
    scratch; scratch: maximum bytes of a step besides these; host: bytes of pages and states in host
    memory. Raises ValueError if a requested size does not fit or holds less than one full context.
    """
    on_cpu = device.type == "cpu"
    budget = MemoryBudget(device, config.tensor_parallel_size if on_cpu else 1)
    in_host = budget if on_cpu else MemoryBudget(torch.device("cpu"), config.tensor_parallel_size)
    seqs = f"max_num_seqs is {limits.max_num_seqs}, whose"
    budget.reserve(
        "The weights take", weights, "use a smaller model, dtype bfloat16 or another device"
    )
    budget.reserve(f"{seqs} states of recurrent layers take", states, "ask for fewer")
    budget.reserve("Kept states of recurrent layers take", kept_states, "lower state_cache_memory")
    in_host.reserve("kv_offload_memory takes", host, "ask for less")
    budget.reserve(
        f"A step of {limits.max_num_batched_tokens} rows takes, beside the weights,",
        scratch,
        "lower max_num_batched_tokens or max_num_seqs",
    )
    tables = page_table_bytes(limits)
    if tables > budget.free // 2:
        raise ValueError(budget.shortage(f"{seqs} page tables take", tables, "ask for fewer"))
    per_page = sum(group.bytes_per_page(limits.page_size) for group in groups)
    pages = _num_pages(config, limits, per_page, budget)
    budget.free -= pages * per_page
    if sampling > budget.free:
        raise ValueError(
            f"{seqs} sampling tables take {sampling} bytes, but {device} has {budget.free} bytes "
            "free beside the KV cache; ask for fewer."
        )
    return pages


def page_table_bytes(limits: Limits) -> int:
    """Bytes of the page tables of all slots."""
    return limits.max_num_seqs * limits.max_pages * 8


def _num_pages(config: EngineConfig, limits: Limits, per_page: int, budget: MemoryBudget) -> int:
    """Return the number of pages for the cache's share of the budget. per_page: bytes of a page in
    all groups. Raises ValueError if they hold less than one full context."""
    min_pages = limits.max_pages + 1
    min_bytes = min_pages * per_page
    size = _cache_bytes(config, limits, per_page, budget)
    pages = min(size // per_page, limits.max_num_seqs * limits.max_pages + 1)
    if pages >= min_pages:
        return pages
    setting = f"kv_cache_memory to {min_bytes} bytes"
    on_gpu = budget.device.type == "cuda"
    if config.kv_cache_memory is None and on_gpu and config.gpu_memory_utilization is not None:
        setting = "gpu_memory_utilization"
    hint = f"raise {setting} or " if min_bytes <= budget.free else ""
    raise ValueError(
        f"{size} bytes of KV cache hold {max(pages - 1, 0) * limits.page_size} tokens in "
        f"pages of {limits.page_size}, but max_model_len is {limits.max_model_len}; {hint}"
        "lower max_model_len or page_size."
    )


def _cache_bytes(config: EngineConfig, limits: Limits, per_page: int, budget: MemoryBudget) -> int:
    """Return the bytes of the KV cache: as asked for, or the device's default. Raises ValueError
    for more than there are."""
    free = budget.free
    if config.kv_cache_memory is not None:
        size = parse_bytes(config.kv_cache_memory)
        if size > free:
            raise ValueError(
                f"kv_cache_memory is {config.kv_cache_memory} ({size} bytes), but {budget.device} "
                f"has {free} bytes free; ask for less."
            )
        return size
    if budget.device.type == "cuda":
        if config.gpu_memory_utilization is None:
            return int(free * _GPU_SHARE)
        return free - _bytes_to_leave_free(config.gpu_memory_utilization, free, budget.device)
    short = limits.max_num_seqs * -(-_SHORT_REQUEST // limits.page_size) + 1
    one_context = (limits.max_pages + 1) * per_page
    return min(max(one_context, min(short * per_page, CPU_KV_CACHE)), free // 2)


def _bytes_to_leave_free(share: float, free: int, device: torch.device) -> int:
    """Bytes of a GPU that stay free when `share` of its memory is in use. free: bytes available to
    the KV cache. Raises ValueError if more is in use already."""
    total = torch.cuda.mem_get_info(device)[1]
    reserved = total - int(share * total)
    if reserved >= free:
        used_share = 1 - free / total
        raise ValueError(
            f"gpu_memory_utilization is {share}, but weights, a step's tensors and what others use "
            f"take {used_share:.2f} of {device} without any KV cache; raise it, or free memory."
        )
    return reserved


def scratch_bytes(limits: Limits, decoder: DecoderConfig, features: int, dtype: torch.dtype) -> int:
    """Maximum bytes of a step's tensors on a GPU, where they come from a pool of their own.

    Per row: the residual stream twice and normed once, `features` copies of it, and gate, up and
    their product, or for each of its experts these and three copies of itself; per row with logits
    these, in dtype and in float32. Once for eager steps and once, for as many rows as are replayed,
    for captured ones, whose outputs are copied once more for steps with grammars. Plus the sampling
    tables, per slot.
    """
    rows = limits.max_num_batched_tokens
    logits_rows = limits.max_num_seqs * (1 + limits.num_drafts)
    inner = 3 * decoder.intermediate_size
    experts = decoder.experts
    if experts is not None:
        width = decoder.hidden_size + experts.moe_intermediate_size
        inner = max(inner, 3 * experts.top_k * width)
    per_row = (3 + features) * decoder.hidden_size + inner
    logits = logits_rows * decoder.vocab_size * (dtype.itemsize + 4)
    tables = SamplingState.num_bytes(limits.max_num_seqs, decoder.vocab_size)
    output_rows = max(limits.max_num_seqs * limits.lookahead, MAX_CAPTURED_ROWS) * (1 + features)
    values = (rows + max(logits_rows, MAX_CAPTURED_ROWS)) * per_row
    values += output_rows * decoder.hidden_size
    return values * dtype.itemsize + 2 * logits + tables
