"""Who proposes: the protocol, the proposer that never does, and several held at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from strobe.runner.batch import Batch
from strobe.runner.upload import upload
from strobe.step import Drafts, Plan, Proposal


class Proposer(Protocol):
    """Drafts tokens for spans. Only tokens leave it; hidden states stay inside.

    num_drafts: the most it proposes. capture: layers of the target it reads (counts of layers
    done). needs_host_tokens: it reads `request.tokens`, so no result may be on its way.
    """

    num_drafts: int
    capture: tuple[int, ...]
    needs_host_tokens: bool

    def propose(self, plan: Plan, spans: Sequence[int]) -> Drafts:
        """Drafts for `spans` of the plan, as many as each one asks for unless `known` says; rows
        beyond theirs mean nothing."""
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
        self.nothing = torch.zeros(1, 0, dtype=torch.int64, device=device)

    def propose(self, plan: Plan, spans: Sequence[int]) -> Drafts:
        return Drafts(self.nothing.expand(len(spans), 0))

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        pass


class ProposerSet:
    """Several proposers by method name; each drafts for the requests that chose it."""

    def __init__(self, proposers: Mapping[str, Proposer], device: torch.device):
        self.proposers, self.device = proposers, device
        self.plain = NoProposer(device)
        self.capture = next((p.capture for p in proposers.values() if p.capture), ())

    def propose(self, plan: Plan) -> Proposal:
        """Drafts for all S spans: tokens [S, K], K the longest draft that was made."""
        parts = [
            (members, self.proposers[name].propose(plan, members))
            for name, members in plan.methods.items()
        ]
        if len(parts) == 1 and len(parts[0][0]) == len(plan.spans):
            drafts = parts[0][1]
        elif parts:
            drafts = self._join(plan, parts)
        else:
            drafts = self.plain.propose(plan, range(len(plan.spans)))
        counts = [span.drafts for span in plan.spans]
        if drafts.known is not None:
            counts = [min(pair) for pair in zip(counts, drafts.known, strict=True)]
        width = max(counts)
        tokens, probs = drafts.tokens, drafts.probs
        if tokens.shape[1] > width:
            tokens, probs = tokens[:, :width], probs if probs is None else probs[:, :width]
        return Proposal(tokens, known=drafts.known, probs=probs)

    def _join(self, plan: Plan, parts: Sequence[tuple[Sequence[int], Drafts]]) -> Drafts:
        """Put the parts' rows at their spans' places, zero elsewhere."""
        tokens = torch.zeros(
            len(plan.spans), plan.num_drafts, dtype=torch.int64, device=self.device
        )
        known, probs = [span.drafts for span in plan.spans], None
        for members, part in parts:
            columns = min(plan.num_drafts, part.tokens.shape[1])
            index = upload(members, self.device)
            tokens[index, :columns] = part.tokens[: len(members), :columns]
            if part.probs is not None:
                if probs is None:
                    probs = part.probs.new_zeros(*tokens.shape, part.probs.shape[2])
                probs[index, :columns] = part.probs[: len(members), :columns]
            if part.known is not None:
                for i, length in zip(members, part.known, strict=True):
                    known[i] = length
        return Drafts(tokens, tuple(known), probs)

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Show the forward to every proposer, whatever each request drafts with."""
        for proposer in self.proposers.values():
            proposer.observe(batch, hidden)
