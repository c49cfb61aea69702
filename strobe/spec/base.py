"""Who proposes: the protocols of a drafting method, and several methods held at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from strobe.attention.base import Batch
from strobe.request import Request
from strobe.runner.batch import Shape
from strobe.runner.pending import Verdict
from strobe.step import Plan, Span
from strobe.transfer import upload


@runtime_checkable
class Proposer(Protocol):
    """Drafts on the device. Only tokens leave it; hidden states stay inside.

    capture: layers of the target whose outputs it reads, as counts of layers done.
    """

    capture: tuple[int, ...]

    def propose(self, spans: Sequence[Span]) -> Tensor:
        """Draft tokens [n or more, D] int64 for n spans, each of which verifies its first ones."""
        ...

    def observe(self, batch: Batch, hidden: Tensor | None, verdict: Verdict) -> None:
        """Called after every target forward with the captured features [T, n * H] of all rows, and
        with what was kept of the drafts."""
        ...


class HostProposer(Protocol):
    """Drafts on the host, where it reads the request's tokens: none may be on their way."""

    def propose(self, request: Request, count: int) -> list[int]:
        """At most `count` draft tokens."""
        ...


class ProposerSet:
    """Several methods by name; each drafts for the requests that chose it."""

    def __init__(self, proposers: Mapping[str, Proposer | HostProposer], device: torch.device):
        self.device, self.all = device, dict(proposers)
        self.on_device = {n: p for n, p in proposers.items() if isinstance(p, Proposer)}
        self.on_host = {n: p for n, p in proposers.items() if not isinstance(p, Proposer)}
        captured = [layer for proposer in self.on_device.values() for layer in proposer.capture]
        self.capture = tuple(dict.fromkeys(captured))

    def __getitem__(self, name: str) -> Proposer | HostProposer:
        return self.all[name]

    def propose(self, plan: Plan, shape: Shape) -> Tensor | None:
        """The drafts [S, K] of a layout of that shape that are made on the device; None: K is 0."""
        if not shape.drafts:
            return None
        found: Tensor | None = None
        for name, members in plan.methods.items():
            drafts = self.on_device[name].propose([plan.spans[i] for i in members])
            if len(members) == len(plan.spans) and drafts.shape[0] == shape.spans:
                return drafts[:, : shape.drafts]
            found = self._none(shape) if found is None else found
            width = min(shape.drafts, drafts.shape[1])
            index = upload(members, self.device)
            found[index, :width] = drafts[: len(members), :width]
        return self._none(shape) if found is None else found

    def _none(self, shape: Shape) -> Tensor:
        return torch.zeros(shape.spans, shape.drafts, dtype=torch.int64, device=self.device)

    def observe(self, batch: Batch, hidden: Tensor | None, verdict: Verdict) -> None:
        """Show the forward to every proposer, whatever each request drafts with."""
        for proposer in self.on_device.values():
            own = hidden
            if hidden is not None and proposer.capture != self.capture:
                parts = hidden.chunk(len(self.capture), 1)
                at = [self.capture.index(layer) for layer in proposer.capture]
                own = torch.cat([parts[i] for i in at], 1) if at else None
            proposer.observe(batch, own, verdict)
