"""Runs one model over a batch and one KV store."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from strobe.attention.backend import AttentionBackend, Batch
from strobe.kv.kv_store import KVStore
from strobe.models.dflash_drafter import DFlash
from strobe.models.target import Target
from strobe.runner.buckets import Buckets
from strobe.runner.decode_state import DecodeState
from strobe.runner.layout import Layout, Shape, exact_shape, lay_out
from strobe.sampling.logprobs import Scores, concat, score
from strobe.sampling.sampling_state import LogitRows, Sampled, SamplingMode, SamplingState
from strobe.step import TAIL, Span

_SCORED_ROWS = 256
_LAYOUTS = 64


class ForwardOutputs(NamedTuple):
    """A forward's outputs. placed: its rows as `DecodeState.place` returned them; residual: the
    residual stream [T, H]; features: the captured features [T, n * H]."""

    placed: Sequence[Tensor]
    residual: Tensor
    features: Tensor | None


class ModelRunner:
    """Runs one model over one KV store. Runners share the device's state."""

    def __init__(
        self,
        model: Target | DFlash,
        store: KVStore,
        state: DecodeState,
        sampling: SamplingState,
        backend: AttentionBackend,
        *,
        capture: tuple[int, ...] = (),
        buckets: Buckets | None = None,
    ):
        """capture: layers whose outputs are returned, as numbers of layers done. buckets: shapes
        that batches are padded to; None: no padding."""
        self.model = model
        self.store = store
        self.state = state
        self.sampling = sampling
        self.backend = backend
        self.capture = capture
        self.buckets = buckets
        self._layouts: dict[Hashable, Layout] = {}
        self.output_buffers: dict[str, Tensor] = {}

    def shape_of(self, spans: Sequence[Span], num_verified: int | None = None) -> Shape:
        """Return the shape of the spans' layout: exact, or the bucket that they are padded to.
        num_verified: number of device drafts to verify; None: all."""
        if self.buckets is not None:
            return self.buckets.shape_of(spans, num_verified)
        return exact_shape(spans)

    def lay_out(
        self,
        spans: Sequence[Span],
        shape: Shape,
        forced: Mapping[int, Sequence[int]] | None = None,
    ) -> Layout:
        """Return the spans' layout, cached while the same requests decode. forced: by span, the
        host's drafts if they are not the span's own."""
        if forced or any(span.tokens[0] != TAIL for span in spans):
            return self._lay_out(spans, shape, forced)
        parts = [(s.slot, s.tokens, s.num_drafts, s.method, s.num_logits) for s in spans]
        key = shape, tuple(parts)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            layout = self._layouts[key] = self._lay_out(spans, shape)
        return layout

    def _lay_out(
        self,
        spans: Sequence[Span],
        shape: Shape,
        forced: Mapping[int, Sequence[int]] | None = None,
    ) -> Layout:
        return lay_out(
            spans,
            self.state.device,
            shape,
            padded=self.buckets is not None,
            spare_slot=self.state.spare_slot,
            forced=forced,
        )

    def narrow(self, layout: Layout, drafts: Tensor, shape: Shape) -> Layout:
        """Reduce a layout to `drafts` [S] drafts per span; a padded one gets that shape."""
        if layout.padded:
            return layout.narrowed(self.state.ops.narrow(layout, drafts, shape), shape)
        counts = drafts.tolist()
        spans = [
            s._replace(num_drafts=n, num_logits=1 + n) if s.method is not None else s
            for s, n in zip(layout.spans, counts, strict=True)
        ]
        exact = exact_shape(spans)
        exact = exact._replace(max_drafts=shape.max_drafts, max_logits=shape.max_logits)
        return self.lay_out(spans, exact, layout.forced)

    def bounds(self, spans: Sequence[Span]) -> list[int]:
        """Per span, an upper bound (exclusive) of its keys' positions."""
        return [min(span.max_start + span.num_rows, self.state.max_positions) for span in spans]

    def is_captured(self, layout: Layout) -> bool:
        """Whether steps of that layout's shape are captured."""
        if self.buckets is None or layout.scored is not None:
            return False
        return self.buckets.is_captured(layout.shape)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Run the model over every row. Returns the residual stream [T, H] and the captured
        features [T, n * H]."""
        masks = self.model.config.decoder.masks
        attend = self.backend.plan(batch, self.store, masks)
        return self.model(batch.ids, batch.positions, attend, self.capture, offsets=batch.offsets)

    def copy_out(self, outputs: ForwardOutputs) -> ForwardOutputs:
        """Copy a forward's results to `output_buffers`, one buffer per part for all shapes, where
        another graph can read them. Results with more rows than any captured step are returned as
        they are."""
        if self.buckets is None or len(outputs.residual) > self.buckets.max_rows:
            return outputs
        size = self.buckets.max_rows
        placed = [self._copy(f"placed_{i}", part, size) for i, part in enumerate(outputs.placed)]
        residual = self._copy("residual", outputs.residual, size)
        features = outputs.features
        if features is not None:
            features = self._copy("features", features, size)
        return ForwardOutputs(placed, residual, features)

    def _copy(self, name: str, part: Tensor, size: int) -> Tensor:
        if name not in self.output_buffers:
            self.output_buffers[name] = part.new_empty(size, *part.shape[1:])
        return self.output_buffers[name][: len(part)].copy_(part)

    def sample(
        self,
        residual: Tensor,
        layout: Layout,
        batch: Batch,
        mode: SamplingMode,
        masks: Tensor | None = None,
    ) -> Sampled:
        """Sample the rows with logits of a residual stream [T, H]: tokens [S * W]. masks: grammar
        masks [S * W, words], one bit per allowed token."""
        all_rows = layout.logits_for_all_rows
        width = layout.shape.max_logits

        def take(x: Tensor) -> Tensor:
            return x if all_rows else layout.select(x)

        rows = take(residual)
        if mode.greedy:
            sampled = Sampled(self.model.argmax(rows))
        else:
            span = take(layout.span_of_row)
            slots = layout.slots.index_select(0, span)
            positions = take(batch.positions)
            rank = take(layout.offset) - layout.context_rows.index_select(0, span) + 1
            rank = rank.clamp_(0, width - 1)
            drafts = batch.ids[layout.draft_rows] if mode.processed else None
            logit_rows = LogitRows(
                slots=slots, positions=positions + 1, drafts=drafts, span=span, rank=rank
            )
            if all_rows and masks is not None:
                masks = masks.index_select(0, span * width + rank)
            sampled = self.sampling.sample(self.model.head_part(rows), logit_rows, mode, masks)
        return sampled.select(layout) if all_rows else sampled

    def score_prompt(self, residual: Tensor, layout: Layout) -> Scores | None:
        """Log probabilities of the prompt tokens after the scored rows, computed a few rows at a
        time."""
        if layout.scored is None:
            return None
        spans, offsets, following = layout.scored
        rows = layout.row_starts.index_select(0, spans) + offsets
        top = max([span.top_logprobs for span in layout.spans])
        parts = zip(rows.split(_SCORED_ROWS), following.split(_SCORED_ROWS), strict=True)
        return concat([score(self.model.head(residual[r]), t, top) for r, t in parts])
