"""Attention masks as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerMask:
    """Keys j that a query at position p may see, within the bounds of its span.

    causal: keys j <= p only. window: keys with p - j < window and, when not causal, j - p < window.
    """

    causal: bool = True
    window: int | None = None
