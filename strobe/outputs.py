"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strobe.request import FinishReason, Request


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
        counts = request.speculation
        reason = request.off_reason
        if reason is None and not counts.steps:
            if request.num_output < 2:
                reason = "the answer ended before the first draft"
            elif request.method == "ngram":
                reason = "no earlier text matched the newest tokens"
            else:
                reason = "no step was given drafts to verify"
        return SpeculationReport(
            used=counts.steps > 0,
            method=request.method,
            steps=counts.steps,
            drafted=counts.drafted,
            accepted=counts.accepted,
            acceptance_length=counts.acceptance_length,
            accepted_per_position=list(counts.per_position),
            off_reason=reason,
        )


@dataclass
class CompletionOutput:
    """One answer. token_ids hold the end token, text does not. error: the sentence that says what
    was wrong, where finish_reason is "error"."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationReport | None = None
    error: str | None = None


@dataclass
class RequestOutput:
    """One prompt and its n answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True)
class StreamDelta:
    """News of one answer: new text and tokens, and the whole answer so far in `output`."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    output: CompletionOutput

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None


Prompt = str | list[int] | dict[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
