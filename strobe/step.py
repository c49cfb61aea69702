"""The values that cross rooms in one engine step: plain data that can be pickled, printed, sent to
another process and run again. Imports no torch.

A prefill chunk, a decode step and the verification of a draft are one thing, a Span: append tokens
to a sequence and compute logits at its last rows.

    start                              start + num_context_rows  start + num_rows
      |  context: prompt tokens, or the     |  drafts, known to the host   |
      |  newest token (TAIL)                |  or proposed on the device   |
      +-------------------------------------+------------------------------+
                                        logits at the last `num_logits` rows
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from strobe.request import FinishReason, TokenLogprob
    from strobe.sampling_params import SamplingParams

TAIL = -1
"""Among a span's tokens: the sequence's newest token, which has no K/V yet. Only the device is sure
to know it, since results may be one step away."""


class Span(NamedTuple):
    """Rows to append to one sequence.

    slot: the request's row in the device's state. start: positions that certainly have K/V when the
    step runs; max_start: the maximum number, which is larger while results are in flight. tokens:
    those the host knows, TAIL for the newest one. num_drafts: drafts at the span's end. method: the
    device's proposer of these drafts; None if they are the last of `tokens`. num_logits: rows with
    logits, counted from the end. scored_tokens: prompt tokens after the span's first rows whose log
    probabilities are requested, each with the `top_logprobs` highest ones.
    """

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
        return len(self.tokens) - (self.num_drafts if self.method is None else 0)


def num_rows(spans: Sequence[Span], num_verified: int | None = None) -> int:
    """Count the rows of all spans. num_verified: device drafts that are verified; None: all."""
    rows = sum([span.num_rows for span in spans])
    if num_verified is None:
        return rows
    num_proposed = sum([span.num_drafts for span in spans if span.method is not None])
    return rows - max(num_proposed - num_verified, 0)


class PageWrite(NamedTuple):
    """New entries of one request's page table: `pages` from column `first` on. group: the table's
    page group."""

    slot: int
    first: int
    pages: tuple[int, ...]
    group: int = 0


class Admission(NamedTuple):
    """A request that takes a slot. length: positions that have K/V already. tokens: its tokens so
    far, the first num_prompt of them the prompt. stop_ids: tokens that are banned before
    min_tokens."""

    slot: int
    length: int
    tokens: tuple[int, ...]
    num_prompt: int
    sampling: SamplingParams
    seed: int
    sibling: int
    stop_ids: frozenset[int]


class StateCopy(NamedTuple):
    """A copy between a slot's states of recurrent layers and a row of kept ones, before the step.
    length: positions in the state. keeps: from the slot to the row; otherwise from the row to the
    slot."""

    slot: int
    row: int
    length: int
    keeps: bool


class HostCopy(NamedTuple):
    """A copy between host memory and the device, of a page or of a kept state. device: the page or
    the state's row; host: the row in host memory; group: the page's group."""

    device: int
    host: int
    group: int = 0
    is_state: bool = False


class HostCopies(NamedTuple):
    """Copies between host memory and the device, in this order. evicted: to host memory, before the
    step overwrites them; loaded: to the device, for later steps; saved: to host memory."""

    evicted: tuple[HostCopy, ...] = ()
    loaded: tuple[HostCopy, ...] = ()
    saved: tuple[HostCopy, ...] = ()


class ShadowWork(NamedTuple):
    """A step's work for the scores of drafters in shadow mode. observed: spans whose rows the
    drafters read; proposals: by drafter, spans of a newest token after which it drafts."""

    observed: tuple[int, ...] = ()
    proposals: tuple[tuple[str, tuple[int, ...]], ...] = ()


class ScoredBlock(NamedTuple):
    """A drafter's block in shadow mode, compared with the answer. start: positions before it;
    num_accepted: leading drafts that the answer has, of num_drafts."""

    drafter: str
    start: int
    num_drafts: int
    num_accepted: int


class Plan(NamedTuple):
    """The requests that run in a step, with their rows. pages: page-table entries that are new to
    the device; admitted: requests that are new to it. num_verified: number of device
    drafts to verify, over all spans; the device picks the most likely ones; None: all. confidence:
    per draft position, the probabilities at rising evidence that a draft is accepted if the drafts
    before it are (`strobe/speculation/acceptance.py`). states: copies of recurrent states, in this
    order. host: copies between the tiers of the prefix cache. shadow: in shadow mode only."""

    spans: tuple[Span, ...] = ()
    pages: tuple[PageWrite, ...] = ()
    admitted: tuple[Admission, ...] = ()
    num_verified: int | None = None
    confidence: tuple[tuple[float, ...], ...] = ()
    states: tuple[StateCopy, ...] = ()
    shadow: ShadowWork | None = None
    host: HostCopies | None = None

    @property
    def has_work(self) -> bool:
        """Whether there is anything to launch, if only copies."""
        return bool(self.spans) or self.host is not None

    @property
    def methods(self) -> dict[str, list[int]]:
        """Spans with device drafts, by method."""
        spans_by_method: dict[str, list[int]] = {}
        for i, span in enumerate(self.spans):
            if span.method is not None:
                spans_by_method.setdefault(span.method, []).append(i)
        return spans_by_method

    def check(self, num_slots: int, num_pages: Sequence[int]) -> None:
        """Raises AssertionError for a slot or page that does not exist. num_pages: of each page
        group."""
        for part in (*self.spans, *self.pages, *self.admitted, *self.states):
            assert 0 <= part.slot < num_slots, f"slot {part.slot} of {num_slots} in {part}"
        for write in self.pages:
            assert 0 <= write.group < len(num_pages), f"a page group that does not exist: {write}"
            last = num_pages[write.group]
            assert all(0 < page < last for page in write.pages), f"a page beyond {last}: {write}"
        for copy in () if self.host is None else itertools.chain(*self.host):
            last = num_pages[copy.group]
            assert copy.is_state or 0 < copy.device < last, f"a page beyond {last}: {copy}"


class StepResult(NamedTuple):
    """The results of a plan's spans, on the host.

    tokens: per span, the target's tokens, one more than num_accepted drafts. rows: rows that the
    target ran, padding included; seconds: duration of the step. num_verified: drafts verified per
    span, if the device chose the number; margins: for each device draft, its logit minus the second
    largest one. logprobs, prompt_logprobs, drafts: by span, if requested. errors: by span, a
    sentence that says why its request ends.
    """

    tokens: list[list[int]]
    num_accepted: list[int]
    rows: int = 0
    seconds: float | None = None
    num_verified: list[int] | None = None
    margins: list[list[float]] | None = None
    logprobs: dict[int, list[TokenLogprob]] = {}  # noqa: RUF012
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}  # noqa: RUF012
    drafts: dict[int, Sequence[int]] = {}  # noqa: RUF012
    errors: dict[int, str] = {}  # noqa: RUF012

    def truncate(self, ends: Mapping[int, int], spans: Sequence[Span]) -> StepResult:
        """Count only drafts up to the ends of answers. ends: by span, the number of its tokens that
        belong to its answer."""
        num_verified = list(self.num_verified or [span.num_drafts for span in spans])
        num_accepted = list(self.num_accepted)
        for i, end in ends.items():
            if end <= num_accepted[i]:
                num_verified[i] = num_accepted[i] = end
        return self._replace(num_accepted=num_accepted, num_verified=num_verified) if ends else self


class RequestStart(NamedTuple):
    """Facts about an answer that are known with its first tokens. queue_time: seconds in the queue;
    num_cached: prompt positions served from the prefix cache; num_host_cached: of these from host
    memory; off_reason: reason for no
    speculation; stop_ids: tokens that end the answer, the model's own included."""

    method: str
    off_reason: str | None
    num_cached: int
    queue_time: float
    prompt_logprobs: Sequence[TokenLogprob | None]
    stop_ids: frozenset[int]
    num_host_cached: int = 0


class TokenEvent(NamedTuple):
    """The outcome of one step for one answer, as it crosses the process border.

    key: the caller's name for the prompt; sibling: index among its n answers. tokens: new tokens;
    finish_reason, stop_reason, error: set with the last ones. num_proposed: drafts proposed for
    this step, None if the request could not draft; num_verified: of these verified; num_accepted:
    leading `tokens` that were drafts. logprobs: one per token, if requested; num_computed_tokens:
    positions before this step; start: with the answer's first event; drafts: those proposed, if
    requested, and their margins, none or 0 if unknown; scored: drafters' blocks that this step
    has decided, in shadow mode.
    """

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
    drafts: Sequence[int] = ()
    margins: Sequence[float] = ()
    scored: Sequence[ScoredBlock] = ()
