"""What became of a request in a step: tokens, stop rules, counts, the event. Imports no torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from strobe.config import Limits
from strobe.request import FinishReason, Request, SpeculationCount, Status
from strobe.step import RequestStart, StepResult, TokenEvent

logger = logging.getLogger(__name__)


@dataclass
class EngineStats:
    """What was counted of all requests. prefix_queries, prefix_hits: tokens of admitted ones, and
    those found in cached pages."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    speculation: SpeculationCount = field(default_factory=SpeculationCount)


class Outcomes:
    """Applies results to requests and counts them."""

    def __init__(self, limits: Limits):
        self.limits, self.stats = limits, EngineStats()

    def take(
        self,
        request: Request,
        start: int,
        made: int | None,
        drafted: int,
        i: int,
        result: StepResult,
    ) -> TokenEvent:
        """Append a span's tokens up to the first one that ends the request. made: drafts, None
        where there could be none; drafted: those verified."""
        tokens = result.tokens[i]
        request.error = result.errors.get(i)
        count, reason = (0, "error") if request.error is not None else self._ending(request, tokens)
        kept, accepted = tokens[:count], min(result.accepted[i], count)  # up to the answer's end
        request.tokens += kept
        if reason is not None:
            request.status, request.finish_reason = Status.FINISHED, reason
        logprobs = result.logprobs.get(i, [])[:count]
        counts = {"made": made, "drafted": drafted, "accepted": accepted, "context": start}
        return self.event(request, kept, logprobs=logprobs, **counts)

    def event(self, request: Request, tokens: list[int], **more: Any) -> TokenEvent:
        """more: fields of the event that the request does not know."""
        start = None
        if not request.started:
            request.started = True
            method = request.method, request.off_reason
            admission = request.num_cached or 0, request.queued
            scores = tuple(request.prompt_logprobs)
            start = RequestStart(*method, *admission, scores, request.stop_ids)
        ending = request.finish_reason, request.stop_reason, request.error
        return TokenEvent(request.key, request.sibling, tokens, *ending, start=start, **more)

    def _ending(self, request: Request, tokens: list[int]) -> tuple[int, FinishReason | None]:
        """How many of `tokens` the request takes, and why it ends there, if it does."""
        sampling, made = request.sampling, request.num_output
        room = self.limits.max_model_len - len(request.tokens)
        if sampling.max_tokens is not None:
            room = min(room, sampling.max_tokens - made)
        if not request.stop_ids.isdisjoint(tokens):
            # Before min_tokens only a grammar that is at its end lets an end token be made.
            least = 0 if sampling.structured_outputs is not None else sampling.min_tokens
            for i, token in enumerate(tokens[:room]):
                if token in request.stop_ids and made + i >= least:
                    if token in sampling.stop_token_ids:
                        request.stop_reason = token
                    return i + 1, "stop"
        return (room, "length") if len(tokens) >= room else (len(tokens), None)

    def count(self, request: Request, event: TokenEvent) -> None:
        """Count what a step made. A stop string, which is found later, takes nothing back."""
        self.stats.generation_tokens += len(event.tokens)
        if event.made is None:
            return
        counts, drafted, accepted = request.speculation, event.drafted, event.accepted
        counts.add(drafted, accepted, event.made)
        self.stats.speculation.add(drafted, accepted, event.made)
        if drafted and logger.isEnabledFor(logging.DEBUG):
            line = "verify request=%s accepted=%d/%d committed=%d acceptance_rate=%.3f"
            rate = counts.accepted / counts.drafted
            logger.debug(line, request.id, accepted, drafted, len(event.tokens), rate)
