"""Compares the rows of answers with the reference and with each other. It only measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strobe.engine.engine import Engine
from strobe.tools.verify.filter_edges import EdgeRow
from strobe.tools.verify.oracle import Oracle, OracleRow
from strobe.tools.verify.reference import Logits, Reference
from strobe.tools.verify.rounding import common_length, comparable_rows, difference
from strobe.tools.verify.runs import Answer, Rows, Run


@dataclass(frozen=True)
class Divergence:
    """Where two answers to one request part. tokens: of both; distance: of the one that is farther
    from being the reference's token, as a margin of logits; in_noise: the same in units of logits /
    temperature + noise."""

    wave: str
    case: str
    index: int
    tokens: tuple[int, int]
    distance: float
    in_noise: float
    answers: tuple[tuple[int, ...], tuple[int, ...]]
    greedy: bool


@dataclass(frozen=True)
class Outlier:
    """A row whose value exceeds the others'. value: a difference of log probabilities, or the
    distance of its token from the reference's."""

    run: str
    wave: str
    case: str
    index: int
    value: float
    token: int
    expected: int | None = None


@dataclass
class RowChecks:
    """The differences of all rows of one run, and where they are. distances: of the rows' tokens
    from the reference's."""

    run: str
    differences: list[Outlier]
    distances: list[Outlier]
    rows: int = 0

    def quantile(self, share: float) -> float:
        """Return the difference that so many rows do not exceed."""
        values = [row.value for row in self.differences]
        return float(np.quantile(values, share)) if values else 0.0


_Checked = tuple[str, str, Answer]
"""Names of a run and a wave, and an answer."""


class Checker:
    """Runs the reference over answers, each sequence once. spreads: between each row's largest and
    mean logit; edges: the rows of plain greedy answers, for the test of filters."""

    def __init__(self, reference: Reference, engine: Engine):
        self.reference = reference
        self.seed = engine.config.seed
        self.compiler = engine.grammars.compiler
        self.spreads: list[float] = []
        self.edges: list[EdgeRow] = []
        self._last_key: object = None
        self._last: Any = None

    def rows_of(self, answer: Answer) -> tuple[list[OracleRow], NDArray[np.float64]]:
        """Return the oracle's rows of an answer, and the reference's log probabilities."""
        key = answer.case.prompt, answer.case.sampling, answer.tokens
        if key != self._last_key:
            logits = self.reference.logits([*key[0], *answer.tokens], len(key[0]))
            finite = np.where(np.isfinite(logits), logits, np.nan)
            self.spreads += (np.nanmax(finite, 1) - np.nanmean(finite, 1)).tolist()
            if answer.case.is_greedy and not answer.case.is_constrained:
                self.edges += EdgeRow.of(answer, logits)
            oracle = Oracle(answer.case, self.seed, self.compiler)
            self._last = oracle.rows(logits, answer.tokens), log_softmax(logits)
            self._last_key = key
        return self._last

    def check_runs(self, runs: Mapping[str, Run]) -> dict[str, RowChecks]:
        """Compare every row of several runs with the reference: equal sequences once, and sequences
        with a common prefix one after the other."""
        checks = {name: RowChecks(run=name, differences=[], distances=[]) for name in runs}
        groups: dict[tuple[tuple[int, ...], tuple[int, ...], str], list[_Checked]] = {}
        for name, run in runs.items():
            for wave, answers in run.answers.items():
                for answer in answers:
                    if answer.tokens and answer.error is None:
                        key = answer.case.prompt, answer.tokens, repr(answer.case.sampling)
                        groups.setdefault(key, []).append((name, wave, answer))
        for _, group in sorted(groups.items()):
            for name, wave, answer in group:
                self._check(checks[name], wave, answer)
        return checks

    def _check(self, checks: RowChecks, wave: str, answer: Answer) -> None:
        rows, log_probs = self.rows_of(answer)
        checks.rows += len(rows)
        listed = difference(answer.rows, reference_rows(answer, log_probs))
        for i, value in enumerate(listed.tolist()):
            checks.differences.append(_outlier(checks.run, wave, answer, i, value))
        for i, (row, token) in enumerate(zip(rows, answer.tokens, strict=True)):
            if row.winner != token:
                outlier = _outlier(checks.run, wave, answer, i, row.distance(token))
                checks.distances.append(replace(outlier, expected=row.winner))

    def divergence(self, wave: str, plain: Answer, other: Answer) -> Divergence | None:
        """Return where two answers part, None if they do not."""
        index = common_length(plain.tokens, other.tokens)
        if plain.tokens == other.tokens:
            return None
        pair = _token_at(plain, index), _token_at(other, index)
        if None in pair:
            distance = float("inf")  # one ended without a token that the other lacks
            scale = 1.0
        else:
            rows, _ = self.rows_of(plain)
            scale = rows[index].scale
            distance = max(rows[index].distance(token) for token in pair if token is not None)
        return Divergence(
            wave=wave,
            case=plain.case.kind,
            index=index,
            tokens=(-1 if pair[0] is None else pair[0], -1 if pair[1] is None else pair[1]),
            distance=distance,
            in_noise=distance / scale,
            answers=(plain.tokens, other.tokens),
            greedy=plain.case.is_greedy,
        )


def _token_at(answer: Answer, index: int) -> int | None:
    return answer.tokens[index] if index < len(answer.tokens) else None


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Return the log probabilities of rows of logits."""
    values = logits.astype(np.float64)
    values -= values.max(1, keepdims=True)
    values -= np.log(np.exp(values).sum(1, keepdims=True))
    return values


def reference_rows(answer: Answer, log_probs: NDArray[np.float64]) -> Rows:
    """Return the reference's log probabilities of the tokens that an answer's rows list."""
    picked: NDArray[np.float64] = np.take_along_axis(log_probs, answer.rows.tokens, 1)
    picked[np.isnan(answer.rows.values) | ~np.isfinite(picked)] = np.nan
    return Rows(answer.rows.tokens, picked)


def compare_rows(run: str, wave: str, plain: Answer, other: Answer) -> list[Outlier]:
    """Return the differences of two answers' rows as far as their tokens agree."""
    count = comparable_rows(plain.tokens, other.tokens)
    values = difference(plain.rows[:count], other.rows[:count])
    return [_outlier(run, wave, other, i, value) for i, value in enumerate(values.tolist())]


def _outlier(run: str, wave: str, answer: Answer, index: int, value: float) -> Outlier:
    return Outlier(
        run=run,
        wave=wave,
        case=answer.case.kind,
        index=index,
        value=value,
        token=answer.tokens[index],
    )
