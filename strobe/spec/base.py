"""Who proposes: the protocol, the proposer that never does, and several held at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from strobe.runner.batch import Batch
from strobe.runner.state import DecodeState
from strobe.step import Plan, Proposal


class Proposer(Protocol):
    """Drafts tokens for spans. Only tokens leave it; hidden states stay inside.

    num_drafts: the most it proposes. capture: layers of the target it reads (counts of layers
    done). needs_host_tokens: it reads `request.tokens`, so no result may be on its way.
    """

    num_drafts: int
    capture: tuple[int, ...]
    needs_host_tokens: bool

    def propose(self, plan: Plan, spans: Sequence[int]) -> Proposal:
        """Drafts for `spans` of the plan: tokens [len(spans), K'] with K' >= each span's drafts."""
        ...

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Called after every target forward with the captured features [T, n * H] of all rows."""
        ...


class NoProposer:
    """Plain decoding: no drafts, nothing captured."""

    num_drafts = 0
    capture: tuple[int, ...] = ()
    needs_host_tokens = False

    def __init__(self, device: torch.device):
        self.device = device

    def propose(self, plan: Plan, spans: Sequence[int]) -> Proposal:
        tokens = torch.zeros(len(spans), 0, dtype=torch.int64, device=self.device)
        return Proposal(tokens, torch.zeros(len(spans), dtype=torch.int64, device=self.device))

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        pass


class ProposerSet:
    """Several proposers by method name; each drafts for the requests that chose it."""

    def __init__(self, proposers: Mapping[str, Proposer], state: DecodeState, limit: int):
        """limit: the context's end; drafts that would lie beyond it do not count."""
        self.proposers, self.state, self.limit = proposers, state, limit
        self.plain = NoProposer(state.device)
        self.capture = next((p.capture for p in proposers.values() if p.capture), ())
        self._allowed_key: tuple[int, ...] = ()
        self._allowed_value = torch.zeros(0, dtype=torch.int64, device=state.device)

    def propose(self, plan: Plan) -> Proposal:
        """Drafts for all S spans: tokens [S, K], K the longest draft that may count."""
        chosen = plan.methods
        if not chosen:
            return self.plain.propose(plan, range(len(plan.spans)))
        parts = [(m, self.proposers[name].propose(plan, m)) for name, m in chosen.items()]
        proposal = parts[0][1] if len(parts[0][0]) == len(plan.spans) else self._join(plan, parts)
        known = proposal.known
        width = plan.shorten(known).num_drafts if known else plan.num_drafts
        lengths = torch.minimum(proposal.lengths, self._allowed(plan))
        if any(span.bound + span.drafts >= self.limit for span in plan.spans):
            slots = torch.tensor([span.slot for span in plan.spans], device=self.state.device)
            room = self.limit - 1 - self.state.length[slots]
            lengths = torch.minimum(lengths, room.clamp_min(0))
        return Proposal(proposal.tokens[:, :width], lengths, known)

    def _allowed(self, plan: Plan) -> Tensor:
        key = tuple(span.drafts for span in plan.spans)
        if key != self._allowed_key:
            self._allowed_key = key
            self._allowed_value = torch.tensor(key, device=self.state.device)
        return self._allowed_value

    def _join(self, plan: Plan, parts: Sequence[tuple[Sequence[int], Proposal]]) -> Proposal:
        """Put the parts' rows at their spans' places, zero length elsewhere."""
        spans, width, device = len(plan.spans), plan.num_drafts, self.state.device
        tokens = torch.zeros(spans, width, dtype=torch.int64, device=device)
        lengths = torch.zeros(spans, dtype=torch.int64, device=device)
        known: list[int | None] = [None] * spans
        for members, part in parts:
            index = torch.tensor(members, device=device)
            columns = min(width, part.tokens.shape[1])
            tokens[index, :columns] = part.tokens[:, :columns]
            lengths[index] = part.lengths
            for place, i in enumerate(members):
                known[i] = part.known[place] if part.known is not None else None
        return Proposal(tokens, lengths, tuple(known))

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Show the forward to every proposer, whatever each request drafts with."""
        for proposer in self.proposers.values():
            proposer.observe(batch, hidden)
