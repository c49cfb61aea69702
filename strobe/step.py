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
    step runs; `bound` is the most there can be, which differs while results are on their way.
    tokens: what the host knows of the rows, TAIL for the newest token. drafts: how many of the
    rows, the last ones, are drafts. method: the proposer on the device that makes them; None where
    they are the last of `tokens`. logits: rows with logits, counted from the end. scored: the
    prompt tokens that follow the span's first rows and whose log probabilities are asked for,
    each with the `top_logprobs` most probable ones.
    """

    slot: int
    start: int
    bound: int
    tokens: tuple[int, ...]
    drafts: int = 0
    method: str | None = None
    logits: int = 0
    scored: tuple[int, ...] = ()
    top_logprobs: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + (self.drafts if self.method is not None else 0)

    @property
    def num_certain(self) -> int:
        """Rows that are no drafts."""
        return self.num_rows - self.drafts


def num_rows(spans: Sequence[Span], verified: int | None = None) -> int:
    """Rows of all spans. verified: drafts that are verified of those that the device makes."""
    rows, made = 0, 0
    for span in spans:
        rows += span.num_rows
        made += span.drafts if span.method is not None else 0
    return rows if verified is None else rows - max(made - verified, 0)


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
    admitted: requests that are new to it. verified: how many of all the drafts that are made on the
    device are verified, the most promising ones, which the device chooses; None: all. confidence:
    by the draft's place, slope and intercept of the logistic function that makes its chance to be
    right, given those before it, of its evidence."""

    spans: tuple[Span, ...] = ()
    pages: tuple[PageWrite, ...] = ()
    admitted: tuple[Admission, ...] = ()
    verified: int | None = None
    confidence: tuple[tuple[float, float], ...] = ()

    @property
    def methods(self) -> dict[str, list[int]]:
        """Spans whose drafts are made on the device, by method."""
        found: dict[str, list[int]] = {}
        for i, span in enumerate(self.spans):
            if span.method is not None:
                found.setdefault(span.method, []).append(i)
        return found

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

    tokens: per span the target's tokens, one more than were accepted; accepted: drafts kept.
    rows: that the target ran, padding included; seconds: what the step took. drafted: drafts
    verified, where the device chose their number; margins: of every draft that it made, how far its
    logit was above the second largest.
    logprobs, prompt_logprobs: by span, where asked for. errors: by span, a sentence that says why
    its request cannot go on.
    """

    tokens: list[list[int]]
    accepted: list[int]
    rows: int = 0
    seconds: float | None = None
    drafted: list[int] | None = None
    margins: list[list[float]] | None = None
    logprobs: dict[int, list[TokenLogprob]] = {}  # noqa: RUF012
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}  # noqa: RUF012
    errors: dict[int, str] = {}  # noqa: RUF012

    def until(self, ends: Mapping[int, int], spans: Sequence[Span]) -> StepResult:
        """As if no draft had been verified behind the ends of answers. ends: by span, how many of
        its tokens belong to its answer."""
        drafted = list(self.drafted or [span.drafts for span in spans])
        accepted = list(self.accepted)
        for i, end in ends.items():
            if end <= accepted[i]:
                drafted[i] = accepted[i] = end
        return self._replace(accepted=accepted, drafted=drafted) if ends else self


class RequestStart(NamedTuple):
    """What is known of an answer when its first tokens come. queued: seconds until it ran;
    num_cached: positions that came from the prefix cache; off_reason: why it does not speculate;
    stop_ids: tokens that end it, the model's own among them."""

    method: str
    off_reason: str | None
    num_cached: int
    queued: float
    prompt_logprobs: Sequence[TokenLogprob | None]
    stop_ids: frozenset[int]


class TokenEvent(NamedTuple):
    """What one step made of one answer; it crosses the process border as it is.

    key: what the caller named the prompt by; choice: which of its n answers. tokens: made in this
    step; finish_reason, stop_reason, error: with the last ones. drafted: drafts verified in this
    step; accepted: how many of `tokens`, from the first on, were drafts; logprobs: one per token
    where asked for; context: positions before this step; start: with the answer's first event.
    made: drafts made for this step, verified or not; None where it could not have any.
    """

    key: Hashable
    choice: int
    tokens: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    drafted: int = 0
    accepted: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    context: int = 0
    start: RequestStart | None = None
    made: int | None = None
