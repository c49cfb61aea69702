"""A step's operations by Triton kernels, one launch each. Legend as in `torch_step_ops.py`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strobe.attention.backend import Batch
from strobe.kernels import narrow, processors, race_candidates, sampling, step_bookkeeping
from strobe.runner.layout import Layout, Shape
from strobe.runner.slot_tables import SlotTables
from strobe.runner.step_ops.torch_step_ops import SimulatedAcceptance, StepOps
from strobe.sampling.processors import LogitRows, Tables
from strobe.sampling.sampler import RowParams


class TritonStepOps(StepOps):
    """Kernels of spans and rows take only padded layouts: they are compiled for each width, of
    which buckets leave a few."""

    takes_mixtures = True

    def place(self, tables: SlotTables, layout: Layout, drafts: Tensor | None) -> Sequence[Tensor]:
        if not layout.padded:
            return super().place(tables, layout, drafts)
        return step_bookkeeping.place(
            tables.cursor,
            tables.tables,
            layout,
            drafts,
            limit=tables.limit,
            page_size=tables.page_size,
        )

    def accept(
        self,
        tokens: Tensor,
        batch: Batch,
        layout: Layout,
        tables: SlotTables,
        *,
        simulated: SimulatedAcceptance | None,
    ) -> Tensor:
        if not layout.padded or callable(simulated):
            return super().accept(tokens, batch, layout, tables, simulated=simulated)
        return step_bookkeeping.accept(tokens, batch, layout, tables.cursor, simulated=simulated)

    def narrow(self, layout: Layout, drafts: Tensor, shape: Shape) -> Tensor:
        return narrow.narrow(layout, drafts, shape)

    def choose(self, layout: Layout, margins: Tensor, rates: Tensor, count: int) -> Tensor:
        if not layout.padded:
            return super().choose(layout, margins, rates, count)
        return narrow.choose(
            margins,
            rates=rates,
            device_drafts=layout.device_drafts,
            drafts=layout.drafts,
            count=count,
        )

    def cover(self, batch: Batch, length: Tensor, pending: int) -> tuple[Tensor, Tensor]:
        return step_bookkeeping.cover(batch, length, pending)

    def process(
        self,
        logits: Tensor,
        tables: Tables,
        rows: LogitRows,
        masks: Tensor | None,
        *,
        processed: bool,
    ) -> Tensor:
        return processors.process(logits, tables, rows, masks, processed=processed)

    def argmax(self, logits: Tensor) -> Tensor:
        return sampling.argmax(logits)

    def sample_rows(self, logits: Tensor, rows: RowParams, *, filtered: bool) -> Tensor:
        return sampling.sample_rows(logits, rows, filtered=filtered)

    def race_candidates(
        self, logits: Tensor, rows: RowParams, count: int, tokens: Tensor | None, *, filtered: bool
    ) -> tuple[Tensor, Tensor]:
        params, _ = sampling.race_params(logits, rows)
        return race_candidates.race_candidates(
            logits, params, rows.key, rows.position, count, tokens
        )
