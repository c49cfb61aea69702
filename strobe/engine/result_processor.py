"""Applies a step's result to its requests: tokens, stop rules, counts and events. Imports no
torch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from strobe.config import Limits
from strobe.counters import EngineStats
from strobe.request import FinishReason, Request, Status
from strobe.step import RequestStart, StepResult, TokenEvent

logger = logging.getLogger(__name__)


class SpanCounts(NamedTuple):
    """A span's counts for its event. num_proposed: drafts proposed, None if the request could not
    draft; num_verified: of these verified; num_computed_tokens: positions before the step."""

    num_proposed: int | None
    num_verified: int
    num_computed_tokens: int


class ResultProcessor:
    """Applies results to requests and counts them."""

    def __init__(self, limits: Limits):
        self.stats = EngineStats()
        self.limits = limits

    def apply(self, request: Request, i: int, result: StepResult, counts: SpanCounts) -> TokenEvent:
        """Append a span's tokens up to the request's end; return its event."""
        tokens = result.tokens[i]
        request.error = result.errors.get(i)
        count = 0
        reason: FinishReason | None = "error"
        if request.error is None:
            count, reason = self._find_stop(request, tokens)
        committed = tokens[:count]  # up to the answer's end
        request.tokens += committed
        if reason is not None:
            request.status = Status.FINISHED
            request.finish_reason = reason
        drafts = result.drafts.get(i, ())
        margins = result.margins[i] if drafts and result.margins else ()
        logprobs = result.logprobs.get(i)
        return TokenEvent(
            key=request.key,
            sibling=request.sibling,
            tokens=committed,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            num_verified=counts.num_verified,
            num_accepted=min(result.num_accepted[i], count),
            logprobs=[] if logprobs is None else logprobs[:count],
            num_computed_tokens=counts.num_computed_tokens,
            start=None if request.started else self._start_of(request),
            num_proposed=counts.num_proposed,
            drafts=drafts,
            margins=margins,
        )

    def make_event(self, request: Request) -> TokenEvent:
        """Make an event without tokens of a request that has ended."""
        return TokenEvent(
            key=request.key,
            sibling=request.sibling,
            tokens=[],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            start=None if request.started else self._start_of(request),
        )

    def _start_of(self, request: Request) -> RequestStart:
        """Return the facts that a request's first event brings."""
        request.started = True
        return RequestStart(
            method=request.method,
            off_reason=request.off_reason,
            num_cached=request.num_cached or 0,
            queue_time=request.queue_time,
            prompt_logprobs=tuple(request.prompt_logprobs),
            stop_ids=request.stop_ids,
            num_host_cached=request.num_host_cached,
        )

    def _find_stop(self, request: Request, tokens: list[int]) -> tuple[int, FinishReason | None]:
        """Return the number of tokens that belong to the answer, and its finish reason if it ends
        there."""
        count, reason = self._find_end(request, tokens)
        if request.repetition_detector is None:
            return count, reason
        for num_read, token in enumerate(tokens[:count], start=1):
            ends_otherwise = num_read == count and reason is not None
            if request.repetition_detector.push(token) and not ends_otherwise:
                request.stop_reason = None
                return num_read, "repetition"
        return count, reason

    def _find_end(self, request: Request, tokens: list[int]) -> tuple[int, FinishReason | None]:
        """Find the answer's end as `_find_stop` does, by its end tokens and limits alone."""
        sampling = request.sampling
        num_output = request.num_output
        room = self.limits.max_model_len - len(request.tokens)
        if sampling.max_tokens is not None:
            room = min(room, sampling.max_tokens - num_output)
        if not request.stop_ids.isdisjoint(tokens):
            # Before min_tokens, only a finished grammar allows an end token.
            min_tokens = 0 if sampling.structured_outputs is not None else sampling.min_tokens
            for i, token in enumerate(tokens[:room]):
                if token in request.stop_ids and num_output + i >= min_tokens:
                    if token in sampling.stop_token_ids:
                        request.stop_reason = token
                    return i + 1, "stop"
        return (room, "length") if len(tokens) >= room else (len(tokens), None)

    def count(self, events: Sequence[tuple[Request, TokenEvent]]) -> None:
        """Add a step's events to the counters. A stop string, which is detected later, does not
        change them."""
        stats = self.stats
        outcomes: Counter[tuple[int, int, int]] = Counter()
        """How many requests had each (num_verified, num_accepted, num_proposed)."""
        logs_steps = logger.isEnabledFor(logging.DEBUG)
        for request, event in events:
            stats.generation_tokens += len(event.tokens)
            num_proposed = event.num_proposed
            if num_proposed is None:
                continue
            num_verified = event.num_verified
            num_accepted = event.num_accepted
            request.draft_counts.add(num_verified, num_accepted, num_proposed)
            outcomes[num_verified, num_accepted, num_proposed] += 1
            if num_verified and logs_steps:
                _log_step(request, event)
        for (num_verified, num_accepted, num_proposed), times in outcomes.items():
            stats.draft_counts.add(num_verified, num_accepted, num_proposed, times=times)


def _log_step(request: Request, event: TokenEvent) -> None:
    """Log a step that verified drafts of a request."""
    counts = request.draft_counts
    logger.debug(
        "verify request=%s accepted=%d/%d committed=%d acceptance_rate=%.3f",
        request.id,
        event.num_accepted,
        event.num_verified,
        len(event.tokens),
        counts.num_accepted / counts.num_verified,
    )
