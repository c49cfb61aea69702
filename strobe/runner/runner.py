"""Runs one model over a batch and one KV store."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from strobe.attention.base import AttentionBackend, Batch
from strobe.attention.mask import LayerMask
from strobe.kv.store import KVStore
from strobe.models.dflash import DFlash
from strobe.models.target import Target
from strobe.runner.batch import Layout, Shape, lay_out, own_shape
from strobe.runner.buckets import Buckets
from strobe.runner.state import DecodeState
from strobe.sampling.logprobs import Scores, joined, score
from strobe.sampling.state import LogitRows, Sampled, SamplingMode, SamplingState
from strobe.step import TAIL, Span

_SCORED_ROWS = 256
_LAYOUTS = 64


class Output(NamedTuple):
    """Of all T rows the residual stream x [T, H] and the captured features hidden [T, n * H]."""

    x: Tensor
    hidden: Tensor | None


class ModelRunner:
    """Runs one model over one KV store; the device's state is shared with other runners."""

    def __init__(
        self,
        model: Target | DFlash,
        masks: tuple[LayerMask, ...],
        store: KVStore,
        state: DecodeState,
        sampling: SamplingState,
        backend: AttentionBackend,
        *,
        capture: tuple[int, ...] = (),
        buckets: Buckets | None = None,
    ):
        """capture: layers whose outputs are kept, as counts of layers done. buckets: what batches
        are padded to; None: they are as large as their spans."""
        self.model, self.masks, self.store, self.state = model, masks, store, state
        self.sampling, self.backend = sampling, backend
        self.capture, self.buckets = capture, buckets
        self._layouts: dict[Hashable, Layout] = {}
        self.kept: dict[str, Tensor] = {}

    def shape_of(self, spans: Sequence[Span], verified: int | None = None) -> Shape:
        """The shape of the spans' layout: their own, or the bucket that they are padded to.
        verified: how many of the drafts that the device makes are verified; None: all."""
        if self.buckets is not None:
            return self.buckets.of(spans, verified)
        return own_shape(spans)

    def lay_out(self, spans: Sequence[Span], shape: Shape) -> Layout:
        """The spans' layout, kept while the same requests go on decoding."""
        given = spans, self.state.device, shape, self.buckets is not None, self.state.spare
        if any(span.tokens[0] != TAIL for span in spans):
            return lay_out(*given)
        key = shape, tuple([(s.slot, s.tokens, s.drafts, s.method, s.logits) for s in spans])
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            found = self._layouts[key] = lay_out(*given)
        return found

    def narrow(self, layout: Layout, drafts: Tensor, shape: Shape) -> Layout:
        """The layout with drafts [S] of its spans only, in that shape, where it is padded."""
        if layout.padded:
            return layout.narrow(drafts, shape, kernels=self.state.kernels)
        counts = drafts.tolist()
        spans = [
            s._replace(drafts=n, logits=1 + n) if s.method is not None else s
            for s, n in zip(layout.spans, counts, strict=True)
        ]
        return self.lay_out(
            spans, own_shape(spans)._replace(drafts=shape.drafts, logits=shape.logits)
        )

    def bounds(self, spans: Sequence[Span]) -> list[int]:
        """Per span, a position that no key of it reaches."""
        return [min(span.bound + span.num_rows, self.state.reach) for span in spans]

    def captured(self, layout: Layout) -> bool:
        """Whether steps of that layout's shape are captured."""
        return (
            self.buckets is not None
            and layout.scored is None
            and self.buckets.captured(layout.shape)
        )

    def forward(self, batch: Batch) -> Output:
        """Run the model over every row."""
        attend = self.backend.plan(batch, self.store, self.masks)
        return Output(*self.model(batch.ids, batch.positions, attend, self.capture))

    def keep(self, output: Output) -> Output:
        """The output copied to `kept`, one buffer a part for all shapes, where another graph finds
        it; as it is, where it has more rows than any step that is captured."""
        rows, buckets = output.x.shape[0], self.buckets
        if buckets is None or rows > buckets.most_rows:
            return output
        found: dict[str, Any] = {name: p for name, p in output._asdict().items() if p is not None}
        for name, part in found.items():
            if name not in self.kept:
                self.kept[name] = part.new_empty(buckets.most_rows, part.shape[1])
            found[name] = self.kept[name][:rows].copy_(part)
        return Output(found["x"], found.get("hidden"))

    def sample(
        self,
        output: Output,
        layout: Layout,
        batch: Batch,
        mode: SamplingMode,
        masks: Tensor | None = None,
        *,
        ahead: int = 1,
    ) -> Sampled:
        """Tokens of the rows with logits, [S * W]. masks: of grammars, a bit for every token that
        may come, [S * W, words]. ahead: how far behind its row a token will stand."""
        whole, width = layout.whole, layout.shape.logits

        def take(x: Tensor) -> Tensor:
            return x if whole else layout.select(x)

        rows = take(output.x)
        if mode.greedy and mode.margins:
            tokens, margins = self.model.best_two(rows)
            found = Sampled(tokens, margins=margins)
        elif mode.greedy:
            found = Sampled(self.model.argmax(rows))
        else:
            span = take(layout.span_of_row)
            slots, positions = layout.slots.index_select(0, span), take(batch.positions)
            where = LogitRows(slots, positions + ahead)
            rank = take(layout.offset) - layout.certain.index_select(0, span) + 1
            rank = rank.clamp_(0, width - 1)
            if mode.processed:
                drafts = batch.ids[layout.draft_rows]
                where = where._replace(drafts=drafts, span=span, rank=rank)
            if whole and masks is not None:
                masks = masks.index_select(0, span * width + rank)
            found = self.sampling.sample(self.model.head(rows), where, mode, masks)
        return found.select(layout) if whole else found

    def score_prompt(self, output: Output, layout: Layout) -> Scores | None:
        """Log probabilities of the prompt tokens behind the scored rows, a few rows at a time."""
        if layout.scored is None:
            return None
        following, top = layout.scored.tokens, layout.scored.top
        rows = layout.scored_rows.split(_SCORED_ROWS)
        parts = zip(rows, following.split(_SCORED_ROWS), strict=True)
        return joined(
            [score(self.model.head(output.x.index_select(0, r)), t, top) for r, t in parts]
        )
