"""A step under way and its result: the only transfer of a step, and the only wait."""

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


class Verdict(NamedTuple):
    """What the target decided, on the device: tokens [S, W], of which accepted [S] + 1 count.

    scores: of all rows with logits, where asked for; prompt_scores: of prompt tokens, in the spans'
    order.
    """

    tokens: Tensor
    accepted: Tensor
    scores: Scores | None = None
    prompt_scores: Scores | None = None


class PendingStep:
    """A plan and its verdict, on the way to the host.

    top_logprobs: by span, how many of the most probable tokens its request wants named beside each
    token. errors: by span, why its request cannot go on. margins [S, K]: of the drafts that the
    device made, on their way to the host already. began, done: the host's clock in seconds.
    followed: grammars know its tokens; None: some of them may.
    """

    def __init__(
        self,
        plan: Plan,
        verdict: Verdict,
        top_logprobs: Mapping[int, int] = {},
        errors: Mapping[int, str] = {},
        layout: Layout | None = None,
        margins: Tensor | None = None,
        began: float = 0.0,
    ):
        self.rows, self.began, self.done = 0, began, 0.0
        self.drafted, self.margins = None, margins
        if layout is not None:
            self.rows = layout.shape.rows
            self.drafted = None if plan.verified is None else download(layout.drafts)
        self.plan, self.top_logprobs, self.errors = plan, top_logprobs, errors
        scores = [part and Scores(*map(download, part)) for part in verdict[2:]]
        self._verdict = Verdict(download(verdict.tokens), download(verdict.accepted), *scores)
        self.followed: bool | None = False
        self._result: StepResult | None = None
        self._event = None
        if verdict.tokens.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self, before: float = 0.0) -> StepResult:
        """Wait for the step, and give what became of it. before: when the one before was done."""
        if self._result is None:
            if self._event is not None:
                self._event.synchronize()
            self.done = time.perf_counter()
            self._result = self._to_host(self.done - max(self.began, before))
        return self._result

    def _to_host(self, seconds: float) -> StepResult:
        spans, verdict = self.plan.spans, self._verdict
        accepted: list[int] = verdict.accepted.tolist()[: len(spans)]
        tokens: list[list[int]] = verdict.tokens.tolist()
        kept = [row[: count + 1] for row, count in zip(tokens, accepted, strict=False)]
        logprobs: dict[int, list[TokenLogprob]] = {}
        prompt: dict[int, list[TokenLogprob]] = {}
        if verdict.scores is not None:
            scores, width = _Lists(verdict.scores), verdict.tokens.shape[1]
            for i, top in self.top_logprobs.items():
                logprobs[i] = scores.take(i * width, kept[i], top)
        if verdict.prompt_scores is not None:
            scores, first = _Lists(verdict.prompt_scores), 0
            for i, span in enumerate(spans):
                if span.scored:
                    prompt[i] = scores.take(first, span.scored, span.top_logprobs)
                    first += len(span.scored)
        errors = dict(self.errors)
        for i, row in enumerate(kept):
            scored = *prompt.get(i, ()), *logprobs.get(i, ())
            if min(row) < 0 or any(one.logprob != one.logprob for one in scored):
                errors.setdefault(i, NAN_ERROR)
        drafted = None if self.drafted is None else self.drafted.tolist()[: len(spans)]
        margins = None if self.margins is None else self.margins.tolist()[: len(spans)]
        news = self.rows, seconds, drafted, margins, logprobs, prompt, errors
        return StepResult(kept, accepted, *news)


class _Lists:
    """Scores as lists."""

    def __init__(self, scores: Scores):
        self.values: list[float] = scores.values.tolist()
        self.ranks: list[int] = scores.ranks.tolist()
        self.best: list[list[float]] = scores.top_values.tolist()
        self.ids: list[list[int]] = scores.top_ids.tolist()

    def take(self, first: int, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """Those of `tokens`, which stand at the rows from `first` on."""
        rows = slice(first, first + len(tokens))
        pairs = zip(self.ids[rows], self.best[rows], strict=True)
        tops = [tuple(zip(ids[:top], best[:top], strict=True)) for ids, best in pairs]
        return list(map(TokenLogprob, tokens, self.values[rows], self.ranks[rows], tops))
