"""Converts a memory budget to pages of K/V, before the pool is allocated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from strobe.config import CPU_KV_CACHE, EngineConfig, Limits, parse_bytes
from strobe.host.free_memory import free_memory
from strobe.models.model_config import DecoderConfig
from strobe.runner.buckets import MAX_CAPTURED_ROWS
from strobe.sampling.sampling_state import SamplingState

_GPU_SHARE = 0.92
TYPICAL_CONTEXT = 8192
"""Positions of the contexts for which the page groups' shares of memory are in balance, unless
max_model_len is less."""
_SHORT_REQUEST = 256
"""Tokens of a request. A CPU's cache has room for max_num_seqs of these, or for one full context if
that is more."""


class PageGroup(NamedTuple):
    """Layers of target and drafters that need the same positions.

    page_bytes: of their keys and values in a page. window: positions that a row sees, its own
    included; None: all. held: maximum of pages that a decoding sequence holds, with a window.
    in_flight: pages for the rows of prompts in steps in flight, with a window."""

    page_bytes: int
    window: int | None = None
    held: int = 0
    in_flight: int = 0

    def pages_of(self, limits: Limits) -> int:
        """Return the pages that one sequence of any length needs."""
        if self.window is None:
            return limits.max_pages
        return min(limits.max_pages, self.held + self.in_flight)


def group_pages(groups: Sequence[PageGroup], limits: Limits, num_pages: int) -> list[int]:
    """Return the pages of each group if the first one has `num_pages`, the reserved ones included.
    The others hold the windows of as many sequences as the first one holds of typical length."""
    typical = -(-min(limits.max_model_len, TYPICAL_CONTEXT) // limits.page_size)
    if groups[0].window is not None:
        typical = min(typical, groups[0].held)
    sequences = -(-num_pages // typical)
    others = [1 + group.in_flight + sequences * group.held for group in groups[1:]]
    return [num_pages, *[min(count, num_pages) for count in others]]


def pages_within(
    groups: Sequence[PageGroup], limits: Limits, size: int, max_first: int | None = None
) -> list[int]:
    """Return the pages of each group that `size` bytes hold. max_first: maximum of the first
    group."""
    highest = size // groups[0].page_bytes
    if max_first is not None:
        highest = min(highest, max_first)

    def needed(num_pages: int) -> int:
        return group_bytes(groups, group_pages(groups, limits, num_pages))

    num_pages = bisect_right(range(highest + 1), size, key=needed) - 1
    return group_pages(groups, limits, num_pages)


def group_bytes(groups: Sequence[PageGroup], pages: Sequence[int]) -> int:
    """Bytes of so many pages of each group."""
    return sum(n * group.page_bytes for n, group in zip(pages, groups, strict=True))


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


class Scratch(NamedTuple):
    """Bytes of a GPU that steps take besides weights and K/V.

    rows: of the tensors of a step's rows; logits: of rows with logits; captured: of both once more,
    for captured steps; sampling: of the tables of all slots; copies: of pages and states on their
    way."""

    rows: int = 0
    logits: int = 0
    captured: int = 0
    sampling: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class MemoryBill:
    """What an engine, or one of its ranks, takes of memory; `facts` and `lines` are its table.

    device: its name. parts: bytes of each part there; host: bytes of each part in host memory
    besides. tokens: those that the pool's first page group holds."""

    device: str
    parts: Mapping[str, int]
    host: Mapping[str, int]
    tokens: int
    rank: int = 0
    num_ranks: int = 1

    def facts(self) -> dict[str, int | str]:
        """Return the table's rows by name."""
        facts: dict[str, int | str] = {"device": self.device}
        if self.num_ranks > 1:
            most = "" if self.rank else "; none holds more"
            facts["rank"] = f"{self.rank} of {self.num_ranks}{most}"
        facts |= self.parts
        facts["together"] = sum(self.parts.values())
        facts |= self.host
        facts["tokens in the KV cache"] = self.tokens
        return facts

    def lines(self) -> list[str]:
        """Return the table as lines of text."""
        facts = {
            name: value if isinstance(value, str) else f"{value:,}"
            for name, value in self.facts().items()
        }
        names = max(map(len, facts))
        values = max(map(len, facts.values()))
        rows = [f"  {name:<{names}}  {value:>{values}}" for name, value in facts.items()]
        return ["Memory in bytes:", *rows]


class PartBytes(NamedTuple):
    """Bytes of an engine's parts besides its pages.

    weights: those still to be loaded; states: of recurrent layers, and kept_states: of those in the
    prefix cache; sampling: of the sampling tables unless they are part of scratch; scratch: the
    maximum of a step besides these; host: of pages and states in host memory."""

    weights: int = 0
    states: int = 0
    kept_states: int = 0
    sampling: int = 0
    scratch: int = 0
    host: int = 0


def plan_pages(
    config: EngineConfig,
    limits: Limits,
    groups: Sequence[PageGroup],
    device: torch.device,
    parts: PartBytes,
) -> list[int]:
    """Return the number of pages of each page group, the reserved ones included. parts: what
    takes memory besides the pages. Raises ValueError if a requested size does not fit or holds less
    than one full context."""
    on_cpu = device.type == "cpu"
    budget = MemoryBudget(device, config.tensor_parallel_size if on_cpu else 1)
    in_host = budget if on_cpu else MemoryBudget(torch.device("cpu"), config.tensor_parallel_size)
    seqs = f"max_num_seqs is {limits.max_num_seqs}, whose"
    budget.reserve(
        "The weights take", parts.weights, "use a smaller model, dtype bfloat16 or another device"
    )
    budget.reserve(f"{seqs} states of recurrent layers take", parts.states, "ask for fewer")
    budget.reserve(
        "Kept states of recurrent layers take", parts.kept_states, "lower state_cache_memory"
    )
    in_host.reserve("kv_offload_memory takes", parts.host, "ask for less")
    budget.reserve(
        f"A step of {limits.max_num_batched_tokens} rows takes, next to the weights,",
        parts.scratch,
        "lower max_num_batched_tokens or max_num_seqs",
    )
    tables = len(groups) * page_table_bytes(limits)
    if tables > budget.free // 2:
        raise ValueError(budget.shortage(f"{seqs} page tables take", tables, "ask for fewer"))
    pages = _num_pages(config, limits, groups, budget)
    budget.free -= group_bytes(groups, pages)
    if parts.sampling > budget.free:
        raise ValueError(
            f"{seqs} sampling tables take {parts.sampling} bytes, but {device} has {budget.free} "
            "bytes free next to the KV cache; ask for fewer."
        )
    return pages


def page_table_bytes(limits: Limits) -> int:
    """Bytes of the page tables of all slots for one page group."""
    return limits.max_num_seqs * limits.max_pages * 8


def _num_pages(
    config: EngineConfig, limits: Limits, groups: Sequence[PageGroup], budget: MemoryBudget
) -> list[int]:
    """Return the number of pages of each group for the cache's share of the budget. Raises
    ValueError if they hold less than one full context."""
    min_pages = groups[0].pages_of(limits) + 1
    min_bytes = group_bytes(groups, group_pages(groups, limits, min_pages))
    size = _cache_bytes(config, limits, groups, budget)
    num_pages = pages_within(groups, limits, size, limits.max_num_seqs * limits.max_pages + 1)
    pages = num_pages[0]
    if pages >= min_pages:
        return num_pages
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


def _cache_bytes(
    config: EngineConfig, limits: Limits, groups: Sequence[PageGroup], budget: MemoryBudget
) -> int:
    """Return the bytes of the KV cache: the config's, or the device's default. Raises ValueError
    if fewer are free."""
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
    short_bytes, one_context = [
        group_bytes(groups, group_pages(groups, limits, pages))
        for pages in (short, limits.max_pages + 1)
    ]
    return min(max(one_context, min(short_bytes, CPU_KV_CACHE)), free // 2)


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


def plan_scratch(
    limits: Limits, decoder: DecoderConfig, features: int, dtype: torch.dtype
) -> Scratch:
    """Return the maximum bytes of a step's tensors on a GPU, where they come from a pool of their
    own.

    Per row: the residual stream twice and normed once, `features` copies of it, and gate, up and
    their product, or for each of its experts these and three copies of itself; per row with logits
    these, in dtype and in float32. Once for eager steps and once for captured ones. Plus the
    sampling tables, per slot.
    """
    values = limits.max_num_batched_tokens * _values_per_row(decoder, features)
    return Scratch(
        rows=values * dtype.itemsize,
        logits=_logits_bytes(limits, decoder, dtype),
        captured=_captured_bytes(limits, decoder, features, dtype),
        sampling=SamplingState.num_bytes(limits.max_num_seqs, decoder.vocab_size),
    )


def _captured_bytes(
    limits: Limits, decoder: DecoderConfig, features: int, dtype: torch.dtype
) -> int:
    """Return the bytes of captured steps: for as many rows as are replayed, whose outputs are
    copied once more for steps with grammars."""
    rows = max(limits.max_num_seqs * (1 + limits.num_drafts), MAX_CAPTURED_ROWS)
    output_rows = max(limits.max_num_seqs * limits.lookahead, MAX_CAPTURED_ROWS) * (1 + features)
    values = rows * _values_per_row(decoder, features) + output_rows * decoder.hidden_size
    return values * dtype.itemsize + _logits_bytes(limits, decoder, dtype)


def _values_per_row(decoder: DecoderConfig, features: int) -> int:
    inner = 3 * decoder.intermediate_size
    experts = decoder.experts
    if experts is not None:
        width = decoder.hidden_size + experts.moe_intermediate_size
        inner = max(inner, 3 * experts.top_k * width)
    return (3 + features) * decoder.hidden_size + inner


def _logits_bytes(limits: Limits, decoder: DecoderConfig, dtype: torch.dtype) -> int:
    rows = limits.max_num_seqs * (1 + limits.num_drafts)
    return rows * decoder.vocab_size * (dtype.itemsize + 4)
