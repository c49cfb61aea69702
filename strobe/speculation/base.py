"""The protocols of a drafting method, and a set of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from strobe.attention.base import Batch
from strobe.request import Request
from strobe.runner.batch import Shape
from strobe.speculation.draft_policy import DraftChain
from strobe.step import Plan, Span
from strobe.transfer import upload


class Drafts(NamedTuple):
    """tokens [n or more, D] int64; margins, same shape, float32: each draft's logit minus the
    second largest one, None if unknown."""

    tokens: Tensor | None = None
    margins: Tensor | None = None

    def first(self, count: int) -> Drafts:
        """The first drafts of every span."""
        return Drafts(*[part if part is None else part[:, :count] for part in self])


@runtime_checkable
class Proposer(Protocol):
    """Drafts on the device. Only tokens and margins leave it; hidden states stay inside.

    capture: target layers whose outputs it reads, as numbers of layers done.
    """

    capture: tuple[int, ...]

    def propose(self, spans: Sequence[Span]) -> Drafts:
        """Propose drafts for n spans, for each at least as many as it may verify."""
        ...

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Receive the captured features [T, n * H] of all rows after every target forward."""
        ...


class HostProposer(Protocol):
    """Drafts on the host from a request's tokens, none of which may be in flight."""

    def propose(self, request: Request, count: int) -> DraftChain:
        """Propose up to `count` draft tokens."""
        ...


class ProposerSet:
    """Drafting methods by name; each drafts for the requests that chose it."""

    def __init__(self, proposers: Mapping[str, Proposer | HostProposer], device: torch.device):
        self.device, self.by_name = device, dict(proposers)
        self.on_device = {n: p for n, p in proposers.items() if isinstance(p, Proposer)}
        self.on_host = {n: p for n, p in proposers.items() if not isinstance(p, Proposer)}
        captured = [layer for proposer in self.on_device.values() for layer in proposer.capture]
        self.capture = tuple(dict.fromkeys(captured))

    def __getitem__(self, name: str) -> Proposer | HostProposer:
        return self.by_name[name]

    def propose(self, plan: Plan, shape: Shape) -> Drafts:
        """Return the device's drafts [S, K] for a layout of that shape; without any, K is 0."""
        if not shape.max_drafts:
            return Drafts()
        size = shape.spans, shape.max_drafts
        tokens, margins = None, None
        for name, members in plan.methods.items():
            drafts = self.on_device[name].propose([plan.spans[i] for i in members])
            assert drafts.tokens is not None
            width = min(shape.max_drafts, drafts.tokens.shape[1])
            if len(members) == len(plan.spans) and (drafts.tokens.shape[0], width) == size:
                return drafts.first(width)
            index = upload(members, self.device)
            if tokens is None:
                tokens = torch.zeros(size, dtype=torch.int64, device=self.device)
            tokens[index, :width] = drafts.tokens[: len(members), :width]
            if drafts.margins is not None:
                margins = torch.zeros(size, device=self.device) if margins is None else margins
                margins[index, :width] = drafts.margins[: len(members), :width]
        if tokens is None:
            tokens = torch.zeros(size, dtype=torch.int64, device=self.device)
        return Drafts(tokens, margins)

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Pass a forward to every proposer, whichever method each request uses."""
        for proposer in self.on_device.values():
            features = hidden
            if hidden is not None and proposer.capture != self.capture:
                parts = hidden.chunk(len(self.capture), 1)
                indices = [self.capture.index(layer) for layer in proposer.capture]
                features = torch.cat([parts[i] for i in indices], 1) if indices else None
            proposer.observe(batch, features)
