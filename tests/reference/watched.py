"""A drafter under watch: what it drafts is recorded, what it proposes may be something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tiny import Scripted, cursor
from torch import Tensor

from strobe.engine.build import Components
from strobe.request import Request
from strobe.sampling.sampler import best_two
from strobe.sampling.state import Sampled
from strobe.speculation.base import Drafts
from strobe.step import Span


class Drafted(NamedTuple):
    """One block: the tail token at position `start`, the drafter's logits [B - 1, V] behind it."""

    request: Request
    start: int
    tail: int
    logits: Tensor
    tokens: list[int]


class Watched(Scripted):
    """Runs the true drafter on everything. With `mangle` it proposes what a script says instead,
    so that drafts of a random drafter are not all rejected."""

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
        self._sample = self.inner.runner.sample
        self.inner.runner.sample = self._keeping

    def _keeping(self, output: Any, layout: Any, batch: Any, mode: Any, **ahead: int) -> Sampled:
        assert mode.greedy, "drafts are the most probable tokens"
        self._last: Tensor = self.inner.model.head(layout.select(output.residual))
        tokens, margins = best_two(self._last)
        return Sampled(tokens, margins=margins)

    def propose(self, spans: Sequence[Span]) -> Drafts:
        self.num_drafts = self.engine.limits.num_drafts
        cursors = [cursor(self.state, span.slot) for span in spans]
        drafts = self.inner.propose(spans)
        logits = self._last.clone().view(len(spans), -1, self._last.shape[-1])
        made = drafts.tokens.tolist()
        asked = zip(self.requests(spans), cursors, logits, made, strict=True)
        self.drafted += [
            Drafted(r, start, tail, row, made) for r, (start, tail), row, made in asked
        ]
        return super().propose(spans) if self.scripted else drafts

    def observe(self, batch: Any, hidden: Any, verdict: Any) -> None:
        self.hidden.append(hidden.clone())
        self.inner.observe(batch, hidden, verdict)

    def true_drafts(self) -> list[Drafted]:
        """Those behind tokens that the requests really said (with two steps in flight a drafter
        also runs for requests that have ended meanwhile)."""
        return [
            d
            for d in self.drafted
            if d.start < len(d.request.tokens) and d.request.tokens[d.start] == d.tail
        ]
