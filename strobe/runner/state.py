"""What the device knows of each running request: the truth that the host learns later."""

from __future__ import annotations

import torch

from strobe.runner.batch import Batch, Kept, Layout, Places
from strobe.step import Plan, Verdict


class DecodeState:
    """One row per slot: tail token, length and page table.

    cursor [N, 2]: positions with K/V, and the newest token, which has none. table [N, columns]:
    what to add to a position in column position // page_size to get its slot in the KV stores;
    columns that were never given a page lead into page 0, which is never read.
    """

    def __init__(self, num_slots: int, reach: int, page_size: int, device: torch.device):
        """reach: one more than the highest position a row can take."""
        self.device, self.page_size = device, page_size
        columns = -(-reach // page_size)
        self.cursor = torch.zeros(num_slots, 2, dtype=torch.int64, device=device)
        unmapped = torch.arange(0, -columns, -1, dtype=torch.int64, device=device) * page_size
        self.table = unmapped.repeat(num_slots, 1)
        self.kept = Kept()
        self._places: dict[Layout, Places] = {}

    def apply(self, plan: Plan) -> None:
        """Take over the plan's admissions and page-table entries."""
        if plan.admitted or plan.pages:
            self._places.clear()
        for slot, _, length in plan.admitted:
            self.cursor[slot, 0] = length
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

    def advance(self, batch: Batch, verdict: Verdict) -> None:
        """Move lengths and tail tokens on by what the verdict kept."""
        accepted = verdict.accepted[:, None]
        length = (batch.places.start + batch.layout.counts).add_(accepted)
        cursor = torch.cat([length, verdict.tokens.gather(1, accepted)], 1)
        self.cursor.index_copy_(0, batch.layout.slots, cursor)
        self._places.clear()
