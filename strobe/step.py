"""The values that cross rooms in one engine step. Imports no torch.

A prefill chunk, a decode step and the verification of a draft are one thing, a Span: append
tokens to a sequence and give logits at its last rows.

      start                 start + len(tokens)      + drafts
        |  tokens (host, or the  |  proposed tokens     |
        |  device's tail token)  |                      |
        +------------------------+----------------------+
                          logits at the last `rows` of these
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from strobe.request import FinishReason, Request, TokenLogprob


class Span(NamedTuple):
    """Append to one sequence.

    slot: the request's place in the device's state. start: positions that certainly have K/V when
    the step runs; for a decode span results may still be on their way, the device knows the true
    start, and `bound` is the most it can be. tokens: what to append; None stands for the one tail
    token that only the device is sure to know. drafts: proposed tokens behind them. rows: logits
    wanted, counted from the span's end. scored: how many of its first rows give the log probability
    of the prompt token that follows them.
    """

    request: Request
    slot: int
    start: int
    bound: int
    tokens: tuple[int, ...] | None
    drafts: int
    rows: int
    scored: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens appended for certain."""
        return 1 if self.tokens is None else len(self.tokens)


class PageWrite(NamedTuple):
    """New entries of one request's page table: `pages` from column `first` on."""

    slot: int
    first: int
    pages: tuple[int, ...]


class Plan:
    """Who runs in this step and how far. Never changed once made.

    pages: page-table entries the device does not know yet. admitted: slot, request and positions
    that have K/V already, of those that are new. num_drafts: the longest draft of any span. key:
    what the plan's layout depends on, None where a span brings tokens of its own.
    """

    __slots__ = ("admitted", "key", "num_drafts", "pages", "spans")

    def __init__(
        self,
        spans: Sequence[Span],
        pages: Sequence[PageWrite] = (),
        admitted: Sequence[tuple[int, Request, int]] = (),
    ):
        self.spans, self.pages, self.admitted = tuple(spans), pages, admitted
        self.num_drafts = max([span.drafts for span in spans], default=0)
        own_tokens = [span for span in spans if span.tokens is not None]
        self.key = None if own_tokens else tuple([(s.slot, s.drafts) for s in spans])

    @property
    def methods(self) -> dict[str, list[int]]:
        """Spans that draft, by method."""
        found: dict[str, list[int]] = {}
        for i, span in enumerate(self.spans):
            if span.drafts:
                found.setdefault(span.request.method, []).append(i)
        return found

    def shorten(self, known: tuple[int, ...] | None) -> Plan:
        """The plan without rows for drafts that the host knows were not proposed."""
        if known is None:
            return self
        spans = tuple(
            span
            if length >= span.drafts
            else span._replace(drafts=length, rows=span.rows - span.drafts + length)
            for span, length in zip(self.spans, known, strict=True)
        )
        return Plan(spans, self.pages, self.admitted)


class Drafts(NamedTuple):
    """What one proposer drafts for n spans: tokens [n or more, K'] int64 on the device; known: how
    many of each row it means, where that is fewer than were asked for and the host knows it; probs
    [n or more, K', V] float32: what each token was drawn by, None where none was drawn."""

    tokens: Tensor
    known: tuple[int, ...] | None = None
    probs: Tensor | None = None


class Proposal(NamedTuple):
    """Draft tokens for the S spans of a plan.

    tokens [S or more, K] int64 on the device; lengths [S] int64, how many of each row count, None
    until they are laid out. known: the drafts per span that the host knows were made; None for "as
    planned". probs [S or more, K, V] float32: what each token was drawn by, over the target's
    vocabulary, all 0 for one that was not drawn; None where none was. drawn [S or more, K]: the
    tokens as they were drawn, where some were replaced since; None: as in `tokens`.
    """

    tokens: Tensor
    lengths: Tensor | None = None
    known: tuple[int, ...] | None = None
    probs: Tensor | None = None
    drawn: Tensor | None = None


class Scores(NamedTuple):
    """Log probabilities of A rows as the model gave them: of the token that followed [A] float32,
    its rank [A] int64 from 1, and the k most probable tokens' values and ids [A, k]."""

    values: Tensor
    ranks: Tensor
    top_values: Tensor
    top_ids: Tensor


class Verdict(NamedTuple):
    """What the target decided: tokens [S, K + 1], of which accepted [S] + 1 count.

    scores: of the wanted rows of requests that asked; prompt_scores: of prompt tokens; both in the
    spans' order.
    """

    tokens: Tensor
    accepted: Tensor
    scores: Scores | None = None
    prompt_scores: Scores | None = None


class HostVerdict(NamedTuple):
    """A verdict on the host: per span, the tokens made and how many of them were drafts; and, where
    asked for, log probabilities by span."""

    tokens: list[list[int]]
    accepted: list[int]
    logprobs: dict[int, list[TokenLogprob]] = {}  # noqa: RUF012
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}  # noqa: RUF012


class TokenEvent(NamedTuple):
    """News of one request: tokens made in this step and, with the last ones, why it ended.

    drafted: drafts verified in this step; accepted: how many of `tokens`, from the first on, were
    drafts; logprobs: one per token where asked for; context: positions before this step.
    """

    request: Request
    tokens: list[int]
    finish_reason: FinishReason | None
    drafted: int = 0
    accepted: int = 0
    logprobs: list[TokenLogprob] = []  # noqa: RUF012
    context: int = 0
