"""Plans to tensors to logits, for a target and for a drafter alike."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from strobe.attention.base import AttentionBackend, AttentionInputs, Group
from strobe.attention.mask import LayerMask
from strobe.kv.store import KVStore
from strobe.models.layers import Attend
from strobe.runner.batch import Batch, Inputs, Layout, WantedRows
from strobe.runner.shapes import Shapes
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

    def pick(self, x: Tensor) -> Tensor: ...


class Output(NamedTuple):
    """Of the R wanted rows their logits [R, V] or, where only those were asked for, the most
    probable tokens `picks` [R]; hidden [T, n * H], the captured features of all rows;
    prompt_scores: of the rows whose next prompt token is scored, where there are any."""

    logits: Tensor | None
    picks: Tensor | None
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
        limit: int,
        capture: tuple[int, ...] = (),
        shapes: Shapes | None = None,
    ):
        """limit: the context's end; drafts that would lie beyond it do not count. shapes: what
        batches are padded to; None: they are as large as their plan."""
        self.model, self.masks, self.store, self.state = model, masks, store, state
        self.backend, self.capture, self.shapes, self.limit = backend, capture, shapes, limit

    def arrange(
        self, plan: Plan, proposal: Proposal | None = None, *, wanted: int | None = None
    ) -> Inputs:
        """The plan's geometry and its drafts. wanted: the most wanted rows of a span, by default
        one more than the longest draft."""
        state, spans = self.state, plan.spans
        layout, rows = self._layout(plan, wanted)
        if proposal is not None and layout.padded:
            fill = layout.num_spans - proposal.tokens.shape[0]
            columns = layout.width - proposal.tokens.shape[1]
            if fill or columns:
                whole = proposal._asdict()
                for name in [n for n in ("tokens", "probs", "drawn") if whole[n] is not None]:
                    inner = (0, 0) * (whole[name].dim() - 2)
                    whole[name] = F.pad(whole[name], (*inner, 0, columns, 0, fill))
                proposal = Proposal(**whole)
        reach = state.table.shape[1] * state.page_size
        bounds = [
            min(max(spans[i].bound + layout.row_counts[i] for i in group.members), reach)
            for group in self._groups(layout)
        ]
        return Inputs(layout, rows, proposal, bounds)

    def prepare(self, inputs: Inputs) -> Batch:
        """Lay out host tokens, device tails and drafts at their positions."""
        layout, state = inputs.layout, self.state
        assert inputs.proposal is not None
        places, ids, proposal = state.place(layout, inputs.proposal, self.limit)
        attention = AttentionInputs(
            positions=places.positions,
            slots=places.slots,
            starts=places.start,
            sizes=layout.sizes,
            row_starts=layout.row_starts,
            longest=layout.longest,
            tables=state.table,
            table_rows=layout.slots,
            page_size=state.page_size,
            groups=self._groups(layout),
            bounds=inputs.bounds,
        )
        return Batch(layout, places, inputs.wanted, ids, attention, proposal)

    def forward(self, batch: Batch, *, greedy: bool = False) -> Output:
        """Run the model over every row and its head over the wanted ones."""
        attend = self.backend.plan(batch.attention, self.store, self.masks)
        x, hidden = self.model(batch.ids, batch.places.positions, attend, self.capture)
        scores = self._score_prompt(x, batch) if batch.layout.scored is not None else None
        rows = batch.wanted.of(x, kernels=self.state.kernels)
        if greedy:
            return Output(None, self.model.pick(rows), hidden, scores)
        return Output(self.model.head(rows), None, hidden, scores)

    def replays(self, inputs: Inputs) -> bool:
        """Whether inputs of that shape come again and again, so that recording them pays."""
        layout = inputs.layout
        return self.shapes is not None and not layout.scored and self.shapes.replays(layout.shape)

    def _groups(self, layout: Layout) -> list[Group]:
        return [] if self.backend.graph_safe else layout.groups

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

    def _layout(self, plan: Plan, wanted: int | None) -> tuple[Layout, WantedRows]:
        """The plan's layout and wanted rows, kept while the same requests go on decoding."""
        kept, rows = self.state.kept, tuple([span.rows for span in plan.spans])
        if plan.key is None:
            layout = self._lay_out(plan)
            return layout, WantedRows(layout, rows, wanted or layout.width + 1)
        layout = kept.get(plan.key)
        if not isinstance(layout, Layout):
            layout = self._lay_out(plan)
            kept.put(plan.key, layout)
        found = kept.get((layout, rows))
        if not isinstance(found, WantedRows):
            found = WantedRows(layout, rows, wanted or layout.width + 1)
            kept.put((layout, rows), found)
        return layout, found

    def _lay_out(self, plan: Plan) -> Layout:
        spans, width = plan.spans, plan.num_drafts
        shape = None
        if self.shapes is not None:
            rows = sum(span.num_tokens + span.drafts for span in spans)
            block = all(s.tokens is None and s.drafts == width for s in spans)
            shape = self.shapes.of(len(spans), rows, width, block=block)
        columns, state = self.state.table.shape[1], self.state
        return Layout(spans, width, columns, state.device, shape=shape, spare=state.spare)
