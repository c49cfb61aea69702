"""A launched step's output: the only transfer to the host, and the only wait."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass
from enum import Enum, auto

import torch

from strobe.host.transfer import download
from strobe.models.heads.head import Drafts
from strobe.request import TokenLogprob
from strobe.runner.layout import Layout
from strobe.runner.verify_step import Verified
from strobe.sampling.grammar import GrammarState
from strobe.sampling.logprobs import Scores
from strobe.step import Plan, StepResult

NAN_ERROR = "The model's logits are NaN; try another dtype, or check the checkpoint's weights."


class GrammarProgress(Enum):
    """How far grammars have consumed a step's tokens.

    BEHIND --advance_grammars--> ADVANCING --all consumed--> ADVANCED

    A step stays ADVANCING if one of its grammars raises: then some have consumed their tokens.
    """

    BEHIND = auto()
    ADVANCING = auto()
    ADVANCED = auto()


@dataclass(eq=False)
class StepOutput:
    """A launched step's output on the device, being copied to the host.

    score_columns: by span, the columns of its scores to report. errors: by span, why its request
    ends. proposed [S, K]: the device's drafts, if a request reads them, and their margins, in host
    memory. draft_readers: the spans whose requests read their drafts. started_at, done_at: host
    clock in seconds. has_captured: whether the launch captured a graph, which takes far longer.
    """

    plan: Plan
    layout: Layout
    verified: InitVar[Verified]
    score_columns: Mapping[int, slice]
    errors: Mapping[int, str]
    proposed: Drafts
    draft_readers: Collection[int]
    started_at: float
    has_captured: bool = False
    done_at: float = 0.0

    def __post_init__(self, verified: Verified) -> None:
        sampled = verified.sampled
        by_device = self.plan.num_verified is not None
        self._num_verified = download(self.layout.drafts) if by_device else None
        self._tokens = download(sampled.tokens)
        self._num_accepted = download(verified.num_accepted)
        self._scores = _download_scores(sampled.scores)
        self._prompt_scores = _download_scores(verified.prompt_scores)
        self._grammar_progress = GrammarProgress.BEHIND
        self._result: StepResult | None = None
        self._event = None
        if verified.num_accepted.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()
        else:  # it has run already, and may be waited for only after another step has run
            self.done_at = time.perf_counter()

    @property
    def is_torn(self) -> bool:
        """Whether only some of the grammars have consumed the step's tokens."""
        return self._grammar_progress is GrammarProgress.ADVANCING

    def advance_grammars(self, grammars: GrammarState) -> None:
        """Advance the grammars by the step's tokens, once; the result has arrived."""
        if self._grammar_progress is GrammarProgress.ADVANCED:
            return
        result = self.result()
        self._grammar_progress = GrammarProgress.ADVANCING
        for i, span in enumerate(self.plan.spans):
            if span.num_logits and i not in result.errors:
                grammars.advance(span.slot, result.tokens[i])
        self._grammar_progress = GrammarProgress.ADVANCED

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
        return StepResult(
            tokens=tokens,
            num_accepted=num_accepted,
            rows=self.layout.shape.rows,
            seconds=seconds,
            num_verified=None if on_device is None else on_device.tolist()[: len(spans)],
            margins=None if margins is None else margins.tolist()[: len(spans)],
            drafts=self._drafts(),
            logprobs=logprobs,
            prompt_logprobs=prompt,
            errors=errors,
        )

    def _drafts(self) -> dict[int, Sequence[int]]:
        """Return the drafts of the spans whose requests read them: the host's or the device's."""
        by_device = self.proposed.tokens
        device_drafts = [] if by_device is None else by_device.tolist()
        drafts: dict[int, Sequence[int]] = {}
        for i in self.draft_readers:
            span = self.plan.spans[i]
            by_host = self.layout.forced.get(i) or span.tokens[span.num_context_rows :]
            drafts[i] = by_host or (device_drafts[i] if device_drafts else ())
        return drafts


def _download_scores(scores: Scores | None) -> Scores | None:
    return None if scores is None else Scores(*[download(part) for part in scores])


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
    return [TokenLogprob(*entry) for entry in zip(tokens, values, ranks, tops, strict=True)]
