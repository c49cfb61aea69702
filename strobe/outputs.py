"""Outputs and reports that callers receive, and the builder that makes them of engine events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from strobe.counters import DraftCounts, EngineStats
from strobe.request import FinishReason, TokenLogprob
from strobe.sampling_params import SamplingParams
from strobe.step import TokenEvent
from strobe.text.detokenizer import Detokenizer
from strobe.text.tokenizer import Tokenizer

NO_MATCH = "no earlier text matched the newest tokens"
NOT_WORTHWHILE = "drafting promised less than it costs at this load"


class SpeculationFields(TypedDict):
    """The figures of a `SpeculationReport`."""

    used: bool
    method: str
    steps: int
    drafted: int
    accepted: int
    acceptance_length: float | None
    accepted_per_position: list[int]
    off_reason: str | None
    rows_verified: int
    drafts_made: int
    rested_steps: int
    rest_reason: str | None


@dataclass(frozen=True)
class SpeculationReport:
    """Speculation figures of one answer, under the names that JSON has for them. off_reason: reason
    for no speculation, None if it was used; rest_reason: reason for steps without drafts, if there
    are any."""

    method: str
    counts: DraftCounts
    off_reason: str | None = None
    rest_reason: str | None = None

    @property
    def used(self) -> bool:
        """Whether some step verified drafts."""
        return self.counts.steps > 0

    @property
    def steps(self) -> int:
        """Verify steps that carried drafts."""
        return self.counts.steps

    @property
    def drafted(self) -> int:
        """Drafts verified."""
        return self.counts.num_verified

    @property
    def accepted(self) -> int:
        """Drafts accepted."""
        return self.counts.num_accepted

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step that carried drafts; None if there was none."""
        return self.counts.acceptance_length

    @property
    def accepted_per_position(self) -> list[int]:
        """Drafts accepted at each position of the block."""
        return list(self.counts.accepted_per_position)

    @property
    def rows_verified(self) -> int:
        """Rows of the steps that carried drafts."""
        return self.counts.rows

    @property
    def drafts_made(self) -> int:
        """Drafts proposed, verified or not."""
        return self.counts.num_proposed

    @property
    def rested_steps(self) -> int:
        """Steps without drafts."""
        return self.counts.skipped_steps

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={value!r}" for name, value in self.as_dict().items())
        return f"SpeculationReport({figures})"

    def as_dict(self) -> SpeculationFields:
        """Return the figures by the names that JSON has for them."""
        return {
            "used": self.used,
            "method": self.method,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "accepted_per_position": self.accepted_per_position,
            "off_reason": self.off_reason,
            "rows_verified": self.rows_verified,
            "drafts_made": self.drafts_made,
            "rested_steps": self.rested_steps,
            "rest_reason": self.rest_reason,
        }

    @staticmethod
    def from_counts(
        counts: DraftCounts, method: str, off_reason: str | None, num_tokens: int
    ) -> SpeculationReport:
        """Build the report of an answer with num_tokens tokens. off_reason: known from the start,
        None if the answer may draft."""
        reason = off_reason
        rest_reason = None
        if off_reason is None and counts.skipped_steps:
            rest_reason = NO_MATCH if method == "ngram" else NOT_WORTHWHILE
        if reason is None and not counts.steps:
            if num_tokens < 2:
                reason = "the answer ended before the first draft"
            elif method == "ngram":
                reason = NO_MATCH
            else:
                reason = (
                    NOT_WORTHWHILE if counts.skipped_steps else "no step was given drafts to verify"
                )
        return SpeculationReport(
            method=method, counts=counts, off_reason=reason, rest_reason=rest_reason
        )


class Logprob(NamedTuple):
    """A token's natural log probability under the model itself, before temperature, penalties and
    masks; its rank from 1, None if the request named the token; its text."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    """One answer. token_ids include the end token, text does not. error: the sentence for
    finish_reason "error". logprobs: if requested, one entry per token, keyed by token id: the
    sampled token and those with the highest log probabilities."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationReport | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    """One prompt and its n answers. num_cached_tokens: prompt positions served from the prefix
    cache; prompt_logprobs: if requested, one entry per prompt token, None for the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True)
class StreamDelta:
    """New output of one answer: text and tokens, and the whole answer so far in `output`.

    pieces: each new token's share of the raw text, including text that is held back or cut off at a
    stop string; logprobs: one per new token, if requested; num_verified: drafts verified in this
    step; num_accepted: leading new tokens that were drafts; finished: whether this is the last one;
    drafts: with `return_drafts`, those proposed for the step; margins: theirs, none or 0 if
    unknown.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    output: CompletionOutput
    pieces: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    num_verified: int = 0
    num_accepted: int = 0
    finished: bool = False
    drafts: Sequence[int] = ()
    margins: Sequence[float] = ()


Prompt = str | list[int] | dict[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


class AnswerBuilder:
    """Builds one answer from its events; `output` is the answer so far."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, *, request_id: str, index: int = 0
    ):
        self.tokenizer = tokenizer
        self.params = params
        self.request_id = request_id
        self.output = CompletionOutput(index=index)
        if params.logprobs is not None or params.logprob_token_ids:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self.draft_counts = DraftCounts()
        self.method = "none"
        self.off_reason = None
        self._silent_ids = frozenset[int]()
        self._started = False
        self._detokenizer: Detokenizer | None = None

    @property
    def report(self) -> SpeculationReport:
        num_tokens = len(self.output.token_ids)
        return SpeculationReport.from_counts(
            self.draft_counts, self.method, self.off_reason, num_tokens
        )

    def push(self, event: TokenEvent) -> StreamDelta:
        """Add one event and decode its text. A stop string ends the answer here; the engine does
        not know about it."""
        self._start(event)
        if self._detokenizer is None:
            self._detokenizer = self._make_detokenizer()
        output = self.output
        delta = self._detokenizer.push(event.tokens, last=event.finish_reason is not None)
        output.text = self._detokenizer.text
        num_tokens = len(delta.pieces)
        num_accepted = min(event.num_accepted, len(delta.pieces))
        self._add(event, num_tokens, delta.stop)
        return StreamDelta(
            request_id=self.request_id,
            index=output.index,
            text=delta.text,
            token_ids=list(event.tokens[:num_tokens]),
            output=output,
            pieces=delta.pieces,
            logprobs=list(event.logprobs[:num_tokens]),
            num_verified=event.num_verified,
            num_accepted=num_accepted,
            finished=output.finish_reason is not None,
            drafts=event.drafts,
            margins=event.margins,
        )

    def collect(self, event: TokenEvent) -> None:
        """Add one event of an answer that is not streamed; its text is decoded once, at the end.
        Answers with stop strings need `push`, since their text decides where they end."""
        assert not self.params.stop, "a stop string needs decoded text"
        self._start(event)
        self._add(event, len(event.tokens), None)
        if event.finish_reason is not None:
            self.output.text = self.decode()

    def decode(self) -> str:
        """Decode the answer so far, without the token that ended it."""
        ids = self.output.token_ids
        if self.output.finish_reason is not None and ids and ids[-1] in self._silent_ids:
            ids = ids[:-1]
        special = self.params.skip_special_tokens
        return self.tokenizer.decode(ids, skip_special_tokens=special)

    def _start(self, event: TokenEvent) -> None:
        if self._started:
            return
        start = event.start
        self._started = True
        assert start is not None, "an answer's first event has its start"
        self.method = start.method
        self.off_reason = start.off_reason
        if not self.params.include_stop_str_in_output:
            self._silent_ids = start.stop_ids

    def _add(self, event: TokenEvent, num_tokens: int, stop: str | None) -> None:
        """Add the event's first tokens and its counts. stop: the stop string that ends the answer
        there."""
        output = self.output
        logprobs = event.logprobs[:num_tokens]
        output.token_ids += event.tokens[:num_tokens]
        if stop is not None:
            output.finish_reason = "stop"
            output.stop_reason = stop
        elif event.finish_reason is not None:
            output.finish_reason = event.finish_reason
            output.stop_reason = event.stop_reason
            output.error = event.error
        if output.logprobs is not None:
            ranked = not self.params.logprob_token_ids
            output.logprobs += [
                logprobs_by_token(logprob, self.tokenizer, ranked=ranked) for logprob in logprobs
            ]
            output.cumulative_logprob = sum(
                [logprob.logprob for logprob in logprobs], output.cumulative_logprob or 0.0
            )
        if event.num_proposed is not None or event.num_verified:
            num_accepted = min(event.num_accepted, num_tokens)
            self.draft_counts.add(event.num_verified, num_accepted, event.num_proposed)
        if output.finish_reason is not None:
            output.speculation = self.report

    def _make_detokenizer(self) -> Detokenizer:
        params = self.params
        return Detokenizer(
            self.tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            silent_ids=self._silent_ids,
        )


def logprobs_by_token(
    logprob: TokenLogprob, tokenizer: Tokenizer, *, ranked: bool = True
) -> dict[int, Logprob]:
    """Convert one token's log probabilities to vLLM's form: keyed by token id, the token itself
    first. ranked: the others are the top tokens, in order."""
    by_token = {
        token: Logprob(value, rank if ranked else None, tokenizer.token_text(token))
        for rank, (token, value) in enumerate(logprob.top, start=1)
    }
    chosen = Logprob(logprob.logprob, logprob.rank, tokenizer.token_text(logprob.token))
    return {
        logprob.token: chosen,
        **{t: entry for t, entry in by_token.items() if t != logprob.token},
    }


@dataclass(frozen=True)
class Counter:
    """A total that only grows."""

    name: str
    value: int


@dataclass(frozen=True)
class Vector:
    """Totals by position, from 0."""

    name: str
    values: list[int]


Metric = Counter | Vector

METRICS = (
    ("draft_counts.steps", "vllm:spec_decode_num_drafts", "Verify steps that carried drafts."),
    ("draft_counts.num_verified", "vllm:spec_decode_num_draft_tokens", "Tokens drafted."),
    ("draft_counts.num_accepted", "vllm:spec_decode_num_accepted_tokens", "Drafts accepted."),
    (
        "draft_counts.accepted_per_position",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts accepted at each position of the block.",
    ),
    (
        "draft_counts.num_proposed",
        "strobe:spec_decode_drafts_made",
        "Drafts proposed, verified or not.",
    ),
    (
        "draft_counts.skipped_steps",
        "strobe:spec_decode_rested_steps",
        "Steps without drafts of requests that may draft.",
    ),
    ("prompt_tokens", "vllm:prompt_tokens", "Prompt tokens computed."),
    ("generation_tokens", "vllm:generation_tokens", "Tokens generated."),
    ("preemptions", "vllm:num_preemptions", "Requests preempted for lack of K/V pages."),
    ("prefix_queries", "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("prefix_hits", "vllm:prefix_cache_hits", "Tokens found in the device's prefix cache."),
    (
        "host_queries",
        "vllm:external_prefix_cache_queries",
        "Tokens that the device's prefix cache did not have, looked up in host memory.",
    ),
    ("host_hits", "vllm:external_prefix_cache_hits", "Tokens found in host memory."),
    ("host_saves", "strobe:kv_offload_saves", "Pages and states copied to host memory."),
    ("host_loads", "strobe:kv_offload_loads", "Pages and states copied back to the device."),
    ("states_kept", "strobe:states_kept", "States of recurrent layers that were kept."),
    ("state_hits", "strobe:state_hits", "Requests that began from a kept state."),
    ("steps", "strobe:engine_steps", "Steps of the engine."),
    ("shadow_requests", "strobe:shadow_answers", "Answers in which shadow mode scores drafters."),
    ("shadow_blocks", "strobe:shadow_blocks", "Blocks that shadow mode has scored."),
    ("shadow_seconds", "strobe:shadow_seconds", "Seconds that shadow mode's scoring took."),
    ("step_seconds", "strobe:step_seconds", "Seconds of all steps in shadow mode."),
)
"""An engine's metrics: attribute of EngineStats, name (vLLM's where vLLM has one), help."""


def collect_metrics(stats: EngineStats) -> list[Metric]:
    """Return an engine's counters."""
    metrics: list[Metric] = []
    for attribute, name, _ in METRICS:
        value = attrgetter(attribute)(stats)
        is_vector = isinstance(value, list)
        metrics.append(Vector(name, list(value)) if is_vector else Counter(name, value))
    return metrics
