"""The protocols of a drafting method, and a set of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from strobe.host.transfer import upload
from strobe.models.heads.head import Drafts
from strobe.request import Request
from strobe.runner.layout import Shape
from strobe.speculation.draft_policy import DraftChain
from strobe.step import Plan, Span


class PlacedRows(Protocol):
    """Rows of a batch: their positions [T], and their K/V slots [T] in each page group."""

    @property
    def positions(self) -> Tensor: ...

    @property
    def kv_slots(self) -> Sequence[Tensor]: ...


@runtime_checkable
class Proposer(Protocol):
    """Drafts on the device. Only tokens and margins leave it; hidden states stay inside.

    capture: target layers whose outputs it reads, as numbers of layers done. margins: whether it
    returns its drafts' margins, which callers may switch.
    """

    capture: tuple[int, ...]
    margins: bool

    def widths_for(self, max_drafts: int) -> tuple[list[int], list[int]]:
        """Return drafts and rows of the blocks that serve up to `max_drafts` drafts, ascending."""
        ...

    def propose(self, spans: Sequence[Span]) -> Drafts:
        """Propose drafts for n spans, for each as many as it may verify, or more."""
        ...

    def observe(self, batch: PlacedRows, hidden: Tensor | None) -> None:
        """Receive the captured features [T, n * H] of all rows after every target forward, in
        shadow mode of the rows of scored answers."""
        ...


class HostProposer(Protocol):
    """Drafts on the host from a request's tokens, none of which may be in flight."""

    def propose(self, request: Request, count: int) -> DraftChain:
        """Propose up to `count` draft tokens."""
        ...


class Drafter(NamedTuple):
    """The proposers of one drafting method. host: drafts from a request's tokens; device: name of
    the proposer that drafts on the device. With both, the device drafts where the host has no
    drafts, or where the device is expected to bring more."""

    host: HostProposer | None = None
    device: str | None = None


class ProposerSet:
    """Drafting methods by name; each drafts for the requests that chose it."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer | HostProposer],
        device: torch.device,
        composites: Mapping[str, tuple[str, str]] = {},
    ):
        """composites: methods that combine a host's proposer with one of the device, by name."""
        self.by_name = dict(proposers)
        self.device = device
        self.composites = composites
        self.on_device = {n: p for n, p in proposers.items() if isinstance(p, Proposer)}
        on_host = {n: p for n, p in proposers.items() if not isinstance(p, Proposer)}
        self.drafters = {name: Drafter(host=proposer) for name, proposer in on_host.items()}
        self.drafters |= {name: Drafter(device=name) for name in self.on_device}
        for name, (host, on_device) in composites.items():
            if host in on_host and on_device in self.on_device:
                self.drafters[name] = Drafter(on_host[host], on_device)
        captured = [layer for proposer in self.on_device.values() for layer in proposer.capture]
        self.capture = tuple(dict.fromkeys(captured))

    def __getitem__(self, name: str) -> Proposer | HostProposer:
        return self.by_name[name]

    @property
    def device_method(self) -> str | None:
        """The first method that drafts on the device alone; None without any."""
        return next(iter(self.on_device), None)

    def propose(self, plan: Plan, shape: Shape) -> Drafts:
        """Return the device's drafts [S, K] for a layout of that shape; without any, K is 0."""
        if not shape.max_drafts:
            return Drafts()
        size = shape.spans, shape.max_drafts
        tokens = None
        margins = None
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

    def observe(self, batch: PlacedRows, hidden: Tensor | None) -> None:
        """Pass a forward to every proposer, whichever method each request uses."""
        for proposer in self.on_device.values():
            proposer.observe(batch, self.features_of(proposer, hidden))

    def features_of(self, proposer: Proposer, hidden: Tensor | None) -> Tensor | None:
        """Return the features that a proposer reads, of all that are captured."""
        if hidden is None or proposer.capture == self.capture:
            return hidden
        parts = hidden.chunk(len(self.capture), 1)
        indices = [self.capture.index(layer) for layer in proposer.capture]
        return torch.cat([parts[i] for i in indices], 1) if indices else None
