"""What the device knows of each slot's rules on logits: bias, counts of tokens, end tokens.

Each table is made when the first request needs it. Legend: N slots, V vocabulary, S spans, K
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strobe.request import Request
from strobe.runner.batch import Batch
from strobe.runner.upload import upload
from strobe.sampling.rules import LogitEdits, Penalties, RowValues
from strobe.step import Plan, Verdict


class LogitState:
    """bias [N, V] float32; counts [N, V] int32, the answer's tokens so far, the tail included;
    prompt [N, V] bool; strength [N, 3] float32; ends [N, V] bool, tokens that end the answer;
    earliest [N] int64, the first position at which they may come."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device):
        self.device, self.shape = device, (num_slots, vocab_size)
        self.bias: Tensor | None = None
        self.counts: Tensor | None = None
        self.prompt = self.strength = self.earliest = torch.empty(0)
        self.ends: Tensor | None = None

    def admit(self, slot: int, request: Request) -> None:
        """Take over a request's rules; whatever the slot held before is gone."""
        sampling = request.sampling
        if request.biased:
            if self.bias is None:
                self.bias = torch.zeros(self.shape, device=self.device)
            allowed = sampling.allowed_token_ids
            self.bias[slot] = 0.0 if allowed is None else float("-inf")
            if allowed is not None:
                self.bias[slot, self._ids(allowed)] = 0.0
            bias = sampling.logit_bias or {}
            self.bias[slot, self._ids(list(bias))] += upload(
                list(bias.values()), self.device, torch.float32
            )
        if sampling.penalizes:
            self._admit_penalties(slot, request)
        if sampling.min_tokens:
            if self.ends is None:
                self.ends = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
                self.earliest = torch.zeros(self.shape[0], dtype=torch.int64, device=self.device)
            self.earliest[slot] = request.num_prompt + sampling.min_tokens
            self.ends[slot] = False
            self.ends[slot, self._ids(sorted(request.stop_ids))] = True

    def _admit_penalties(self, slot: int, request: Request) -> None:
        if self.counts is None:
            self.counts = torch.zeros(self.shape, dtype=torch.int32, device=self.device)
            self.prompt = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
            self.strength = torch.zeros(self.shape[0], 3, device=self.device)
        made = self._ids(request.output_ids)
        self.counts[slot] = torch.bincount(made, minlength=self.shape[1]).to(torch.int32)
        self.prompt[slot] = False
        self.prompt[slot, self._ids(request.tokens[: request.num_prompt])] = True
        s = request.sampling
        strength = (s.presence_penalty, s.frequency_penalty, s.repetition_penalty)
        self.strength[slot] = upload(strength, self.device, torch.float32)

    def edits(self, plan: Plan, batch: Batch, position: Tensor) -> LogitEdits | None:
        """What is done to the batch's R wanted rows, whose tokens go to `position` [R]; all but
        grammars, which the host knows. None where nothing is."""
        asked = [(i, span.request) for i, span in enumerate(plan.spans) if span.request.edited]
        if not asked:
            return None
        return LogitEdits(
            bias=self._bias(batch, [i for i, r in asked if r.biased]),
            penalties=self._penalties(batch, [i for i, r in asked if r.sampling.penalizes]),
            banned=self._banned(plan, batch, position),
        )

    def _bias(self, batch: Batch, spans: Sequence[int]) -> RowValues | None:
        if not spans:
            return None
        assert self.bias is not None
        rows, span, _ = batch.wanted.places(spans)
        return RowValues(rows, self.bias[batch.layout.slots[span]])

    def _penalties(self, batch: Batch, spans: Sequence[int]) -> Penalties | None:
        if not spans:
            return None
        assert self.counts is not None
        rows, span, rank = batch.wanted.places(spans)
        slots = batch.layout.slots[span]
        drafts = batch.proposal.tokens[span]
        counts, prompt, strength = self.counts[slots], self.prompt[slots], self.strength[slots]
        return Penalties(rows, counts, prompt, drafts, rank, strength)

    def _banned(self, plan: Plan, batch: Batch, position: Tensor) -> Tensor | None:
        """End tokens before min_tokens, [R, V]."""
        young = [
            0 < s.request.sampling.min_tokens > s.start + 1 - s.request.num_prompt
            for s in plan.spans
        ]
        if self.ends is None or not any(young):
            return None
        slots = batch.wanted.slots
        rows = batch.wanted.places([i for i, asked in enumerate(young) if asked])[0]
        asked = torch.zeros_like(slots, dtype=torch.bool).index_fill_(0, rows, True)
        early = asked & (position < self.earliest[slots])
        return self.ends[slots] & early[:, None]

    def advance(self, plan: Plan, batch: Batch, verdict: Verdict) -> None:
        """Count the tokens that the verdict kept."""
        spans = [i for i, s in enumerate(plan.spans) if s.rows and s.request.sampling.penalizes]
        if not spans:
            return
        assert self.counts is not None
        index = upload(spans, self.device)
        tokens = verdict.tokens[index]
        kept = torch.arange(tokens.shape[1], device=self.device) <= verdict.accepted[index][:, None]
        slots = batch.layout.slots[index]
        counts = self.counts[slots].scatter_add(1, tokens, kept.to(torch.int32))
        self.counts[slots] = counts

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return upload(ids, self.device)
