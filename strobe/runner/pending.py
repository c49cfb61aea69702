"""A launched step and its result: the only transfer to the host, and the only wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from strobe.request import TokenLogprob
from strobe.runner.batch import Layout
from strobe.sampling.logprobs import Scores
from strobe.step import Plan, StepResult
from strobe.transfer import download

NAN_ERROR = "The model's logits are NaN; try another dtype, or check the checkpoint's weights."


class VerifyResult(NamedTuple):
    """The target's decisions, on the device: tokens [S, W], of which num_accepted [S] + 1 count.

    scores: log probabilities of all rows with logits, if requested; prompt_scores: those of prompt
    tokens, in the spans' order.
    """

    tokens: Tensor
    num_accepted: Tensor
    scores: Scores | None = None
    prompt_scores: Scores | None = None


class PendingStep:
    """A launched step whose result is on its way to the host.

    top_logprobs: by span, the number of alternatives to report per token. errors: by span, why its
    request ends. margins [S, K]: of the device's drafts, being copied to the host. started_at,
    done_at: host clock in seconds. grammars_advanced: whether grammars have consumed its tokens;
    None: some may have.
    """

    def __init__(
        self,
        plan: Plan,
        verdict: VerifyResult,
        top_logprobs: Mapping[int, int] = {},
        errors: Mapping[int, str] = {},
        layout: Layout | None = None,
        margins: Tensor | None = None,
        started_at: float = 0.0,
    ):
        self.rows, self.started_at, self.done_at = 0, started_at, 0.0
        self.num_verified, self.margins = None, margins
        if layout is not None:
            self.rows = layout.shape.rows
            self.num_verified = None if plan.num_verified is None else download(layout.drafts)
        self.plan, self.top_logprobs, self.errors = plan, top_logprobs, errors
        scores = [part and Scores(*map(download, part)) for part in verdict[2:]]
        tokens, num_accepted = download(verdict.tokens), download(verdict.num_accepted)
        self._verified = VerifyResult(tokens, num_accepted, *scores)
        self.grammars_advanced: bool | None = False
        self._result: StepResult | None = None
        self._event = None
        if verdict.tokens.device.type == "cuda":
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
        spans, verdict = self.plan.spans, self._verified
        num_accepted: list[int] = verdict.num_accepted.tolist()[: len(spans)]
        tokens: list[list[int]] = verdict.tokens.tolist()
        token_ids = [row[: count + 1] for row, count in zip(tokens, num_accepted, strict=False)]
        logprobs: dict[int, list[TokenLogprob]] = {}
        prompt: dict[int, list[TokenLogprob]] = {}
        if verdict.scores is not None:
            scores, width = _ScoreLists(verdict.scores), verdict.tokens.shape[1]
            for i, top in self.top_logprobs.items():
                logprobs[i] = scores.token_logprobs(i * width, token_ids[i], top)
        if verdict.prompt_scores is not None:
            scores, first = _ScoreLists(verdict.prompt_scores), 0
            for i, span in enumerate(spans):
                if span.scored_tokens:
                    prompt[i] = scores.token_logprobs(first, span.scored_tokens, span.top_logprobs)
                    first += len(span.scored_tokens)
        errors = dict(self.errors)
        for i, row in enumerate(token_ids):
            scored = *prompt.get(i, ()), *logprobs.get(i, ())
            if min(row) < 0 or any(one.logprob != one.logprob for one in scored):
                errors.setdefault(i, NAN_ERROR)
        on_device = self.num_verified
        num_verified = None if on_device is None else on_device.tolist()[: len(spans)]
        margins = None if self.margins is None else self.margins.tolist()[: len(spans)]
        fields = self.rows, seconds, num_verified, margins, logprobs, prompt, errors
        return StepResult(token_ids, num_accepted, *fields)


class _ScoreLists:
    """Scores as lists."""

    def __init__(self, scores: Scores):
        self.values: list[float] = scores.values.tolist()
        self.ranks: list[int] = scores.ranks.tolist()
        self.best: list[list[float]] = scores.top_values.tolist()
        self.ids: list[list[int]] = scores.top_ids.tolist()

    def token_logprobs(self, first: int, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """Return the log probabilities of `tokens`, which are at the rows from `first` on."""
        rows = slice(first, first + len(tokens))
        pairs = zip(self.ids[rows], self.best[rows], strict=True)
        tops = [tuple(zip(ids[:top], best[:top], strict=True)) for ids, best in pairs]
        return list(map(TokenLogprob, tokens, self.values[rows], self.ranks[rows], tops))
