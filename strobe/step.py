"""The values that cross rooms in one engine step: plain data, which can be pickled, printed, sent
to another process and run again. Imports no torch.

A prefill chunk, a decode step and the verification of a draft are one thing, a Span: append tokens
to a sequence and give logits at its last rows.

    start                              start + num_certain         start + num_rows
      |  certain: prompt tokens, or the     |  drafts: the host's own,     |
      |  newest token (TAIL)                |  or made on the device       |
      +-------------------------------------+------------------------------+
                                        logits at the last `logits` rows
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from strobe.request import FinishReason, TokenLogprob
    from strobe.sampling_params import SamplingParams

TAIL = -1
"""Among a span's tokens: the sequence's newest token, which has no K/V yet. Only the device is sure
to know it, since results may be one step away."""


class Span(NamedTuple):
    """Append to one sequence.

    slot: the request's row in the device's state. start: positions that certainly have K/V when the
    step runs; `max_start` is the most there can be, which differs while results are on their way.
    tokens: what the host knows of the rows, TAIL for the newest token. num_drafts: how many of the
    rows, the last ones, are drafts. method: the proposer on the device that makes them; None where
    they are the last of `tokens`. num_logits: rows with logits, counted from the end.
    scored_tokens: the prompt tokens that follow the span's first rows and whose log probabilities
    are asked for, each with the `top_logprobs` most probable ones."""

    slot: int
    start: int
    max_start: int
    tokens: tuple[int, ...]
    num_drafts: int = 0
    method: str | None = None
    num_logits: int = 0
    scored_tokens: tuple[int, ...] = ()
    top_logprobs: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + (self.num_drafts if self.method is not None else 0)

    @property
    def num_context_rows(self) -> int:
        """Rows that are no drafts."""
        return self.num_rows - self.num_drafts


def num_rows(spans: Sequence[Span], num_verified: int | None = None) -> int:
    """Rows of all spans. num_verified: drafts that are verified of those that the device makes."""
    rows, num_proposed = 0, 0
    for span in spans:
        rows += span.num_rows
        num_proposed += span.num_drafts if span.method is not None else 0
    return rows if num_verified is None else rows - max(num_proposed - num_verified, 0)


class PageWrite(NamedTuple):
    """New entries of one request's page table: `pages` from column `first` on."""

    slot: int
    first: int
    pages: tuple[int, ...]


class Admission(NamedTuple):
    """A request that takes a slot. length: positions that have K/V already. tokens: those known,
    the prompt's num_prompt first. stop_ids: tokens that may not come before min_tokens."""

    slot: int
    length: int
    tokens: tuple[int, ...]
    num_prompt: int
    sampling: SamplingParams
    seed: int
    sibling: int
    stop_ids: frozenset[int]


class Plan(NamedTuple):
    """Who runs in a step and how far. pages: page-table entries that the device does not know yet;
    admitted: requests that are new to it. num_verified: how many of all the drafts that are made on
    the device are verified, the most promising ones, which the device chooses; None: all.
    confidence: by the draft's place, slope and intercept of the logistic function that makes its
    chance to be right, given those before it, of its evidence."""

    spans: tuple[Span, ...] = ()
    pages: tuple[PageWrite, ...] = ()
    admitted: tuple[Admission, ...] = ()
    num_verified: int | None = None
    confidence: tuple[tuple[float, float], ...] = ()

    @property
    def methods(self) -> dict[str, list[int]]:
        """Spans whose drafts are made on the device, by method."""
        spans_by_method: dict[str, list[int]] = {}
        for i, span in enumerate(self.spans):
            if span.method is not None:
                spans_by_method.setdefault(span.method, []).append(i)
        return spans_by_method

    def check(self, num_slots: int, num_pages: int) -> None:
        """Raises AssertionError for a slot or page that does not exist."""
        for part in (*self.spans, *self.pages, *self.admitted):
            assert 0 <= part.slot < num_slots, f"slot {part.slot} of {num_slots} in {part}"
        for write in self.pages:
            assert all(0 < page < num_pages for page in write.pages), (
                f"a page beyond {num_pages}: {write}"
            )


class StepResult(NamedTuple):
    """What became of a plan's spans, on the host.

    tokens: per span the target's tokens, one more than were accepted; num_accepted: drafts kept.
    rows: that the target ran, padding included; seconds: what the step took. num_verified: drafts
    verified, where the device chose their number; margins: of every draft that it made, how far its
    logit was above the second largest.
    logprobs, prompt_logprobs: by span, where asked for. errors: by span, a sentence that says why
    its request cannot go on.
    """

    tokens: list[list[int]]
    num_accepted: list[int]
    rows: int = 0
    seconds: float | None = None
    num_verified: list[int] | None = None
    margins: list[list[float]] | None = None
    logprobs: dict[int, list[TokenLogprob]] = {}  # noqa: RUF012
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}  # noqa: RUF012
    errors: dict[int, str] = {}  # noqa: RUF012

    def truncate(self, ends: Mapping[int, int], spans: Sequence[Span]) -> StepResult:
        """As if no draft had been verified behind the ends of answers. ends: by span, how many of
        its tokens belong to its answer."""
        num_verified = list(self.num_verified or [span.num_drafts for span in spans])
        num_accepted = list(self.num_accepted)
        for i, end in ends.items():
            if end <= num_accepted[i]:
                num_verified[i] = num_accepted[i] = end
        return self._replace(num_accepted=num_accepted, num_verified=num_verified) if ends else self


class RequestStart(NamedTuple):
    """What is known of an answer when its first tokens come. queue_time: seconds until it ran;
    num_cached: positions that came from the prefix cache; off_reason: why it does not speculate;
    stop_ids: tokens that end it, the model's own among them."""

    method: str
    off_reason: str | None
    num_cached: int
    queue_time: float
    prompt_logprobs: Sequence[TokenLogprob | None]
    stop_ids: frozenset[int]


class TokenEvent(NamedTuple):
    """What one step made of one answer; it crosses the process border as it is.

    key: what the caller named the prompt by; sibling: which of its n answers. tokens: made in this
    step; finish_reason, stop_reason, error: with the last ones. num_verified: drafts verified in
    this step; num_accepted: how many of `tokens`, from the first on, were drafts; logprobs: one per
    token where asked for; num_computed_tokens: positions before this step; start: with the answer's
    first event. num_proposed: drafts made for this step, verified or not; None where it could not
    have any."""

    key: Hashable
    sibling: int
    tokens: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_verified: int = 0
    num_accepted: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    num_computed_tokens: int = 0
    start: RequestStart | None = None
    num_proposed: int | None = None
