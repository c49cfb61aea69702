"""A step's operations on a CPU: bookkeeping in NumPy. Right after a forward has swept the caches,
each small operation takes 20 to 50 us, and torch's take longest. Legend as in `torch_step_ops.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.runner.layout import Layout
from strobe.runner.slot_tables import SlotTables
from strobe.runner.step_ops.torch_step_ops import SimulatedAcceptance, StepOps, simulated_matches


class NumpyStepOps(StepOps):
    """For layouts without padding; padded ones are left to torch, as graphs would capture them."""

    def place(self, tables: SlotTables, layout: Layout, drafts: Tensor | None) -> Sequence[Tensor]:
        if layout.padded:
            return super().place(tables, layout, drafts)
        host = layout.on_host
        cursor, page_tables = tables.on_host
        current = cursor[host.slots]
        starts = current[:, 0]
        positions = starts.take(host.span_of_row)
        positions += host.offset
        columns = positions // tables.page_size
        kv_slots = [table[host.slot_of_row, columns] + positions for table in page_tables]
        device_tokens = () if drafts is None else (drafts.numpy().ravel(),)
        lengths = host.drafts
        if layout.shape.max_drafts:
            lengths = np.minimum(lengths, np.maximum(tables.limit - 1 - starts, 0))
        ids = np.concatenate((current[:, 1], host.tokens, *device_tokens))
        ids = ids.take(host.token_source)
        np.maximum(ids, 0, out=ids)  # NO_TOKEN, of rows with NaN
        return [torch.from_numpy(part) for part in (ids, positions, starts, lengths, *kv_slots)]

    def accept(
        self,
        tokens: Tensor,
        batch: Batch,
        layout: Layout,
        tables: SlotTables,
        *,
        simulated: SimulatedAcceptance | None,
    ) -> Tensor:
        if layout.padded:
            return super().accept(tokens, batch, layout, tables, simulated=simulated)
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
                num_matched = simulated_matches(layout, batch, simulated).numpy()
            accepted = np.minimum(num_matched, accepted)
        new_cursor = np.empty((len(starts), 2), dtype=np.int64)
        np.add(starts + host.context_rows, accepted, new_cursor[:, 0])
        new_cursor[:, 1] = sampled[np.arange(len(starts)), accepted]
        tables.on_host.cursor[host.slots] = new_cursor
        return torch.from_numpy(accepted)
