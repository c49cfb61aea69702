"""Generation of one prompt's answers: from the engine's events to text, parsed output, metrics."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from strobe.counters import DraftCounts
from strobe.outputs import AnswerBuilder, SpeculationReport, StreamDelta
from strobe.request import CUT_SHORT, DEFAULT_SCHEDULING, SchedulingOptions, TokenLogprob
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process.client import PromptRejected
from strobe.server.generation import bodies
from strobe.server.parsers.segment import Parser, Plain, Segment
from strobe.server.schema.field_errors import FieldError, FieldNames
from strobe.server.serving import Serving
from strobe.server.telemetry.server_metrics import CONTEXT_BOUNDS, CONTEXTS, ServerMetrics
from strobe.speculation.shadow.report import Group
from strobe.step import ScoredBlock, TokenEvent

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationJob:
    """A prompt to answer. parser: makes the parser of each answer's text. names: the API's names
    of the fields in the engine's errors. started_at: the request's arrival, by time.monotonic."""

    prompt_ids: list[int]
    params: SamplingParams
    request_id: str
    parser: Callable[[], Parser] = Plain
    names: FieldNames = field(default_factory=FieldNames)
    started_at: float = field(default_factory=time.monotonic)
    scheduling: SchedulingOptions = DEFAULT_SCHEDULING


class Progress(NamedTuple):
    """One step of one answer: its new text, raw and as segments."""

    choice: ChoiceState
    delta: StreamDelta
    segments: list[Segment]

    @property
    def finished(self) -> bool:
        return self.delta.finished


class ChoiceState:
    """State of one answer during generation."""

    def __init__(
        self,
        serving: Serving,
        metrics: Callable[[], ServerMetrics],
        job: GenerationJob,
        index: int,
        started_at: float,
    ):
        """metrics: returns the metrics of the engine that answers, which changes if it ends."""
        self.job = job
        self.index = index
        self.parser = job.parser()
        self.builder = AnswerBuilder(
            serving.tokenizer, job.params, request_id=job.request_id, index=index
        )
        self.output = self.builder.output
        self.draft_counts = self.builder.draft_counts
        self._serving = serving
        self._metrics_of_engine = metrics
        self._started_at = self._last_token_at = started_at
        self.queue_time: float | None = None
        self.first_token_seconds: float | None = None
        """Seconds from the request's arrival to its first token."""
        self.logprobs: list[TokenLogprob] = []
        self.pieces: list[str] = []
        self._scored: list[tuple[Group, ScoredBlock]] = []

    def _group(self, block: ScoredBlock) -> Group:
        """Return where a block of shadow mode is counted."""
        return Group(
            drafter=block.drafter,
            kind=self._serving.prompt_kind(self.job.prompt_ids, self.job.params),
            phase=self.parser.phase,
            context=CONTEXTS[bisect_right(CONTEXT_BOUNDS, block.start)],
        )

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def _metrics(self) -> ServerMetrics:
        return self._metrics_of_engine()

    def push(self, event: TokenEvent) -> Progress:
        """Add a step's event."""
        if event.start is not None:
            self.queue_time = event.start.queue_time
        first = not self.output.token_ids
        delta = self.builder.push(event)
        self.logprobs += delta.logprobs
        self.pieces += delta.pieces
        segments = self.parser.push(delta.text)
        if delta.finished:
            cut = self.output.finish_reason in CUT_SHORT
            segments += self.parser.finish(cut=cut)
        if event.num_verified:
            self._metrics.record_verified(
                num_verified=event.num_verified,
                num_accepted=delta.num_accepted,
                context_tokens=event.num_computed_tokens,
                phase=self.parser.phase,
            )
        self._record_latency(first, len(delta.token_ids))
        if event.scored:
            self._scored += [(self._group(block), block) for block in event.scored]
        if delta.finished:
            self.record_finished()
        return Progress(self, delta, segments)

    def _record_latency(self, first: bool, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.monotonic()
        if first:
            self.first_token_seconds = now - self._started_at
            self._metrics.record_first_token(self.first_token_seconds)
        else:
            self._metrics.record_inter_token(now - self._last_token_at, num_tokens)
        self._last_token_at = now

    def record_finished(self) -> None:
        """Record a finished or aborted answer in the metrics."""
        self._serving.retry_estimator.record_finished()
        self._serving.shadow.add(self._scored)
        self._scored = []
        self._metrics.record_finished(
            reason=self.output.finish_reason or "abort",
            seconds=time.monotonic() - self._started_at,
            queue_seconds=self.queue_time,
            first_seconds=self.first_token_seconds,
            prompt_tokens=len(self.job.prompt_ids),
            generation_tokens=len(self.output.token_ids),
        )


class PromptRun:
    """Generation of all answers to one prompt."""

    def __init__(self, serving: Serving, job: GenerationJob):
        """Submit the prompt to the engine. Raises ApiError, EngineDead."""
        self.job = job
        self.rejected = False
        self.num_cached = 0
        self.num_host_cached = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._generation = serving.submit(
            job.prompt_ids, job.params, job.request_id, job.scheduling
        )
        self._engines = serving.metrics.engines
        self.choices = [
            ChoiceState(
                serving, metrics=self._metrics, job=job, index=index, started_at=job.started_at
            )
            for index in range(job.params.n)
        ]
        self._metrics().record_request(job.params.n, job.params.max_tokens)

    async def steps(self) -> AsyncIterator[list[Progress]]:
        """Yield the progress of each step. Leaving early aborts unfinished answers. Raises
        FieldError, EngineDead."""
        try:
            async for events in self._generation:
                # A stop string ends an answer here, while the engine may run further steps of it.
                yield [self._take(e) for e in events if not self.choices[e.sibling].finished]
        except PromptRejected as error:
            self.rejected = True
            raise self.to_field_error(str(error)) from None
        finally:
            self._generation.close()

    def to_field_error(self, error: str) -> FieldError:
        """Convert the engine's error, with the API's name of the field. A grammar's error is also
        logged, up to the first quote of the client's text."""
        prefix = "structured_outputs:"
        has_tools = getattr(self.job.params.structured_outputs, "alternative", None)
        if has_tools and error.startswith(prefix):  # the grammar is the tools', too
            error = f"structured_outputs or tools:{error.removeprefix(prefix)}"
        field_error = self.job.names.option_error(error)
        if error.startswith("structured_outputs"):
            sentence = str(field_error).partition('"')[0]
            logger.warning("request %s: %s", self.job.request_id, sentence)
        return field_error

    def close(self) -> None:
        """Abort unfinished answers."""
        self._generation.close()

    @property
    def abandoned(self) -> bool:
        return self._generation.closed and any(not choice.finished for choice in self.choices)

    @property
    def engine(self) -> int:
        """The number of the engine that answers."""
        return self._generation.engine

    def _metrics(self) -> ServerMetrics:
        return self._engines[self.engine]

    @property
    def decoded(self) -> tuple[float, float]:
        """The ends of the first and the last step with tokens, by the engine's clock."""
        return self._generation.first_ended, self._generation.last_ended

    def _take(self, event: TokenEvent) -> Progress:
        if event.start is not None and event.sibling == 0:
            self.num_cached = event.start.num_cached
            self.num_host_cached = event.start.num_host_cached
            if self.job.params.prompt_logprobs is not None:
                self.prompt_logprobs = list(event.start.prompt_logprobs)
        progress = self.choices[event.sibling].push(event)
        if progress.finished and event.finish_reason is None:
            self._generation.finish(event.sibling, "stop")
        if progress.finished and all(choice.finished for choice in self.choices):
            self._metrics().record_longest(
                max(len(choice.output.token_ids) for choice in self.choices)
            )
        return progress


def usage(runs: Sequence[PromptRun]) -> bodies.Usage:
    """Return the tokens of the prompts and of all answers so far."""
    prompt = sum(len(run.job.prompt_ids) for run in runs)
    completion_tokens = sum(len(choice.output.token_ids) for run in runs for choice in run.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": _prompt_details(runs),
    }


def _prompt_details(runs: Sequence[PromptRun]) -> bodies.PromptTokensDetails:
    num_cached = sum(run.num_cached for run in runs)
    num_host_cached = sum(run.num_host_cached for run in runs)
    if not num_host_cached:
        return {"cached_tokens": num_cached}
    tiers: bodies.CachedTokensDetails = {
        "device": num_cached - num_host_cached,
        "host": num_host_cached,
    }
    return {"cached_tokens": num_cached, "cached_tokens_details": tiers}


def speculation(runs: Sequence[PromptRun]) -> bodies.SpeculationReport:
    """Return the speculation report of all answers together."""
    choices = [choice for run in runs for choice in run.choices]
    total = DraftCounts()
    for choice in choices:
        total.merge(choice.draft_counts)
    first = choices[0].builder
    num_tokens = max(len(choice.output.token_ids) for choice in choices)
    report = SpeculationReport.from_counts(total, first.method, first.off_reason, num_tokens)
    first_ended, last_ended = zip(*[run.decoded for run in runs], strict=True)
    seconds = max(last_ended) - min(first_ended)
    return {**report.as_dict(), "decode_seconds": round(seconds, 6) or None}
