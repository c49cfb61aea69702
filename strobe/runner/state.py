"""What the device knows of each running request: the truth that the host learns later."""

from __future__ import annotations

import torch
from torch import Tensor

from strobe.request import Request
from strobe.runner.batch import Batch, Layout
from strobe.sampling.noise import stream_key
from strobe.sampling.sampler import SamplingRows
from strobe.step import HostVerdict, Plan, Verdict


class DecodeState:
    """One row per slot: tail token, length, page table, and sampling state.

    length [N]: positions with K/V. tail [N]: the newest token, which has none. table [N, C + 1]:
    page ids; the last column always names the reserved page, for rows beyond the context.
    """

    def __init__(self, num_slots: int, max_pages: int, vocab_size: int, device: torch.device):
        self.device = device
        self.vocab_size = vocab_size
        self.length = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.tail = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.table = torch.zeros(num_slots, max_pages + 1, dtype=torch.int64, device=device)
        self.key = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.heat = torch.zeros(num_slots, 3, dtype=torch.float32, device=device)
        self.earliest_stop = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.stop_ids: Tensor | None = None

    def apply(self, plan: Plan) -> None:
        """Take over the plan's admissions and page-table entries."""
        for slot, request, length in plan.admitted:
            self._admit(slot, request, length)
        for slot, first, pages in plan.pages:
            if len(pages) == 1:
                self.table[slot, first] = pages[0]
            else:
                entries = torch.tensor(pages, device=self.device)
                self.table[slot, first : first + len(pages)] = entries

    def _admit(self, slot: int, request: Request, length: int) -> None:
        sampling = request.sampling
        self.length[slot] = length
        if sampling.temperature > 0:
            self.key[slot] = stream_key(request.seed, request.sibling)
            self.top_k[slot] = max(sampling.top_k, 0)
        values = (sampling.temperature, sampling.top_p, sampling.min_p)
        self.heat[slot] = torch.tensor(values, device=self.device)
        if sampling.min_tokens:
            self.earliest_stop[slot] = request.num_prompt + sampling.min_tokens
            if self.stop_ids is None:
                shape = (self.length.shape[0], self.vocab_size)
                self.stop_ids = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.stop_ids[slot] = False
            ids = torch.tensor(sorted(request.stop_ids), dtype=torch.int64, device=self.device)
            self.stop_ids[slot, ids] = True

    def sampling_rows(self, plan: Plan, batch: Batch) -> tuple[SamplingRows | None, Tensor | None]:
        """How the batch's R wanted rows pick, and the tokens [R, V] they may not pick, if any."""
        params = [span.request.sampling for span in plan.spans]
        sampled = any(p.temperature > 0 for p in params)
        early = any(
            span.start + 1 < span.request.num_prompt + p.min_tokens
            for span, p in zip(plan.spans, params, strict=True)
            if p.min_tokens
        )
        if not sampled and not early:
            return None, None
        slots = batch.layout.wanted_slots
        position = batch.positions[batch.layout.wanted] + 1
        banned = None
        if early and self.stop_ids is not None:
            banned = self.stop_ids[slots] & (position < self.earliest_stop[slots])[:, None]
        if not sampled:
            return None, banned
        heat = self.heat[slots]
        filtered = any(
            p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params
        )
        rows = SamplingRows(
            temperature=heat[:, 0],
            top_p=heat[:, 1],
            min_p=heat[:, 2],
            top_k=self.top_k[slots],
            key=self.key[slots],
            position=position,
            filtered=filtered,
        )
        return rows, banned

    def advance(self, layout: Layout, batch: Batch, verdict: Verdict) -> None:
        """Move lengths and tail tokens on by what the verdict kept."""
        length = (batch.start + layout.counts).add_(verdict.accepted)
        self.length.index_copy_(0, layout.slots, length)
        tail = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        self.tail.index_copy_(0, layout.slots, tail)


def to_host(verdict: Verdict, drafted: Tensor) -> HostVerdict:
    """A verdict and the lengths drafted [S] as lists: the step's one transfer."""
    packed = torch.cat([drafted[:, None], verdict.accepted[:, None], verdict.tokens], 1)
    rows: list[list[int]] = packed.tolist()
    return HostVerdict([r[2 : 3 + r[1]] for r in rows], [r[0] for r in rows], [r[1] for r in rows])
