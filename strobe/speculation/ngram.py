"""Prompt lookup: propose the tokens that followed the last occurrence of the newest tokens (Saxena,
2023). Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from strobe.request import Request
from strobe.speculation.draft_policy import DraftChain


class _NgramIndex:
    """The last position of every n-gram that is followed by another token, updated as tokens
    arrive."""

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
    """Looks for the longest match first, on the host; requests differ in matches and lengths."""

    def __init__(self, min_tokens: int, max_tokens: int):
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self._indices: WeakKeyDictionary[Request, _NgramIndex] = WeakKeyDictionary()

    def propose(self, request: Request, count: int) -> DraftChain:
        """Return up to `count` tokens that followed the longest match; none without a match."""
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = _NgramIndex(self.min_tokens, self.max_tokens)
        index.extend(request.tokens)
        return index.find(request.tokens, count)
