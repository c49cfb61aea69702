"""The state of the engine that its process sends to the server a few times a second."""

from __future__ import annotations

from typing import NamedTuple


class EngineSnapshot(NamedTuple):
    """The engine at one moment. All but the first three are totals since its start."""

    running: int
    """Requests in the running batch."""
    waiting: int
    """Requests admitted that wait for room."""
    kv_used: float
    """Share of the K/V pages in use, 0 to 1."""
    steps: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    num_drafts: int
    """Verify steps that carried drafts, one for each request in them."""
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    """Drafts accepted at each place of the block, from 0."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Prompt tokens found there."""
    drafts_made: int = 0
    """Verified or not."""
    rested_steps: int = 0
    """Steps of requests for which nothing was drafted."""
    confidence: tuple[tuple[int, int, float, float], ...] = ()
    """The fit of chances: drafts of the block, place, slope and intercept."""
