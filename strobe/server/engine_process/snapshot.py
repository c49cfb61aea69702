"""The engine's state, which its process sends to the server a few times a second."""

from __future__ import annotations

from typing import NamedTuple


class EngineSnapshot(NamedTuple):
    """The engine's state. All fields but the first three are totals since its start."""

    running: int
    """Requests in the running batch."""
    waiting: int
    """Requests in the waiting queue."""
    kv_used: float
    """Share of the K/V pages in use, 0 to 1."""
    steps: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    num_drafts: int
    """Verify steps that carried drafts, counted per request."""
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    """Drafts accepted at each position of the block, from 0."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Prompt tokens found in the prefix cache."""
    drafts_made: int = 0
    """Drafts proposed, verified or not."""
    rested_steps: int = 0
    """Steps without drafts of requests that may draft."""
    confidence: tuple[tuple[int, int, float, float], ...] = ()
    """Logistic fits of drafts' chances: (drafts of the block, position, slope, intercept)."""
