"""Counters over the engine's life."""

from __future__ import annotations

from dataclasses import dataclass, field

from strobe.request import SpeculationCount


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
