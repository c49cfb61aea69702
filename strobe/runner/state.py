"""What the device knows of each running request: the truth that the host learns later."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from strobe.runner.batch import Batch, Kept, Layout, Places
from strobe.runner.upload import upload
from strobe.step import Plan, Proposal, Verdict


class DecodeState:
    """One row per slot: tail token, length and page table. One more slot, the spare one, belongs to
    no request: rows that only fill up a shape are its own.

    cursor [N + 1, 2]: positions with K/V, and the newest token, which has none. table [N + 1,
    columns]: what to add to a position in column position // page_size to get its slot in the KV
    stores; columns that were never given a page lead into page 0, which is never read.
    """

    def __init__(
        self,
        num_slots: int,
        reach: int,
        page_size: int,
        device: torch.device,
        *,
        spare_page: int = 0,
        kernels: bool = False,
    ):
        """reach: one more than the highest position a row can take. spare_page: where rows of the
        spare slot go, whose values mean nothing. kernels: whether triton's do what several small
        operations do else."""
        self.kernels = kernels
        self.device, self.page_size, self.spare = device, page_size, num_slots
        columns = -(-reach // page_size)
        self.cursor = torch.zeros(num_slots + 1, 2, dtype=torch.int64, device=device)
        unmapped = torch.arange(0, -columns, -1, dtype=torch.int64, device=device) * page_size
        self.table = unmapped.repeat(num_slots + 1, 1)
        self.table[-1] += spare_page * page_size
        self.kept = Kept()
        self._places: dict[Layout, Places] = {}

    def apply(self, plan: Plan) -> None:
        """Take over the plan's admissions and page-table entries."""
        if plan.admitted:
            self._places.clear()
            slots = upload([slot for slot, _, _ in plan.admitted], self.device)
            lengths = upload([length for _, _, length in plan.admitted], self.device)
            self.cursor[:, 0].index_copy_(0, slots, lengths)
        if plan.pages:
            self._places.clear()
            columns, size = self.table.shape[1], self.page_size
            cells = [
                (write.slot * columns + column, (page - column) * size)
                for write in plan.pages
                for column, page in zip(itertools.count(write.first), write.pages, strict=False)
            ]
            places, entries = upload(cells, self.device).unbind(1)
            self.table.view(-1).index_copy_(0, places, entries)

    def place(
        self, layout: Layout, proposal: Proposal, limit: int
    ) -> tuple[Places, Tensor, Proposal]:
        """Where the rows stand, their token ids [T], and the proposal with how many of its drafts
        count: those before position `limit`."""
        if not (self.kernels and layout.padded):
            places = self.locate(layout)
            ids = layout.ids(places.tails, proposal.tokens)
            if layout.width:
                room = (limit - 1 - places.start[:, 0]).clamp_min_(0)
                proposal = proposal._replace(lengths=torch.minimum(layout.drafts, room))
            return places, ids, proposal
        from strobe.kernels.steps import place

        rows = layout.span_of_row, layout.offset, layout.tokens
        start, lengths, positions, slots, ids = place(
            self.cursor,
            self.table,
            layout.slots,
            rows,
            proposal.tokens,
            layout.drafts,
            limit,
            self.page_size,
        )
        start = start[:, None]
        return (
            Places(start, start, positions, slots),
            ids,
            proposal._replace(lengths=lengths if layout.width else None),
        )

    def locate(self, layout: Layout) -> Places:
        """Where a layout's rows stand now; the same for a drafter's and a target's forward."""
        places = self._places.get(layout)
        if places is None:
            cursor = self.cursor.index_select(0, layout.slots)
            start, tails = cursor[:, :1], cursor[:, 1:]
            positions = layout.positions(start)
            entry = positions.div(self.page_size, rounding_mode="floor").add_(layout.table_row)
            slots = self.table.view(-1).index_select(0, entry).add_(positions)
            places = Places(start, tails, positions, slots)
            if not layout.padded:
                self._places[layout] = places
        return places

    def advance(self, batch: Batch, verdict: Verdict) -> None:
        """Move lengths and tail tokens on by what the verdict kept."""
        accepted = verdict.accepted[:, None]
        length = (batch.places.start + batch.layout.counts).add_(accepted)
        cursor = torch.cat([length, verdict.tokens.gather(1, accepted)], 1)
        self.cursor.index_copy_(0, batch.layout.slots, cursor)
        self._places.clear()
