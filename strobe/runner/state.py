"""What the device knows of each running request: the truth that the host learns later."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strobe.attention.base import Batch
from strobe.runner.batch import Layout
from strobe.step import TAIL, Plan
from strobe.transfer import upload


class DecodeState:
    """One row per slot: length, newest token and page table. One more slot, the spare one, belongs
    to no request: padding is its own.

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
        limit: int,
        spare_page: int = 0,
        kernels: bool = False,
    ):
        """reach: one more than the highest position a row can take. limit: the context's end;
        drafts beyond it do not count. spare_page: where rows of the spare slot go, whose values
        mean nothing. kernels: one of triton's kernels in place of several small operations."""
        self.kernels, self.limit = kernels, limit
        self.device, self.page_size, self.spare = device, page_size, num_slots
        columns = -(-reach // page_size)
        self.reach = columns * page_size
        self.cursor = torch.zeros(num_slots + 1, 2, dtype=torch.int64, device=device)
        unmapped = torch.arange(0, -columns, -1, dtype=torch.int64, device=device) * page_size
        self.table = unmapped.repeat(num_slots + 1, 1)
        self.table[-1] += spare_page * page_size

    def apply(self, plan: Plan) -> None:
        """Take over the plan's admissions and page-table entries."""
        if plan.admitted:
            slots = upload([one.slot for one in plan.admitted], self.device)
            lengths = upload([one.length for one in plan.admitted], self.device)
            self.cursor[:, 0].index_copy_(0, slots, lengths)
        if plan.pages:
            columns, size = self.table.shape[1], self.page_size
            cells = [
                (write.slot * columns + column, (page - column) * size)
                for write in plan.pages
                for column, page in zip(itertools.count(write.first), write.pages, strict=False)
            ]
            places, entries = upload(cells, self.device).unbind(1)
            self.table.view(-1).index_copy_(0, places, entries)

    def place(self, layout: Layout, drafts: Tensor | None, bounds: Sequence[int] = ()) -> Batch:
        """The batch of a layout as its spans stand now. drafts [S, K]: those made on the device."""
        if self.kernels and layout.padded:
            from strobe.kernels.steps import place

            found = place(self.cursor, self.table, layout, drafts, self.limit, self.page_size)
        else:
            found = self._place(layout.arrays, drafts)
        ids, positions, kv_slots, starts, draft_lengths = found
        return Batch(
            ids=ids,
            positions=positions,
            kv_slots=kv_slots,
            slots=layout.slots,
            starts=starts,
            sizes=layout.sizes,
            row_starts=layout.row_starts,
            longest=layout.shape.longest,
            draft_lengths=draft_lengths,
            tables=self.table,
            page_size=self.page_size,
            row_counts=() if layout.padded else layout.row_counts,
            bounds=bounds,
        )

    def _place(self, layout: Layout, drafts: Tensor | None) -> list[Tensor]:
        cursor, table = self._array(self.cursor), self._array(self.table)
        where, slot_of_row = self._where, layout.slot_of_row
        lengths, newest = cursor[:, 0], cursor[:, 1]
        starts = lengths[layout.slots]
        positions = lengths[slot_of_row] + layout.offset
        kv_slots = table[slot_of_row, positions // self.page_size] + positions
        ids = where(layout.tokens == TAIL, newest[slot_of_row], layout.tokens)
        if drafts is not None and drafts.shape[1]:
            made = self._array(drafts)[layout.span_of_row, layout.draft_of_row]
            ids = where(layout.tokens < TAIL, made, ids)
        room = self.limit - 1 - starts
        room = where(room > 0, room, 0)
        found = ids, positions, kv_slots, starts, where(layout.drafts < room, layout.drafts, room)
        return [self._tensor(array) for array in found]

    def accept(
        self, layout: Layout, batch: Batch, tokens: Tensor, simulated: float | None = None
    ) -> Tensor:
        """tokens [S, W], the target's at every row -> accepted [S]: drafts are kept while they
        equal the target's own token at their row, and lengths and newest tokens move on by what
        was kept. Each token is sampled with its position's own noise, so that this is exact
        rejection sampling for a draft that is a fixed token (Leviathan et al., arXiv 2211.17192,
        with q one-hot). simulated: instead, so many tokens a step on average, for speed alone.
        """
        if self.kernels and layout.padded:
            from strobe.kernels.steps import accept

            return accept(tokens, batch, layout, self.cursor, simulated)
        parts, cursor, sampled = layout.arrays, self._array(self.cursor), self._array(tokens)
        starts, lengths = self._array(batch.starts), self._array(batch.draft_lengths)
        accepted = lengths * 0
        if width := layout.shape.drafts:
            steps, drafts = self._range(width), self._array(batch.ids)[parts.draft_rows]
            matched = (drafts == sampled[:, :width]) & (steps < lengths[:, None])
            accepted = (matched.cumsum(1) == steps + 1).sum(1)
        if simulated is not None:
            more = (starts * 0.6180339887498949) % 1 < simulated - 1 - int(simulated - 1)
            kept = more + int(simulated - 1)
            accepted = self._where(kept < lengths, kept, lengths)
        cursor[parts.slots, 0] = starts + parts.certain + accepted
        cursor[parts.slots, 1] = sampled[self._range(len(accepted)), accepted]
        return self._tensor(accepted)

    # One text for both: NumPy on a CPU, whose small operations cost a third of torch's, else torch.

    def _array(self, tensor: Tensor) -> Any:
        return tensor.numpy() if self.device.type == "cpu" else tensor

    def _tensor(self, array: Any) -> Tensor:
        return array if isinstance(array, Tensor) else torch.from_numpy(array)

    def _range(self, size: int) -> Any:
        return (
            np.arange(size) if self.device.type == "cpu" else torch.arange(size, device=self.device)
        )

    @property
    def _where(self) -> Any:
        return np.where if self.device.type == "cpu" else torch.where
