"""How each wanted row picks its token: rules on logits, noise and filters, all per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strobe.request import Request
from strobe.runner.batch import Batch
from strobe.runner.edits import LogitState
from strobe.sampling.grammar import Grammars
from strobe.sampling.noise import stream_key
from strobe.sampling.rules import LogitEdits, RowValues
from strobe.sampling.sampler import SamplingRows
from strobe.step import Plan, Proposal, Verdict


class Picking(NamedTuple):
    """For R wanted rows: draws, None where all are greedy; edits, None where no rule applies;
    scored: the rows [A] whose log probabilities are asked for, and how many of the best to name."""

    draws: SamplingRows | None = None
    edits: LogitEdits | None = None
    scored: tuple[Tensor, int] | None = None


PLAIN = Picking()


class PickingState:
    """One row per slot: the noise's key, top_k, and (temperature, top_p, min_p)."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, grammars: Grammars):
        self.device, self.grammars = device, grammars
        self.key = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.heat = torch.zeros(num_slots, 3, dtype=torch.float32, device=device)
        self.logits = LogitState(num_slots, vocab_size, device)

    def apply(self, plan: Plan) -> None:
        """Take over the plan's admissions."""
        for slot, request, _ in plan.admitted:
            sampling = request.sampling
            if sampling.temperature > 0:
                self.key[slot] = stream_key(request.seed, request.sibling)
                self.top_k[slot] = max(sampling.top_k, 0)
            values = (sampling.temperature, sampling.top_p, sampling.min_p)
            self.heat[slot] = torch.tensor(values, device=self.device)
            if request.edited:
                self.logits.admit(slot, request)

    def mend(self, plan: Plan, proposal: Proposal) -> Proposal:
        """The proposal with drafts that no grammar allows replaced by what the grammar forces."""
        tokens = proposal.tokens
        for i, span in enumerate(plan.spans):
            if span.drafts and span.request.structured is not None:
                drafts: list[int] = proposal.tokens[i, : span.drafts].tolist()
                mended = self.grammars.mend(span.request, drafts)
                if mended != drafts:
                    tokens = tokens.clone() if tokens is proposal.tokens else tokens
                    tokens[i, : span.drafts] = torch.tensor(mended, device=self.device)
        return proposal._replace(tokens=tokens)

    def of(self, plan: Plan, batch: Batch, proposal: Proposal) -> Picking:
        """How the batch's wanted rows pick."""
        requests = [span.request for span in plan.spans]
        if not any(r.special for r in requests):
            return PLAIN
        position = batch.wanted.of(batch.places.positions) + 1
        edits = self.logits.edits(plan, batch, proposal, position)
        if edits is not None:
            edits = edits._replace(grammar=self._grammar(plan, batch, proposal))
        return Picking(self._draws(requests, batch, position), edits, self._scored(requests, batch))

    def advance(self, plan: Plan, batch: Batch, verdict: Verdict) -> None:
        """Take in what the verdict kept."""
        self.logits.advance(plan, batch, verdict)

    def _draws(
        self, requests: Sequence[Request], batch: Batch, position: Tensor
    ) -> SamplingRows | None:
        params = [request.sampling for request in requests]
        if all(p.temperature == 0 for p in params):
            return None
        slots = batch.wanted.slots
        heat = self.heat[slots]
        return SamplingRows(
            temperature=heat[:, 0],
            top_p=heat[:, 1],
            min_p=heat[:, 2],
            top_k=self.top_k[slots],
            key=self.key[slots],
            position=position,
            filtered=any(p.filters for p in params),
            mixed=any(p.temperature == 0 for p in params),
        )

    def _scored(self, requests: Sequence[Request], batch: Batch) -> tuple[Tensor, int] | None:
        """The rows of requests that want log probabilities, and the most that any of them names."""
        tops = {i: r.sampling.logprobs for i, r in enumerate(requests)}
        asked = {i: top for i, top in tops.items() if top is not None and batch.wanted.rows[i]}
        if not asked:
            return None
        return batch.wanted.places(list(asked))[0], max(asked.values())

    def _grammar(self, plan: Plan, batch: Batch, proposal: Proposal) -> RowValues | None:
        """The masks of all rows that follow a grammar; the host reads their drafts for them."""
        found: list[np.ndarray] = []
        spans = [i for i, s in enumerate(plan.spans) if s.request.structured is not None and s.rows]
        for i in spans:
            span = plan.spans[i]
            drafts: list[int] = proposal.tokens[i, : span.drafts].tolist()
            found.append(self.grammars.masks(span.request, drafts))
        if not found:
            return None
        values = torch.from_numpy(np.concatenate(found)).to(self.device)
        return RowValues(batch.wanted.places(spans)[0], values)
