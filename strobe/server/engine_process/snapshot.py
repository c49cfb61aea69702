"""The engine's state, which its process sends to the server a few times a second."""

from __future__ import annotations

from typing import NamedTuple

from strobe.counters import EngineStats


class EngineSnapshot(NamedTuple):
    """The engine's state. stats: totals since its start."""

    running: int
    """Requests in the running batch."""
    waiting: int
    """Requests in the waiting queue."""
    kv_used: float
    """Share of the K/V pages in use, 0 to 1."""
    stats: EngineStats
    confidence: tuple[tuple[int, int, float, float], ...] = ()
    """Logistic fits of drafts' chances: (drafts of the block, position, slope, intercept)."""
