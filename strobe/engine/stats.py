"""Counters over the engine's life, under vLLM's names where vLLM has one."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """Verify steps that carried drafts, tokens drafted and accepted, and what else was counted.
    prefix_queries, prefix_hits: tokens of admitted requests, and those found in cached pages."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list[int])

    def verified(self, drafted: int, accepted: int) -> None:
        """Count one request's verify step."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.accepted_per_position += [0] * (drafted - len(self.accepted_per_position))
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verify step that carried drafts, the target's own included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    def metrics(self) -> list[Metric]:
        """What `LLM.get_metrics()` returns."""
        return [
            Counter("vllm:spec_decode_num_drafts", self.num_drafts),
            Counter("vllm:spec_decode_num_draft_tokens", self.num_draft_tokens),
            Counter("vllm:spec_decode_num_accepted_tokens", self.num_accepted_tokens),
            Vector(
                "vllm:spec_decode_num_accepted_tokens_per_pos", list(self.accepted_per_position)
            ),
            Counter("vllm:prompt_tokens", self.prompt_tokens),
            Counter("vllm:generation_tokens", self.generation_tokens),
            Counter("vllm:num_preemptions", self.preemptions),
            Counter("vllm:prefix_cache_queries", self.prefix_queries),
            Counter("vllm:prefix_cache_hits", self.prefix_hits),
            Counter("strobe:engine_steps", self.steps),
        ]
