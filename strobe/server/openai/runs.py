"""One prompt's answers on their way from the engine to a client: text, parsing, counting."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strobe.outputs import AnswerBuilder, SpeculationReport, StreamDelta
from strobe.request import DEFAULT_SCHEDULING, DraftCounts, SchedulingOptions, TokenLogprob
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process.client import PromptRefused
from strobe.server.openai.protocol.errors import BadField
from strobe.server.parsers import Parsed, Parser
from strobe.server.parsers.chain import Plain
from strobe.server.serving import Serving
from strobe.step import TokenEvent

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What to answer. parser: makes the parser of each answer's text. constraint: the request's
    field that structured output came from. began: when the request came, by time.monotonic."""

    prompt_ids: list[int]
    params: SamplingParams
    request_id: str
    parser: Callable[[], Parser] = Plain
    constraint: str = "structured_outputs"
    began: float = field(default_factory=time.monotonic)
    place: SchedulingOptions = DEFAULT_SCHEDULING


class Progress(NamedTuple):
    """What a step brought to one answer: new text, and what that turned out to be."""

    choice: Choice
    delta: StreamDelta
    parsed: Parsed

    @property
    def finished(self) -> bool:
        return self.delta.finished


class Choice:
    """One answer being made."""

    def __init__(self, serving: Serving, job: Job, index: int, began: float):
        self.job, self.index, self.parser = job, index, job.parser()
        self.answer = AnswerBuilder(
            serving.tokenizer, job.params, request_id=job.request_id, index=index
        )
        self.output, self.counts = self.answer.output, self.answer.draft_counts
        self._serving, self._began, self._last = serving, began, began
        self.queued: float | None = None
        self.first: float | None = None
        """Seconds from the request's arrival until its first token."""
        self.logprobs: list[TokenLogprob] = []
        self.pieces: list[str] = []

    @property
    def ended(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def report(self) -> SpeculationReport:
        return self.answer.report

    def push(self, event: TokenEvent) -> Progress:
        """Take in a step's event of this answer."""
        if event.start is not None:
            self.queued = event.start.queue_time
        first = not self.output.token_ids
        delta = self.answer.push(event)
        self.logprobs += delta.logprobs
        self.pieces += delta.pieces
        parsed = self.parser.push(delta.text)
        if delta.finished:
            rest = self.parser.finish()
            parsed = Parsed(
                parsed.reasoning + rest.reasoning,
                parsed.content + rest.content,
                parsed.calls + rest.calls,
            )
        if event.num_verified:
            self._serving.metrics.verified(
                drafted=event.num_verified,
                accepted=delta.accepted,
                context=event.num_computed_tokens,
                phase=self.parser.phase,
            )
        self._clock(first, len(delta.token_ids))
        if delta.finished:
            self.count()
        return Progress(self, delta, parsed)

    def _clock(self, first: bool, made: int) -> None:
        if not made:
            return
        now = time.monotonic()
        if first:
            self.first = now - self._began
            self._serving.metrics.first_token(self.first)
        else:
            self._serving.metrics.inter_token(now - self._last, made)
        self._last = now

    def count(self) -> None:
        """Have this answer counted once it has ended, or been given up."""
        self._serving.pace.ended()
        self._serving.metrics.finished(
            reason=self.output.finish_reason or "abort",
            seconds=time.monotonic() - self._began,
            queue_seconds=self.queued,
            first_seconds=self.first,
            prompt_tokens=len(self.job.prompt_ids),
            generation_tokens=len(self.output.token_ids),
        )


class Run:
    """All answers to one prompt."""

    def __init__(self, serving: Serving, job: Job):
        """Hands the prompt to the engine. Raises Unserved, EngineDead."""
        self.job = job
        self.choices = [Choice(serving, job, index, job.began) for index in range(job.params.n)]
        self.refused = False
        self.num_cached = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._metrics = serving.metrics
        self._generation = serving.submit(job.prompt_ids, job.params, job.request_id, job.place)
        self._metrics.asked(job.params.n, job.params.max_tokens)

    async def steps(self) -> AsyncIterator[list[Progress]]:
        """The progress of each step. Leaving early gives up what still runs. Raises BadField,
        EngineDead."""
        try:
            async for events in self._generation:
                # A stop string ends an answer here, and the engine may have stepped on meanwhile.
                yield [self._take(e) for e in events if not self.choices[e.sibling].ended]
        except PromptRefused as error:
            self.refused = True
            raise self.refusal(str(error)) from None
        finally:
            self._generation.close()

    def refusal(self, error: str) -> BadField:
        """What the engine said, by the name that the request gave the constraint. Of a grammar the
        log says it, too, up to where the client's text is quoted."""
        sentence = error.replace("structured_outputs", self.job.constraint)
        if error.startswith("structured_outputs"):
            logger.warning("request %s: %s", self.job.request_id, sentence.partition('"')[0])
        return BadField(sentence, field_of(sentence))

    def close(self) -> None:
        """Give up: nobody waits any more."""
        self._generation.close()

    @property
    def given_up(self) -> bool:
        return self._generation.closed and any(not choice.ended for choice in self.choices)

    @property
    def decoded(self) -> tuple[float, float]:
        """When the first step with tokens and the newest one ended, by the engine's clock."""
        return self._generation.first_ended, self._generation.last_ended

    def _take(self, event: TokenEvent) -> Progress:
        if event.start is not None and event.sibling == 0:
            self.num_cached = event.start.num_cached
            if self.job.params.prompt_logprobs is not None:
                self.prompt_logprobs = list(event.start.prompt_logprobs)
        progress = self.choices[event.sibling].push(event)
        if progress.finished and event.finish_reason is None:
            self._generation.finish(event.sibling, "stop")
        if progress.finished and all(choice.ended for choice in self.choices):
            self._metrics.longest(max(len(choice.output.token_ids) for choice in self.choices))
        return progress


def field_of(sentence: str) -> str | None:
    """The field that an engine's sentence begins with."""
    word = sentence.split()[0].rstrip(":")
    return word if word.replace(".", "").replace("_", "").isalpha() and word.islower() else None


def usage(runs: Sequence[Run]) -> dict[str, Any]:
    """Tokens of the prompts and of all answers so far."""
    prompt = sum(len(run.job.prompt_ids) for run in runs)
    made = sum(len(choice.output.token_ids) for run in runs for choice in run.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(run.num_cached for run in runs)},
    }


def speculation(runs: Sequence[Run]) -> dict[str, Any]:
    """How the answers were drafted, several together."""
    choices = [choice for run in runs for choice in run.choices]
    total = DraftCounts()
    for choice in choices:
        total.merge(choice.counts)
    first = choices[0].report
    made = max(len(choice.output.token_ids) for choice in choices)
    report = SpeculationReport.from_counts(total, first.method, choices[0].answer.off_reason, made)
    first_ended, last_ended = zip(*[run.decoded for run in runs], strict=True)
    seconds = max(last_ended) - min(first_ended)
    return {**report.as_dict(), "decode_seconds": round(seconds, 6) or None}
