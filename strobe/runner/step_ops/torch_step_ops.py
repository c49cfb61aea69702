"""A step's operations in plain torch, the reference for NumPy and kernels.

Legend: N slots, S spans, T rows, K drafts per span, W rows of a span with logits, B knots of
evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.attention.recurrent_backend import cover
from strobe.kernels.reference_narrow import choose
from strobe.runner.layout import Layout, Shape
from strobe.runner.slot_tables import SlotTables
from strobe.sampling.sampling_ops import SamplingOps
from strobe.step import TAIL

SimulatedAcceptance: TypeAlias = float | Callable[[Layout, Batch], Tensor]
"""What to keep of drafts whatever the target says, for measurements of speed: so many tokens a step
on average, or [S] drafts of each span."""


class StepOps(SamplingOps):
    """Stateless. `SamplingOps` has the sampler's operations."""

    def place(self, tables: SlotTables, layout: Layout, drafts: Tensor | None) -> Sequence[Tensor]:
        """Compute the current ids and positions [T] of the rows, starts and draft lengths [S] of
        the spans, and the rows' K/V slots [T] in each page group. drafts [S, K]: the device's
        drafts."""
        slot_of_row = layout.slot_of_row
        lengths, newest = tables.cursor.unbind(1)
        starts = lengths[layout.slots]
        positions = lengths[slot_of_row] + layout.offset
        columns = positions // tables.page_size
        kv_slots = [table[slot_of_row, columns] + positions for table in tables.tables]
        ids = torch.where(layout.tokens == TAIL, newest[slot_of_row], layout.tokens)
        if drafts is not None and drafts.shape[1]:
            device_tokens = drafts[layout.span_of_row, layout.draft_of_row]
            ids = torch.where(layout.tokens < TAIL, device_tokens, ids)
        ids = ids.clamp_(min=0)  # NO_TOKEN, of rows with NaN
        max_drafts = (tables.limit - 1 - starts).clamp_(min=0)
        draft_lengths = torch.minimum(layout.drafts, max_drafts)
        return [ids, positions, starts, draft_lengths, *kv_slots]

    def accept(
        self,
        tokens: Tensor,
        batch: Batch,
        layout: Layout,
        tables: SlotTables,
        *,
        simulated: SimulatedAcceptance | None,
    ) -> Tensor:
        """Accept drafts while they equal the target's tokens [S, W] at their rows: the number
        accepted [S]. Advances the slots' lengths and newest tokens. simulated:
        accept these instead."""
        matched = batch.ids[layout.draft_rows] == tokens[:, : layout.shape.max_drafts]
        num_matched = matched.cumprod(1).sum(1)
        if simulated is not None:
            num_matched = simulated_matches(layout, batch, simulated)
        accepted = torch.minimum(num_matched, batch.draft_lengths)
        newest = tokens.gather(1, accepted[:, None])[:, 0]
        ends = batch.starts + layout.context_rows + accepted
        tables.cursor[layout.slots] = torch.stack([ends, newest], 1)
        return accepted

    def narrow(self, layout: Layout, drafts: Tensor, shape: Shape) -> Tensor:
        """Return the packed tensor of a padded layout with only the first `drafts` [S] drafts of
        each span, in that shape."""
        sizes = layout.context_rows + drafts
        ends = sizes.cumsum(0)
        row_starts = ends - sizes
        rows = torch.arange(shape.rows, device=drafts.device)
        # Rows of no span are a padding span's, as `lay_out` has them.
        span_of_row = torch.searchsorted(ends, rows, right=True).clip(max=shape.spans - 1)
        used = rows < ends[-1]
        offset = torch.where(used, rows - row_starts[span_of_row], 0)
        source = (layout.row_starts[span_of_row] + offset).clip(max=layout.shape.rows - 1)
        tokens = torch.where(used, layout.tokens[source], 0)
        from_end = (1 + drafts)[:, None] - torch.arange(shape.max_logits, device=drafts.device)
        logits_rows = (ends[:, None] - from_end.clip(min=1)).clip(0, shape.rows - 1)
        logits_rows = torch.where(sizes[:, None] > 0, logits_rows, shape.rows - 1)
        spans = [layout.slots, layout.context_rows, drafts, sizes, row_starts, layout.active]
        return torch.cat([*spans, span_of_row, offset, tokens, logits_rows.flatten()])

    def choose(self, layout: Layout, margins: Tensor, rates: Tensor, count: int) -> Tensor:
        """Return the number of drafts of each span to verify [S]: all of the host's, and of the
        device's, whose margins are [S, K], the `count` with the largest chances by the rates
        [K, B]."""
        return choose(
            margins,
            rates=rates,
            device_drafts=layout.device_drafts,
            drafts=layout.drafts,
            count=count,
        )

    def cover(self, batch: Batch, length: Tensor, pending: int) -> tuple[Tensor, Tensor]:
        """Return the accepted rows that recurrent states lack, and whether sequences begin; see
        `strobe.attention.recurrent_backend.cover`."""
        return cover(batch, length, pending)


def simulated_matches(layout: Layout, batch: Batch, simulated: SimulatedAcceptance) -> Tensor:
    """Return the number of drafts to accept per span. An average is reached by a low-discrepancy
    sequence."""
    if callable(simulated):
        return simulated(layout, batch)
    base = int(simulated - 1)
    return ((batch.starts * 0.6180339887498949) % 1 < simulated - 1 - base) + base
