"""Prompt lookup: propose what followed the last occurrence of the newest tokens (Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from strobe.request import Request
from strobe.runner.batch import Batch
from strobe.runner.upload import upload
from strobe.step import Drafts, Plan


class _Index:
    """Where each run of n tokens was last followed by another one, kept up as tokens arrive."""

    def __init__(self, shortest: int, longest: int):
        self.sizes = range(shortest, longest + 1)
        self.ends: dict[tuple[int, ...], int] = {}
        self.done = 0

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(self.done + 1, len(tokens)):
            for n in self.sizes:
                if n <= end:
                    self.ends[tuple(tokens[end - n : end])] = end
        self.done = max(self.done, len(tokens) - 1)

    def find(self, tokens: Sequence[int], count: int) -> list[int]:
        for n in reversed(self.sizes):
            end = self.ends.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if end is not None:
                return list(tokens[end : end + count])
        return []


class NgramProposer:
    """Longest match first, on the host; the matches and their lengths differ per request."""

    capture: tuple[int, ...] = ()
    needs_host_tokens = True

    def __init__(self, num_drafts: int, shortest: int, longest: int, device: torch.device):
        self.num_drafts, self.shortest, self.longest = num_drafts, shortest, longest
        self.device = device
        self._indices: WeakKeyDictionary[Request, _Index] = WeakKeyDictionary()

    def propose(self, plan: Plan, spans: Sequence[int]) -> Drafts:
        """tokens [len(spans), longest found]; `known` carries each one's length."""
        found = [self._find(plan.spans[i].request, plan.spans[i].drafts) for i in spans]
        width = max(len(drafts) for drafts in found)
        padded = [drafts + [0] * (width - len(drafts)) for drafts in found]
        tokens = upload(padded, self.device)
        return Drafts(tokens.view(len(found), width), tuple(len(drafts) for drafts in found))

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        pass

    def _find(self, request: Request, count: int) -> list[int]:
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = _Index(self.shortest, self.longest)
        index.extend(request.tokens)
        return index.find(request.tokens, count)
