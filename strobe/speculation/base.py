"""Who proposes: the protocols of a drafting method, and several methods held at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from strobe.attention.base import Batch
from strobe.request import Request
from strobe.runner.batch import Shape
from strobe.runner.pending import VerifyResult
from strobe.speculation.draft_policy import DraftChain
from strobe.step import Plan, Span
from strobe.transfer import upload


class Drafts(NamedTuple):
    """tokens [n or more, D] int64, and margins, of the same shape in float32: how far each one's
    logit was above the second largest; None where that is not known."""

    tokens: Tensor | None = None
    margins: Tensor | None = None

    def first(self, count: int) -> Drafts:
        """The first drafts of every span."""
        return Drafts(*[part if part is None else part[:, :count] for part in self])


@runtime_checkable
class Proposer(Protocol):
    """Drafts on the device. Only tokens and margins leave it; hidden states stay inside.

    capture: layers of the target whose outputs it reads, as counts of layers done.
    """

    capture: tuple[int, ...]

    def propose(self, spans: Sequence[Span]) -> Drafts:
        """Drafts of n spans, for each at least as many as it verifies at most."""
        ...

    def observe(self, batch: Batch, hidden: Tensor | None, verdict: VerifyResult) -> None:
        """Called after every target forward with the captured features [T, n * H] of all rows, and
        with what was kept of the drafts."""
        ...


class HostProposer(Protocol):
    """Drafts on the host, where it reads the request's tokens: none may be on their way."""

    def propose(self, request: Request, count: int) -> DraftChain:
        """At most `count` draft tokens."""
        ...


class ProposerSet:
    """Several methods by name; each drafts for the requests that chose it."""

    def __init__(self, proposers: Mapping[str, Proposer | HostProposer], device: torch.device):
        self.device, self.by_name = device, dict(proposers)
        self.on_device = {n: p for n, p in proposers.items() if isinstance(p, Proposer)}
        self.on_host = {n: p for n, p in proposers.items() if not isinstance(p, Proposer)}
        captured = [layer for proposer in self.on_device.values() for layer in proposer.capture]
        self.capture = tuple(dict.fromkeys(captured))

    def __getitem__(self, name: str) -> Proposer | HostProposer:
        return self.by_name[name]

    def propose(self, plan: Plan, shape: Shape) -> Drafts:
        """The drafts [S, K] of a layout of that shape that are made on the device; none: K is 0."""
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

    def observe(self, batch: Batch, hidden: Tensor | None, verdict: VerifyResult) -> None:
        """Show the forward to every proposer, whatever each request drafts with."""
        for proposer in self.on_device.values():
            features = hidden
            if hidden is not None and proposer.capture != self.capture:
                parts = hidden.chunk(len(self.capture), 1)
                indices = [self.capture.index(layer) for layer in proposer.capture]
                features = torch.cat([parts[i] for i in indices], 1) if indices else None
            proposer.observe(batch, features, verdict)
