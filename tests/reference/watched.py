"""A drafter under watch: what it drafts is recorded, what it proposes may be something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tiny import Scripted, cursor
from torch import Tensor

from strobe.engine.build import Parts
from strobe.request import Request
from strobe.sampling.sampler import argmax
from strobe.step import Drafts, Plan


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
        parts: Parts,
        mangle: Callable[[Request, int, list[int]], list[int]] | None = None,
    ):
        self.inner: Any = parts.proposers.proposers["dflash"]
        super().__init__(parts.state, self.inner.num_drafts, mangle or (lambda r, s, d: d))
        self.capture = self.inner.capture
        self.scripted = mangle is not None
        self.drafted: list[Drafted] = []
        self.hidden: list[Tensor] = []
        self._forward = self.inner.runner.forward
        self.inner.runner.forward = self._keeping

    def _keeping(self, batch: Any, greedy: bool) -> Any:
        assert greedy, "drafts are the most probable tokens"
        self._last = self._forward(batch)
        return self._last._replace(picks=argmax(self._last.logits))

    def propose(self, plan: Plan, spans: Sequence[int]) -> Drafts:
        chosen = [plan.spans[i] for i in spans]
        cursors = [cursor(self.state, span.slot) for span in chosen]
        drafts = self.inner.propose(plan, spans)
        logits = self._last.logits.clone().view(len(chosen), -1, self._last.logits.shape[-1])
        tokens = drafts.tokens.tolist()
        self.drafted += [
            Drafted(span.request, start, tail, row, made)
            for span, (start, tail), row, made in zip(chosen, cursors, logits, tokens, strict=True)
        ]
        return super().propose(plan, spans) if self.scripted else drafts

    def observe(self, batch: Any, hidden: Any) -> None:
        self.hidden.append(hidden.clone())
        self.inner.observe(batch, hidden)

    def true_drafts(self) -> list[Drafted]:
        """Those behind tokens that the requests really said (with two steps in flight a drafter
        also runs for requests that have ended meanwhile)."""
        return [
            d
            for d in self.drafted
            if d.start < len(d.request.tokens) and d.request.tokens[d.start] == d.tail
        ]
