"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strobe.request import FinishReason, Request, SpeculationCount, TokenLogprob


@dataclass(frozen=True)
class SpeculationReport:
    """How one answer was drafted.

    used: some step verified drafts. steps: verify steps that carried drafts. acceptance_length:
    1 + accepted / steps, None without a step. accepted_per_position[i]: steps that accepted draft
    i. off_reason: why speculation was not used, None where it was.
    """

    used: bool
    method: str
    steps: int
    drafted: int
    accepted: int
    acceptance_length: float | None
    accepted_per_position: list[int]
    off_reason: str | None

    @staticmethod
    def of(request: Request) -> SpeculationReport:
        made = request.num_output
        return SpeculationReport.from_counts(
            request.speculation, request.method, request.off_reason, made
        )

    def as_dict(self) -> dict[str, Any]:
        """Its fields by name."""
        return dict(vars(self))

    @staticmethod
    def from_counts(
        counts: SpeculationCount, method: str, off_reason: str | None, made: int
    ) -> SpeculationReport:
        """made: tokens of the answer. off_reason: known from the start, None where it may draft."""
        reason = off_reason
        if reason is None and not counts.steps:
            if made < 2:
                reason = "the answer ended before the first draft"
            elif method == "ngram":
                reason = "no earlier text matched the newest tokens"
            else:
                reason = "no step was given drafts to verify"
        return SpeculationReport(
            used=counts.steps > 0,
            method=method,
            steps=counts.steps,
            drafted=counts.drafted,
            accepted=counts.accepted,
            acceptance_length=counts.acceptance_length,
            accepted_per_position=list(counts.per_position),
            off_reason=reason,
        )


class Logprob(NamedTuple):
    """A token's natural log probability under the model itself, before temperature, penalties and
    masks; its rank from 1; its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One answer. token_ids hold the end token, text does not. error: the sentence that says what
    was wrong, where finish_reason is "error". logprobs: where asked for, one entry per token, by
    token id: the token made and the most probable ones."""

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
    """One prompt and its n answers. num_cached_tokens: positions of the prompt that came from the
    prefix cache; prompt_logprobs: where asked for, one entry per prompt token, None for the first.
    """

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
    """News of one answer: new text and tokens, and the whole answer so far in `output`.

    pieces: each new token's share of the raw text, also of what is held back yet or cut off at a
    stop string; logprobs: one per new token where asked for; drafted: drafts verified in this step;
    accepted: how many of the new tokens, from the first on, were drafts; finished: whether these
    are the last news, whatever `output` has grown to since.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    output: CompletionOutput
    pieces: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    drafted: int = 0
    accepted: int = 0
    finished: bool = False


Prompt = str | list[int] | dict[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
