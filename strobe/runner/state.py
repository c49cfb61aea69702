"""What the device knows of each running request: the truth that the host learns later."""

from __future__ import annotations

import torch
from torch import Tensor

from strobe.request import Request
from strobe.runner.batch import Batch, Kept, Layout, Places
from strobe.sampling.noise import stream_key
from strobe.sampling.sampler import SamplingRows
from strobe.step import HostVerdict, Plan, Verdict


class DecodeState:
    """One row per slot: tail token, length, page table, and sampling state.

    cursor [N, 2]: positions with K/V, and the newest token, which has none. table [N, columns]:
    what to add to a position in column position // page_size to get its slot in the KV stores;
    columns that were never given a page lead into page 0, which is never read.
    """

    def __init__(
        self, num_slots: int, reach: int, page_size: int, vocab_size: int, device: torch.device
    ):
        """reach: one more than the highest position a row can take."""
        self.device, self.page_size, self.vocab_size = device, page_size, vocab_size
        columns = -(-reach // page_size)
        self.cursor = torch.zeros(num_slots, 2, dtype=torch.int64, device=device)
        unmapped = torch.arange(0, -columns, -1, dtype=torch.int64, device=device) * page_size
        self.table = unmapped.repeat(num_slots, 1)
        self.key = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.heat = torch.zeros(num_slots, 3, dtype=torch.float32, device=device)
        self.earliest_stop = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.stop_ids: Tensor | None = None
        self.kept = Kept()
        self._places: dict[Layout, Places] = {}

    def apply(self, plan: Plan) -> None:
        """Take over the plan's admissions and page-table entries."""
        if plan.admitted or plan.pages:
            self._places.clear()
        for slot, request, length in plan.admitted:
            self._admit(slot, request, length)
        for slot, first, pages in plan.pages:
            entries = [(page - first - i) * self.page_size for i, page in enumerate(pages)]
            if len(entries) == 1:
                self.table[slot, first] = entries[0]
            else:
                values = torch.tensor(entries, device=self.device)
                self.table[slot, first : first + len(entries)] = values

    def locate(self, layout: Layout) -> Places:
        """Where a layout's rows stand now; the same for a drafter's and a target's forward."""
        places = self._places.get(layout)
        if places is None:
            cursor = self.cursor.index_select(0, layout.slots)
            start, tails = cursor[:, :1], cursor[:, 1:]
            positions = layout.positions(start)
            entry = positions.div(self.page_size, rounding_mode="floor").add_(layout.table_row)
            slots = self.table.view(-1).index_select(0, entry).add_(positions)
            places = self._places[layout] = Places(start, tails, positions, slots)
        return places

    def _admit(self, slot: int, request: Request, length: int) -> None:
        sampling = request.sampling
        self.cursor[slot, 0] = length
        if sampling.temperature > 0:
            self.key[slot] = stream_key(request.seed, request.sibling)
            self.top_k[slot] = max(sampling.top_k, 0)
        values = (sampling.temperature, sampling.top_p, sampling.min_p)
        self.heat[slot] = torch.tensor(values, device=self.device)
        if sampling.min_tokens or self.stop_ids is not None:
            self.earliest_stop[slot] = request.num_prompt + sampling.min_tokens
            if self.stop_ids is None:
                shape = (self.cursor.shape[0], self.vocab_size)
                self.stop_ids = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.stop_ids[slot] = False
            ids = torch.tensor(sorted(request.stop_ids), dtype=torch.int64, device=self.device)
            self.stop_ids[slot, ids] = True

    def sampling_rows(self, plan: Plan, batch: Batch) -> tuple[SamplingRows | None, Tensor | None]:
        """How the batch's R wanted rows pick, and the tokens [R, V] they may not pick, if any."""
        if all(span.request.plainly_greedy for span in plan.spans):
            return None, None
        slots = batch.wanted.slots
        position = batch.wanted.of(batch.places.positions) + 1
        banned = None
        if self.stop_ids is not None and any(
            span.start < span.request.num_prompt + span.request.sampling.min_tokens - 1
            for span in plan.spans
        ):
            banned = self.stop_ids[slots] & (position < self.earliest_stop[slots])[:, None]
        params = [span.request.sampling for span in plan.spans]
        if all(p.temperature == 0 for p in params):
            return None, banned
        heat = self.heat[slots]
        rows = SamplingRows(
            temperature=heat[:, 0],
            top_p=heat[:, 1],
            min_p=heat[:, 2],
            top_k=self.top_k[slots],
            key=self.key[slots],
            position=position,
            filtered=any(p.filters for p in params),
            mixed=any(p.temperature == 0 for p in params),
        )
        return rows, banned

    def advance(self, batch: Batch, verdict: Verdict) -> None:
        """Move lengths and tail tokens on by what the verdict kept."""
        accepted = verdict.accepted[:, None]
        length = (batch.places.start + batch.layout.counts).add_(accepted)
        cursor = torch.cat([length, verdict.tokens.gather(1, accepted)], 1)
        self.cursor.index_copy_(0, batch.layout.slots, cursor)
        self._places.clear()


def to_host(verdict: Verdict) -> HostVerdict:
    """A verdict as lists: the only transfer of a step."""
    accepted: list[int] = verdict.accepted.tolist()
    tokens: list[list[int]] = verdict.tokens.tolist()
    return HostVerdict([t[: a + 1] for t, a in zip(tokens, accepted, strict=True)], accepted)
