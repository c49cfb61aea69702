"""Converts a memory budget to pages of K/V, before the pool is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strobe.config import CPU_KV_CACHE, EngineConfig, Limits, parse_bytes
from strobe.free_memory import free_memory
from strobe.kv.store import KVSpec
from strobe.models.config import DecoderConfig
from strobe.runner.buckets import MAX_CAPTURED_ROWS
from strobe.sampling.state import SamplingState

_GPU_SHARE = 0.92
_SHORT_REQUEST = 256
"""Tokens of a request. A CPU's cache has room for max_num_seqs of these, or for one full context if
that is more."""


def plan_pages(
    config: EngineConfig,
    limits: Limits,
    groups: Sequence[KVSpec],
    device: torch.device,
    weights: int = 0,
    states: int = 0,
    sampling: int = 0,
    scratch: int = 0,
) -> int:
    """Return the number of pages, the same for all KV groups, the reserved one included.

    weights: bytes of weights still to be loaded; states: bytes of recurrent states; sampling: bytes
    of the sampling tables unless they are part of scratch; scratch: maximum bytes of a step besides
    these. Raises ValueError if a requested size does not fit or holds less than one full context.
    """
    per_page = sum(group.bytes_per_page(limits.page_size) for group in groups)
    max_useful = limits.max_num_seqs * limits.max_pages + 1
    min_pages = limits.max_pages + 1
    min_bytes = min_pages * per_page
    free = free_memory(device)
    if device.type == "cpu":  # which all ranks share
        free //= config.tensor_parallel_size
    seqs, rows = f"max_num_seqs is {limits.max_num_seqs}, whose", limits.max_num_batched_tokens
    smaller = "use a smaller model, dtype bfloat16 or another device"
    lower = "lower max_num_batched_tokens or max_num_seqs"
    for subject, size, hint in (
        ("The weights take", weights, smaller),
        (f"{seqs} states of recurrent layers take", states, "ask for fewer"),
        (f"A step of {rows} rows takes, beside the weights,", scratch, lower),
    ):
        if size >= free:
            raise ValueError(f"{subject} {size} bytes, but {device} has {free} bytes free; {hint}.")
        free -= size
    tables = limits.max_num_seqs * limits.max_pages * 8
    if tables > free // 2:
        raise ValueError(
            f"{seqs} page tables take {tables} bytes, but {device} has {free} bytes free; ask for "
            "fewer."
        )
    setting = f"kv_cache_memory to {min_bytes} bytes"
    if config.kv_cache_memory is not None:
        budget = parse_bytes(config.kv_cache_memory)
        if budget > free:
            raise ValueError(
                f"kv_cache_memory is {config.kv_cache_memory} ({budget} bytes), but {device} has "
                f"{free} bytes free; ask for less."
            )
    elif device.type == "cuda" and config.gpu_memory_utilization is not None:
        budget = free - _bytes_to_leave_free(config.gpu_memory_utilization, free, device)
        setting = "gpu_memory_utilization"
    elif device.type == "cuda":
        budget = int(free * _GPU_SHARE)
    else:
        short = limits.max_num_seqs * -(-_SHORT_REQUEST // limits.page_size) + 1
        budget = max(min_bytes, min(short * per_page, CPU_KV_CACHE))
        budget = min(budget, free // 2)
    pages = min(budget // per_page, max_useful)
    if pages < min_pages:
        hint = f"raise {setting} or " if min_bytes <= free else ""
        raise ValueError(
            f"{budget} bytes of KV cache hold {max(pages - 1, 0) * limits.page_size} tokens in "
            f"pages of {limits.page_size}, but max_model_len is {limits.max_model_len}; {hint}"
            "lower max_model_len or page_size."
        )
    rest = free - pages * per_page
    if sampling > rest:
        raise ValueError(
            f"{seqs} sampling tables take {sampling} bytes, but {device} has {rest} bytes free "
            "beside the KV cache; ask for fewer."
        )
    return pages


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
    inner, experts = 3 * decoder.intermediate_size, decoder.experts
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
