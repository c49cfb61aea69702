"""How many drafts each request verifies in a step, decided once per plan. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from strobe.request import Request


class Candidate(NamedTuple):
    """A request that may verify up to `most` drafts in this step."""

    request: Request
    most: int


class Load(NamedTuple):
    """What else there is to do: requests that decode in this step, rows of prompts that are still
    to be computed, and requests that wait."""

    decoding: int
    prompt_rows: int
    waiting: int


class Budget(Protocol):
    """A policy."""

    def drafts(self, candidates: Sequence[Candidate], load: Load) -> list[int]:
        """How many drafts each candidate verifies, 0 to `most`."""
        ...


class FullBudget:
    """Every request verifies as many drafts as it may."""

    def drafts(self, candidates: Sequence[Candidate], load: Load) -> list[int]:
        return [candidate.most for candidate in candidates]
