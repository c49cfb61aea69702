"""The device's record of each running request; the host learns it one step later."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.config import Limits
from strobe.host.transfer import upload
from strobe.runner.layout import Layout
from strobe.runner.slot_tables import SlotTables
from strobe.runner.step_ops.torch_step_ops import SimulatedAcceptance, StepOps
from strobe.step import Plan


class DecodeState:
    """Length, newest token and page tables per slot. One extra slot, the spare one, is for padding.

    cursor [N + 1, 2]: number of positions with K/V, and the newest token, which has none yet.
    tables [groups, N + 1, columns]: by page group, added to a position in column position //
    page_size to get its slot in the KV stores; columns without a page point to page 0, which no
    request reads.
    """

    def __init__(
        self,
        limits: Limits,
        device: torch.device,
        ops: StepOps,
        *,
        spare_pages: Sequence[int] = (0,),
    ):
        """limits: drafts at or after max_model_len are not accepted. ops: the operations of
        `place` and `accept`. spare_pages: of each page group, the page for the spare slot's
        rows."""
        self.device = device
        self.ops = ops
        self.limit = limits.max_model_len
        num_slots = limits.max_num_seqs
        page_size = limits.page_size
        self.page_size = page_size
        self.spare_slot = num_slots
        columns = -(-limits.num_positions // page_size)
        self.max_positions = columns * page_size
        self.cursor = torch.zeros(num_slots + 1, 2, dtype=torch.int64, device=device)
        unmapped = torch.arange(0, -columns, -1, dtype=torch.int64, device=device) * page_size
        self.tables = unmapped.repeat(len(spare_pages), num_slots + 1, 1)
        self._page_tables = self.tables.unbind()
        for table, page in zip(self._page_tables, spare_pages, strict=True):
            table[-1] += page * page_size
        self._tables = SlotTables(
            cursor=self.cursor, tables=self.tables, page_size=page_size, limit=self.limit
        )

    def apply(self, plan: Plan) -> None:
        """Apply the plan's admissions and page-table entries."""
        if plan.admitted:
            slots = upload([admission.slot for admission in plan.admitted], self.device)
            ends = upload([(a.length, a.tokens[a.length]) for a in plan.admitted], self.device)
            self.cursor.index_copy_(0, slots, ends)
        if plan.pages:
            _, num_slots, columns = self.tables.shape
            size = self.page_size
            cells = [
                ((write.group * num_slots + write.slot) * columns + column, (page - column) * size)
                for write in plan.pages
                for column, page in zip(itertools.count(write.first), write.pages, strict=False)
            ]
            places, entries = upload(cells, self.device).unbind(1)
            self.tables.view(-1).index_copy_(0, places, entries)

    def place(self, layout: Layout, drafts: Tensor | None) -> Sequence[Tensor]:
        """Compute the current ids and positions [T] of the rows, starts and draft lengths [S] of
        the spans, and the rows' K/V slots [T] in each page group. drafts [S, K]: the device's
        drafts."""
        return self.ops.place(self._tables, layout, drafts)

    def make_batch(
        self, layout: Layout, placed: Sequence[Tensor], bounds: Sequence[int] = ()
    ) -> Batch:
        """Make a layout's batch. placed: as `place` returns them."""
        ids, positions, starts, draft_lengths, *kv_slots = placed
        return Batch(
            ids=ids,
            positions=positions,
            kv_slots=kv_slots,
            starts=starts,
            draft_lengths=draft_lengths,
            slots=layout.slots,
            sizes=layout.sizes,
            row_starts=layout.row_starts,
            offsets=layout.offset,
            longest=layout.shape.max_rows,
            tables=self._page_tables,
            page_size=self.page_size,
            limit=self.limit,
            row_counts=() if layout.padded else layout.row_counts,
            bounds=bounds,
        )

    def accept(
        self, layout: Layout, batch: Batch, tokens: Tensor, simulated: SimulatedAcceptance | None
    ) -> Tensor:
        """Accept drafts while they equal the target's tokens [S, W] at their rows; return the
        number accepted [S] and advance lengths and newest tokens. Each token is sampled with its
        position's own noise, so this is exact rejection sampling for a draft that is a fixed token
        (Leviathan et al., arXiv 2211.17192, with q one-hot). simulated: accept these instead."""
        return self.ops.accept(tokens, batch, layout, self._tables, simulated=simulated)
