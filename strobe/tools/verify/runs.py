"""Runs the waves on an engine and keeps the outputs of every row."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from strobe.counters import DraftCounts
from strobe.engine.engine import Engine
from strobe.request import Request, TokenLogprob
from strobe.sampling_params import SamplingParams, Speculation
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.tools.verify.cases import SAMPLED_WAVE, Case, Wave

TOP = 5
"""Log probabilities of each row that are compared, in addition to the token's own."""


@dataclass(frozen=True)
class Rows:
    """Log probabilities of n rows: tokens [n, k] and their values [n, k], the row's own token
    first; NaN where there are fewer."""

    tokens: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: slice) -> Rows:
        return Rows(self.tokens[index], self.values[index])

    @staticmethod
    def of(logprobs: Sequence[TokenLogprob]) -> Rows:
        """Take the rows from an engine's log probabilities."""
        width = 1 + max((len(row.top) for row in logprobs), default=0)
        tokens = np.zeros((len(logprobs), width), dtype=np.int64)
        values = np.full((len(logprobs), width), np.nan)
        for i, row in enumerate(logprobs):
            entries = [(row.token, row.logprob), *row.top]
            tokens[i, : len(entries)] = [token for token, _ in entries]
            values[i, : len(entries)] = [value for _, value in entries]
        return Rows(tokens, values)


@dataclass(frozen=True)
class Answer:
    """One request's answer. rows: log probabilities, one row a token; num_cached: prompt tokens
    from the prefix cache; steps_accepted: accepted drafts of each step with drafts."""

    case: Case
    tokens: tuple[int, ...]
    rows: Rows
    num_cached: int = 0
    counts: DraftCounts = field(default_factory=DraftCounts)
    steps_accepted: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Run:
    """The answers of all waves, by wave, and the seconds they took."""

    answers: dict[str, list[Answer]]
    seconds: float

    @property
    def all_answers(self) -> list[Answer]:
        return [answer for answers in self.answers.values() for answer in answers]

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.all_answers)

    def joined(self, other: Run) -> Run:
        """Return this run with another's waves after its own."""
        return Run(self.answers | other.answers, self.seconds + other.seconds)

    @property
    def counts(self) -> DraftCounts:
        """Counts of all answers."""
        total = DraftCounts()
        for answer in self.all_answers:
            total.merge(answer.counts)
        return total


def run_waves(engine: Engine, waves: Sequence[Wave], *, speculate: bool) -> Run:
    """Run the waves one after the other, from an engine without cached prefixes. Sampled waves
    verify drafts in varying numbers, the others all of them."""
    engine.reset()
    began = time.perf_counter()
    answers: dict[str, list[Answer]] = {}
    for wave in waves:
        varies = speculate and wave.name.startswith(SAMPLED_WAVE)
        engine.scheduler.draft_policy = VaryingPolicy(len(answers)) if varies else DraftPolicy()
        answers[wave.name] = run_cases(engine, wave.cases, speculate=speculate)
    return Run(answers, time.perf_counter() - began)


class VaryingPolicy(DraftPolicy):
    """Proposes and verifies a random number of drafts in each step."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        if self._random.random() < 0.5:
            return super().plan(candidates, load)
        return DraftPlan(max_drafts=[self._random.randint(0, c.max_drafts) for c in candidates])


def run_cases(
    engine: Engine, cases: Sequence[Case], *, speculate: bool, logprobs: int | None = TOP
) -> list[Answer]:
    """Run requests at once; return their answers in order. logprobs: of each row, None for none."""
    speculation = Speculation() if speculate else Speculation(method="none")
    requests: list[Request] = []
    for case in cases:
        params = case.sampling.clone(logprobs=logprobs, speculation=speculation)
        requests.append(engine.add(list(case.prompt), params))
    rows_of: dict[object, list[TokenLogprob]] = {request.key: [] for request in requests}
    accepted: dict[object, list[int]] = {request.key: [] for request in requests}
    cached: dict[object, int] = {}
    errors: dict[object, str | None] = {}
    while engine.has_work:
        for event in engine.step():
            if event.key not in rows_of:
                continue
            rows_of[event.key] += event.logprobs
            if event.num_verified:
                accepted[event.key].append(event.num_accepted)
            if event.start is not None:
                cached[event.key] = event.start.num_cached
            errors[event.key] = event.error or errors.get(event.key)
    return [
        Answer(
            case=case,
            tokens=tuple(request.output_ids),
            rows=Rows.of(rows_of[request.key]),
            num_cached=cached.get(request.key, 0),
            counts=request.draft_counts,
            steps_accepted=tuple(accepted[request.key]),
            error=errors.get(request.key),
        )
        for case, request in zip(cases, requests, strict=True)
    ]


def score_by_prefill(engine: Engine, answers: Sequence[Answer]) -> list[Rows]:
    """Return the rows of answers as the engine computes them from whole sequences, without drafts,
    all at once."""
    requests: list[Request] = []
    for answer in answers:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=0,
            prompt_logprobs=TOP,
            speculation=Speculation(method="none"),
        )
        requests.append(engine.add([*answer.case.prompt, *answer.tokens], params))
    rows_of: dict[object, list[TokenLogprob]] = {}
    while engine.has_work:
        for event in engine.step():
            if event.start is not None:
                scored = [row for row in event.start.prompt_logprobs if row is not None]
                rows_of[event.key] = scored
    return [
        Rows.of(rows_of[request.key][-len(answer.tokens) :])
        for request, answer in zip(requests, answers, strict=True)
    ]


def score_by_blocks(engine: Engine, answer: Answer, places: Sequence[int]) -> list[Rows]:
    """Return single rows of an answer, each as the last row of a short block after a cached prefix.
    places: indices of the answer's tokens."""
    scored: list[Rows] = []
    for place in places:
        prompt = (*answer.case.prompt, *answer.tokens[:place])
        case = Case("block", prompt, SamplingParams(temperature=0.0, max_tokens=1))
        (row,) = run_cases(engine, [case], speculate=False)
        scored.append(row.rows)
    return scored
