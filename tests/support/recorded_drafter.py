"""A recorded drafter: its drafts are recorded, and it may propose others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from strobe.engine.build import Components
from strobe.models.heads.head import Backbone, BlockRows, Drafts
from strobe.request import Request
from strobe.sampling.sampler import best_two
from strobe.step import Span
from tests.support.scripted_drafting import Scripted, cursor


class Drafted(NamedTuple):
    """One block: the last token, at position `start`, the drafter's logits [B - 1, V] after it,
    and its drafts."""

    request: Request
    start: int
    tail: int
    logits: Tensor
    tokens: list[int]


class Watched(Scripted):
    """Runs the true drafter on all spans. With `mangle` it proposes scripted drafts instead, so
    that a random drafter's drafts are not all rejected."""

    def __init__(
        self,
        parts: Components,
        mangle: Callable[[Request, int, list[int]], list[int]] | None = None,
    ):
        self.inner: Any = parts.proposers["dflash"]
        super().__init__(parts.state, self.inner.num_drafts, mangle or (lambda r, s, d: d))
        self.capture = self.inner.capture
        self.scripted = mangle is not None
        self.drafted: list[Drafted] = []
        self.hidden: list[Tensor] = []
        self._own_forward = self.inner.model.draft_head.forward
        self.inner.model.draft_head.forward = self._recording

    def _recording(self, model: Backbone, block: BlockRows) -> Drafts:
        assert block.greedy, "drafts are the most probable tokens"
        self._last = model.head(block.hidden.flatten(0, 1))
        tokens, margins = best_two(self._last)
        shape = block.hidden.shape[:2]
        return Drafts(tokens.view(shape), margins.view(shape))

    def propose(self, spans: Sequence[Span]) -> Drafts:
        self.num_drafts = self.engine.limits.num_drafts
        cursors = [cursor(self.state, span.slot) for span in spans]
        drafts = self.inner.propose(spans)
        count = len(spans)  # captured steps have more blocks
        logits = self._last.clone().unflatten(0, drafts.tokens.shape)[:count]
        tokens = drafts.tokens[:count].tolist()
        blocks = zip(self.requests(spans), cursors, logits, tokens, strict=True)
        self.drafted += [
            Drafted(request, start, tail, row, ids) for request, (start, tail), row, ids in blocks
        ]
        return super().propose(spans) if self.scripted else drafts

    def observe(self, batch: Any, hidden: Any) -> None:
        self.hidden.append(hidden.clone())
        self.inner.observe(batch, hidden)

    def true_drafts(self) -> list[Drafted]:
        """Return the blocks after tokens that the requests really have: with two steps in flight,
        the drafter also runs for requests that have ended meanwhile."""
        return [
            d
            for d in self.drafted
            if d.start < len(d.request.tokens) and d.request.tokens[d.start] == d.tail
        ]


class WatchedHead(Watched):
    """As `Watched`, with the drafts of the drafter's own head, greedy or sampled. blocks: the rows
    that it got, and its drafts."""

    def __init__(self, parts: Components):
        super().__init__(parts)
        self.blocks: list[tuple[BlockRows, Drafts]] = []

    def _recording(self, model: Backbone, block: BlockRows) -> Drafts:
        self._last = model.head(block.hidden.flatten(0, 1))
        drafts = self._own_forward(model, block)
        self.blocks.append((block, drafts))
        return drafts
