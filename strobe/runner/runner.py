"""Plans to tensors to logits, for a target and for a drafter alike."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from strobe.attention.base import AttentionBackend, AttentionInputs
from strobe.attention.mask import LayerMask
from strobe.kv.store import KVStore
from strobe.models.layers import Attend
from strobe.runner.batch import Batch, Layout, Places, WantedRows
from strobe.runner.state import DecodeState
from strobe.sampling.logprobs import joined, score
from strobe.step import Plan, Proposal, Scores

_SCORED_ROWS = 256


class RowModel(Protocol):
    """A model over ragged rows: what the runner needs of targets and drafters."""

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]: ...

    def head(self, x: Tensor) -> Tensor: ...


class Output(NamedTuple):
    """logits [R, V] of the wanted rows; hidden [T, n * H], the captured features of all rows;
    prompt_scores: of the rows whose next prompt token is scored, where there are any."""

    logits: Tensor
    hidden: Tensor | None
    prompt_scores: Scores | None = None


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
        capture: tuple[int, ...] = (),
    ):
        self.model, self.masks, self.store, self.state = model, masks, store, state
        self.backend, self.capture = backend, capture

    def prepare(self, plan: Plan, proposal: Proposal) -> Batch:
        """Lay out the plan's spans: host tokens, device tails and drafts at their positions."""
        state, spans = self.state, plan.spans
        layout, wanted = self._layout(plan)
        places = state.locate(layout)
        reach = state.table.shape[1] * state.page_size
        counts = layout.row_counts
        inputs = AttentionInputs(
            positions=places.positions,
            slots=places.slots,
            starts=places.start,
            sizes=layout.sizes,
            tables=state.table,
            table_rows=layout.slots,
            page_size=state.page_size,
            groups=layout.groups,
            bounds=[
                min(max(spans[i].bound + counts[i] for i in group.members), reach)
                for group in layout.groups
            ],
        )
        return Batch(layout, places, wanted, self._ids(plan, layout, places, proposal), inputs)

    def forward(self, batch: Batch) -> Output:
        """Run the model over every row and its head over the wanted ones."""
        attend = self.backend.plan(batch.attention, self.store, self.masks)
        x, hidden = self.model(batch.ids, batch.places.positions, attend, self.capture)
        scores = self._score_prompt(x, batch) if batch.layout.scored is not None else None
        return Output(self.model.head(batch.wanted.of(x)), hidden, scores)

    def _score_prompt(self, x: Tensor, batch: Batch) -> Scores:
        """Log probabilities of the prompt tokens behind the scored rows, a few rows at a time."""
        assert batch.layout.scored is not None
        rows, following, top = batch.layout.scored
        return joined(
            [
                score(self.model.head(x.index_select(0, part)), tokens, top)
                for part, tokens in zip(
                    rows.split(_SCORED_ROWS), following.split(_SCORED_ROWS), strict=True
                )
            ]
        )

    def _ids(self, plan: Plan, layout: Layout, places: Places, proposal: Proposal) -> Tensor:
        if layout.uniform:
            return torch.cat([places.tails, proposal.tokens], 1).view(-1)
        host = [t for span in plan.spans if span.tokens is not None for t in span.tokens]
        known = torch.tensor(host, dtype=torch.int64, device=self.state.device)
        every = torch.cat([known, places.tails[:, 0], proposal.tokens.reshape(-1)])
        return every.index_select(0, layout.source)

    def _layout(self, plan: Plan) -> tuple[Layout, WantedRows]:
        """The plan's layout and wanted rows, kept while the same requests go on decoding."""
        width, kept = plan.num_drafts, self.state.kept
        rows = tuple([span.rows for span in plan.spans])
        if plan.key is None:
            layout = Layout(plan.spans, width, self.state.table.shape[1], self.state.device)
            return layout, WantedRows(layout, rows, width)
        layout = kept.get(plan.key)
        if not isinstance(layout, Layout):
            layout = Layout(plan.spans, width, self.state.table.shape[1], self.state.device)
            kept.put(plan.key, layout)
        wanted = kept.get((layout, rows))
        if not isinstance(wanted, WantedRows):
            wanted = WantedRows(layout, rows, width)
            kept.put((layout, rows), wanted)
        return layout, wanted
