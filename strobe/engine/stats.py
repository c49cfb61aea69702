"""Counters over the engine's life, under vLLM's names where vLLM has one."""

from __future__ import annotations

from dataclasses import dataclass, field

from strobe.request import SpeculationCount


@dataclass(frozen=True)
class Counter:
    """A total that only grows."""

    name: str
    value: int


@dataclass(frozen=True)
class Vector:
    """Totals by position, from 0."""

    name: str
    values: list[int]


Metric = Counter | Vector


@dataclass
class EngineStats:
    """What was counted of all requests. prefix_queries, prefix_hits: tokens of admitted ones, and
    those found in cached pages."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    speculation: SpeculationCount = field(default_factory=SpeculationCount)

    def metrics(self) -> list[Metric]:
        """What `LLM.get_metrics()` returns."""
        counts = self.speculation
        return [
            Counter("vllm:spec_decode_num_drafts", counts.steps),
            Counter("vllm:spec_decode_num_draft_tokens", counts.drafted),
            Counter("vllm:spec_decode_num_accepted_tokens", counts.accepted),
            Vector("vllm:spec_decode_num_accepted_tokens_per_pos", list(counts.per_position)),
            Counter("vllm:prompt_tokens", self.prompt_tokens),
            Counter("vllm:generation_tokens", self.generation_tokens),
            Counter("vllm:num_preemptions", self.preemptions),
            Counter("vllm:prefix_cache_queries", self.prefix_queries),
            Counter("vllm:prefix_cache_hits", self.prefix_hits),
            Counter("strobe:engine_steps", self.steps),
        ]
