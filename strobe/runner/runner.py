"""Plans to tensors to logits, for a target and for a drafter alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from strobe.attention.base import AttentionBackend, AttentionInputs
from strobe.kv.store import KVStore
from strobe.models.config import LayerMask
from strobe.models.layers import Attend
from strobe.runner.batch import Batch, Layout
from strobe.runner.state import DecodeState
from strobe.step import Plan, Proposal

_KEPT_LAYOUTS = 64


class RowModel(Protocol):
    """A model over ragged rows: what the runner needs of targets and drafters."""

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]: ...

    def head(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Output:
    """logits [R, V] of the wanted rows; hidden [T, n * H], the captured features of all rows."""

    logits: Tensor
    hidden: Tensor | None


class ModelRunner:
    """Runs one model over one KV store; the device's state is shared with other runners."""

    def __init__(
        self,
        model: RowModel,
        masks: tuple[LayerMask, ...],
        store: KVStore,
        state: DecodeState,
        backend: AttentionBackend,
        *,
        page_size: int,
        capture: tuple[int, ...] = (),
    ):
        self.model, self.masks, self.store, self.state = model, masks, store, state
        self.backend, self.page_size, self.capture = backend, page_size, capture
        self._layouts: dict[tuple[object, ...], Layout] = {}

    def prepare(self, plan: Plan, proposal: Proposal) -> Batch:
        """Lay out the plan's spans: host tokens, device tails and drafts at their positions."""
        layout, state, size = self._layout(plan), self.state, self.page_size
        columns = state.table.shape[1]
        start = state.length.index_select(0, layout.slots)
        positions = start.index_select(0, layout.span_of_row).add_(layout.offset)
        tables = state.table.index_select(0, layout.slots)
        column = positions.div(size, rounding_mode="floor").clamp_max_(columns - 1)
        pages = tables.view(-1).index_select(0, column.add_(layout.table_row))
        slots = pages if size == 1 else pages.mul_(size).add_(positions.remainder(size))
        reach = (columns - 1) * size
        bounds = [
            min(max(plan.spans[i].bound + layout.row_counts[i] for i in group.members), reach)
            for group in layout.groups
        ]
        inputs = AttentionInputs(
            positions=positions,
            slots=slots,
            ends=start + layout.sizes,
            tables=tables,
            page_size=size,
            groups=layout.groups,
            bounds=bounds,
        )
        return Batch(layout, self._ids(plan, layout, proposal), positions, start, inputs)

    def forward(self, batch: Batch) -> Output:
        """Run the model over every row and its head over the wanted ones."""
        attend = self.backend.plan(batch.attention, self.store, self.masks)
        x, hidden = self.model(batch.ids, batch.positions, attend, self.capture)
        rows = x if batch.layout.all_wanted else x.index_select(0, batch.layout.wanted)
        return Output(self.model.head(rows), hidden)

    def _ids(self, plan: Plan, layout: Layout, proposal: Proposal) -> Tensor:
        host = [t for span in plan.spans if span.tokens is not None for t in span.tokens]
        tails = self.state.tail.index_select(0, layout.slots)
        if not host and len(plan.spans) == 1:
            return torch.cat([tails, proposal.tokens.view(-1)])[: layout.num_rows]
        known = torch.tensor(host, dtype=torch.int64, device=self.state.device)
        every = torch.cat([known, tails, proposal.tokens.reshape(-1)])
        return every.index_select(0, layout.source)

    def _layout(self, plan: Plan) -> Layout:
        key: tuple[object, ...] = (
            plan.num_drafts,
            *((s.slot, s.tokens is None, s.num_tokens, s.drafts, s.rows) for s in plan.spans),
        )
        layout = self._layouts.get(key)
        if layout is None:
            columns = self.state.table.shape[1]
            layout = Layout(plan.spans, plan.num_drafts, columns, self.state.device)
            if all(span.tokens is None for span in plan.spans):
                if len(self._layouts) >= _KEPT_LAYOUTS:
                    self._layouts.pop(next(iter(self._layouts)))
                self._layouts[key] = layout
        return layout
