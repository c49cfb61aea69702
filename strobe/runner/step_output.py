"""A launched step's output: the only transfer to the host, and the only wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from strobe.models.heads.base import Drafts
from strobe.request import TokenLogprob
from strobe.runner.batch import Layout
from strobe.sampling.logprobs import Scores
from strobe.sampling.state import Sampled
from strobe.step import Plan, Span, StepResult
from strobe.transfer import download

NAN_ERROR = "The model's logits are NaN; try another dtype, or check the checkpoint's weights."

Verified: TypeAlias = tuple[Sampled, Tensor, Scores | None]
"""The device's part of a step's output: tokens and scores of the rows with logits; the number of
accepted drafts [S], so that one token more counts; scores of prompt tokens, in the spans' order."""


@dataclass(eq=False)
class StepOutput:
    """A launched step's output on the device, being copied to the host.

    score_columns: by span, the columns of its scores to report. errors: by span, why its request
    ends. proposed [S, K]: the device's drafts, if a request reads them, and their margins, in host
    memory. draft_readers: the spans whose requests read their drafts, as they are verified.
    started_at, done_at: host clock in seconds. grammars_advanced: whether grammars have consumed
    its tokens; None: some may have.
    """

    plan: Plan
    layout: Layout
    verified: InitVar[Verified]
    score_columns: Mapping[int, slice]
    errors: Mapping[int, str]
    proposed: Drafts
    draft_readers: Mapping[int, Span]
    started_at: float
    done_at: float = 0.0
    grammars_advanced: bool | None = False

    def __post_init__(self, verified: Verified) -> None:
        sampled, num_accepted, prompt_scores = verified
        by_device = self.plan.num_verified is not None
        self._num_verified = download(self.layout.drafts) if by_device else None
        self._tokens, self._num_accepted = download(sampled.tokens), download(num_accepted)
        self._scores, self._prompt_scores = [
            scores and Scores(*map(download, scores)) for scores in (sampled.scores, prompt_scores)
        ]
        self._result: StepResult | None = None
        self._event = None
        if num_accepted.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self, previous_done_at: float = 0.0) -> StepResult:
        """Wait for the step and return its result. previous_done_at: when the previous step was
        done."""
        if self._result is None:
            if self._event is not None:
                self._event.synchronize()
            self.done_at = time.perf_counter()
            self._result = self._to_host(self.done_at - max(self.started_at, previous_done_at))
        return self._result

    def _to_host(self, seconds: float) -> StepResult:
        spans = self.plan.spans
        width = self.layout.shape.max_logits
        num_accepted: list[int] = self._num_accepted.tolist()[: len(spans)]
        rows: list[list[int]] = self._tokens.view(-1, width).tolist()
        tokens = [row[: count + 1] for row, count in zip(rows, num_accepted, strict=False)]
        logprobs: dict[int, list[TokenLogprob]] = {}
        prompt: dict[int, list[TokenLogprob]] = {}
        if self._scores is not None:
            for i, columns in self.score_columns.items():
                logprobs[i] = _token_logprobs(self._scores, i * width, tokens[i], columns)
        if self._prompt_scores is not None:
            first = 0
            for i, (scored, top) in enumerate((s.scored_tokens, s.top_logprobs) for s in spans):
                if scored:
                    prompt[i] = _token_logprobs(self._prompt_scores, first, scored, slice(top))
                    first += len(scored)
        errors = dict(self.errors)
        for i, row in enumerate(tokens):
            entries = *prompt.get(i, ()), *logprobs.get(i, ())
            if min(row) < 0 or any(entry.logprob != entry.logprob for entry in entries):
                errors.setdefault(i, NAN_ERROR)
        on_device = self._num_verified
        margins = self.proposed.margins
        readers = self.draft_readers
        by_span = self.proposed.tokens
        proposed = [()] * len(spans) if by_span is None else by_span.tolist()
        return StepResult(
            tokens,
            num_accepted,
            rows=self.layout.shape.rows,
            seconds=seconds,
            num_verified=None if on_device is None else on_device.tolist()[: len(spans)],
            margins=None if margins is None else margins.tolist()[: len(spans)],
            drafts={i: s.tokens[s.num_context_rows :] or proposed[i] for i, s in readers.items()},
            logprobs=logprobs,
            prompt_logprobs=prompt,
            errors=errors,
        )


def _token_logprobs(
    scores: Scores, first: int, tokens: Sequence[int], columns: slice
) -> list[TokenLogprob]:
    """Return the log probabilities of `tokens`, which are at the rows from `first` on."""
    rows = slice(first, first + len(tokens))
    values = scores.values[rows].tolist()
    ranks = scores.ranks[rows].tolist()
    best = scores.top_values[rows, columns].tolist()
    ids = scores.top_ids[rows, columns].tolist()
    tops = [tuple(zip(i, b, strict=True)) for i, b in zip(ids, best, strict=True)]
    return list(map(TokenLogprob, tokens, values, ranks, tops))
