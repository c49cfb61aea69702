"""The device's record of each running request; the host learns it one step later."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.config import Limits
from strobe.host.transfer import upload
from strobe.runner.layout import Int64Array, Layout
from strobe.step import TAIL, Plan

SimulatedAcceptance: TypeAlias = float | Callable[[Layout, Batch], Tensor]
"""What to keep of drafts whatever the target says, for measurements of speed: so many tokens a step
on average, or [S] drafts of each span."""


class DecodeState:
    """Length, newest token and page table per slot. One extra slot, the spare one, is for padding.

    cursor [N + 1, 2]: number of positions with K/V, and the newest token, which has none yet. table
    [N + 1, columns]: added to a position in column position // page_size to get its slot in the KV
    stores; columns without a page point to page 0, which no request reads.
    """

    def __init__(
        self, limits: Limits, device: torch.device, *, spare_page: int = 0, kernels: bool = False
    ):
        """limits: drafts at or after max_model_len are not accepted. spare_page: page for the spare
        slot's rows. kernels: use one triton kernel in place of several small operations."""
        self.device = device
        self.kernels = kernels
        self.limit = limits.max_model_len
        num_slots = limits.max_num_seqs
        page_size = limits.page_size
        self.page_size = page_size
        self.spare_slot = num_slots
        columns = -(-limits.num_positions // page_size)
        self.max_positions = columns * page_size
        self.cursor = torch.zeros(num_slots + 1, 2, dtype=torch.int64, device=device)
        unmapped = torch.arange(0, -columns, -1, dtype=torch.int64, device=device) * page_size
        self.table = unmapped.repeat(num_slots + 1, 1)
        self.table[-1] += spare_page * page_size
        self._on_cpu = device.type == "cpu"
        self._host_cursor = _shared_array(self.cursor)
        self._host_table = _shared_array(self.table)

    def apply(self, plan: Plan) -> None:
        """Apply the plan's admissions and page-table entries."""
        if plan.admitted:
            slots = upload([admission.slot for admission in plan.admitted], self.device)
            ends = upload([(a.length, a.tokens[a.length]) for a in plan.admitted], self.device)
            self.cursor.index_copy_(0, slots, ends)
        if plan.pages:
            columns = self.table.shape[1]
            size = self.page_size
            cells = [
                (write.slot * columns + column, (page - column) * size)
                for write in plan.pages
                for column, page in zip(itertools.count(write.first), write.pages, strict=False)
            ]
            places, entries = upload(cells, self.device).unbind(1)
            self.table.view(-1).index_copy_(0, places, entries)

    def place(self, layout: Layout, drafts: Tensor | None) -> Sequence[Tensor]:
        """Compute the current ids, positions and K/V slots [T] of the rows, and starts and draft
        lengths [S] of the spans. drafts [S, K]: the device's drafts."""
        if self._in_numpy(layout):
            return self._place_in_numpy(layout, drafts)
        if self.kernels and layout.padded:
            from strobe.kernels.step_bookkeeping import place

            return place(
                self.cursor,
                self.table,
                layout,
                drafts,
                limit=self.limit,
                page_size=self.page_size,
            )
        return self._place(layout, drafts)

    def make_batch(
        self, layout: Layout, placed: Sequence[Tensor], bounds: Sequence[int] = ()
    ) -> Batch:
        """Make a layout's batch. placed: its first five fields, as `place` returns them."""
        ids, positions, kv_slots, starts, draft_lengths = placed
        return Batch(
            ids=ids,
            positions=positions,
            kv_slots=kv_slots,
            starts=starts,
            draft_lengths=draft_lengths,
            slots=layout.slots,
            sizes=layout.sizes,
            row_starts=layout.row_starts,
            longest=layout.shape.max_rows,
            tables=self.table,
            page_size=self.page_size,
            limit=self.limit,
            row_counts=() if layout.padded else layout.row_counts,
            bounds=bounds,
        )

    def _place(self, layout: Layout, drafts: Tensor | None) -> list[Tensor]:
        slot_of_row = layout.slot_of_row
        lengths, newest = self.cursor.unbind(1)
        starts = lengths[layout.slots]
        positions = lengths[slot_of_row] + layout.offset
        kv_slots = self.table[slot_of_row, positions // self.page_size] + positions
        ids = torch.where(layout.tokens == TAIL, newest[slot_of_row], layout.tokens)
        if drafts is not None and drafts.shape[1]:
            device_tokens = drafts[layout.span_of_row, layout.draft_of_row]
            ids = torch.where(layout.tokens < TAIL, device_tokens, ids)
        ids = ids.clamp_(min=0)  # NO_TOKEN, of rows with NaN
        max_drafts = (self.limit - 1 - starts).clamp_(min=0)
        return [ids, positions, kv_slots, starts, torch.minimum(layout.drafts, max_drafts)]

    def _in_numpy(self, layout: Layout) -> bool:
        """Whether NumPy does the work of `place` and `accept`: on a CPU, right after a forward has
        swept the caches, each small operation takes 20 to 50 us, and torch's take longest."""
        return self._on_cpu and not layout.padded

    def _place_in_numpy(self, layout: Layout, drafts: Tensor | None) -> list[Tensor]:
        host = layout.on_host
        current = self._host_cursor[host.slots]
        starts = current[:, 0]
        positions = starts.take(host.span_of_row)
        positions += host.offset
        kv_slots = self._host_table[host.slot_of_row, positions // self.page_size]
        kv_slots += positions
        device_tokens = () if drafts is None else (drafts.numpy().ravel(),)
        lengths = host.drafts
        if layout.shape.max_drafts:
            lengths = np.minimum(lengths, np.maximum(self.limit - 1 - starts, 0))
        ids = np.concatenate((current[:, 1], host.tokens, *device_tokens))
        ids = ids.take(host.token_source)
        np.maximum(ids, 0, out=ids)  # NO_TOKEN, of rows with NaN
        return [torch.from_numpy(part) for part in (ids, positions, kv_slots, starts, lengths)]

    def accept(
        self, layout: Layout, batch: Batch, tokens: Tensor, simulated: SimulatedAcceptance | None
    ) -> Tensor:
        """Accept drafts while they equal the target's tokens [S, W] at their rows; return the
        number accepted [S] and advance lengths and newest tokens. Each token is sampled with its
        position's own noise, so this is exact rejection sampling for a draft that is a fixed token
        (Leviathan et al., arXiv 2211.17192, with q one-hot). simulated: accept these instead."""
        if self._in_numpy(layout):
            return self._accept_in_numpy(layout, batch, tokens, simulated)
        if self.kernels and layout.padded and not callable(simulated):
            from strobe.kernels.step_bookkeeping import accept

            return accept(tokens, batch, layout, self.cursor, simulated=simulated)
        matched = batch.ids[layout.draft_rows] == tokens[:, : layout.shape.max_drafts]
        num_matched = matched.cumprod(1).sum(1)
        if simulated is not None:
            num_matched = _simulated(layout, batch, simulated)
        accepted = torch.minimum(num_matched, batch.draft_lengths)
        newest = tokens.gather(1, accepted[:, None])[:, 0]
        ends = batch.starts + layout.context_rows + accepted
        self.cursor[layout.slots] = torch.stack([ends, newest], 1)
        return accepted

    def _accept_in_numpy(
        self, layout: Layout, batch: Batch, tokens: Tensor, simulated: SimulatedAcceptance | None
    ) -> Tensor:
        host = layout.on_host
        sampled = tokens.numpy()
        starts = batch.starts.numpy()
        accepted = batch.draft_lengths.numpy()
        if width := layout.shape.max_drafts:
            matched = np.zeros((len(starts), width + 1), dtype=np.bool_)
            drafts = batch.ids.numpy().take(layout.draft_rows.numpy())
            np.equal(drafts, sampled[:, :width], matched[:, :width])
            num_matched = matched.argmin(1)
            if simulated is not None:
                num_matched = _simulated(layout, batch, simulated).numpy()
            accepted = np.minimum(num_matched, accepted)
        new_cursor = np.empty((len(starts), 2), dtype=np.int64)
        np.add(starts + host.context_rows, accepted, new_cursor[:, 0])
        new_cursor[:, 1] = sampled[np.arange(len(starts)), accepted]
        self._host_cursor[host.slots] = new_cursor
        return torch.from_numpy(accepted)


def _shared_array(tensor: Tensor) -> Int64Array:
    """Return a CPU tensor as a NumPy array of the same memory; for other devices an empty one."""
    return tensor.numpy() if tensor.device.type == "cpu" else np.empty((0, 0), dtype=np.int64)


def _simulated(layout: Layout, batch: Batch, simulated: SimulatedAcceptance) -> Tensor:
    """Return the number of drafts to accept per span. An average is reached by a low-discrepancy
    sequence."""
    if callable(simulated):
        return simulated(layout, batch)
    base = int(simulated - 1)
    return ((batch.starts * 0.6180339887498949) % 1 < simulated - 1 - base) + base
