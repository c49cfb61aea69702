"""Prompt lookup: propose what followed the last occurrence of the newest tokens (Saxena, 2023).
Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from strobe.request import Request
from strobe.speculation.draft_policy import DraftChain


class _NgramIndex:
    """Where each run of n tokens was last followed by another one, kept up as tokens arrive."""

    def __init__(self, min_tokens: int, max_tokens: int):
        self.sizes = range(min_tokens, max_tokens + 1)
        self.ends: dict[tuple[int, ...], int] = {}
        self.done = 0

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(self.done + 1, len(tokens)):
            for n in self.sizes:
                if n <= end:
                    self.ends[tuple(tokens[end - n : end])] = end
        self.done = max(self.done, len(tokens) - 1)

    def find(self, tokens: Sequence[int], count: int) -> DraftChain:
        for n in reversed(self.sizes):
            end = self.ends.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if end is not None:
                return DraftChain(tuple(tokens[end : end + count]), n)
        return DraftChain()


class NgramProposer:
    """Longest match first, on the host; the matches and their lengths differ per request."""

    def __init__(self, min_tokens: int, max_tokens: int):
        self.min_tokens, self.max_tokens = min_tokens, max_tokens
        self._indices: WeakKeyDictionary[Request, _NgramIndex] = WeakKeyDictionary()

    def propose(self, request: Request, count: int) -> DraftChain:
        """What followed the longest match, at most `count` tokens; empty where nothing matches."""
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = _NgramIndex(self.min_tokens, self.max_tokens)
        index.extend(request.tokens)
        return index.find(request.tokens, count)
