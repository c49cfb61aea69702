"""The token that a row must give: an independent implementation of sampling from its definition,
for one row of the reference's logits, and a token's distance from being that row's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray

from strobe.sampling.grammar_compiler import GrammarCompiler
from strobe.sampling.noise import gumbel, noise_key
from strobe.sampling_params import SamplingParams, StructuredOutputs
from strobe.tools.verify.cases import Case

Row = NDArray[np.float64]
MAX_DISTANCE = 64.0
_STEPS = 30


class Oracle:
    """Names the token of each row of an answer. compiler: of grammars."""

    def __init__(self, case: Case, seed: int, compiler: GrammarCompiler):
        self.case = case
        self.compiler = compiler
        self.key = noise_key(case.sampling.seed if case.sampling.seed is not None else seed, 0)

    def rows(self, logits: NDArray[np.float32], answer: Sequence[int]) -> list[OracleRow]:
        """Return the rows of an answer from their logits [n, V]."""
        sampling = self.case.sampling
        allowed = self._allowed(answer, logits.shape[1])
        noise = self._noise(len(answer), logits.shape[1])
        return [
            OracleRow(
                processed(logits[i], sampling, self.case.prompt, answer[:i], allowed[i]),
                sampling,
                None if noise is None else noise[i],
            )
            for i in range(len(answer))
        ]

    def _noise(self, count: int, vocab_size: int) -> NDArray[np.float32] | None:
        if self.case.is_greedy:
            return None
        positions = torch.arange(count) + len(self.case.prompt)
        return gumbel(torch.full((count,), self.key), positions, vocab_size).numpy()

    def _allowed(self, answer: Sequence[int], vocab_size: int) -> list[NDArray[np.bool_] | None]:
        """Return for each row the tokens that a fresh matcher of the grammar allows."""
        structured = StructuredOutputs.of(self.case.sampling.structured_outputs)
        if structured is None:
            return [None] * len(answer)
        matcher: LLMatcher = self.compiler.compile(structured).deep_copy()
        masks: list[NDArray[np.bool_] | None] = []
        for token in answer:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            masks.append(np.unpackbits(bits, bitorder="little")[:vocab_size].astype(np.bool_))
            if not matcher.is_stopped():
                matcher.consume_token(token)
        return masks


class OracleRow:
    """One row: the logits after processors, and the row's noise, None if it is greedy."""

    def __init__(self, logits: Row, sampling: SamplingParams, noise: Row | None):
        self.logits = logits
        self.sampling = sampling
        self.noise = noise

    @property
    def scale(self) -> float:
        """The temperature, 1 for a greedy row: a distance over it is in units of the noise."""
        return self.sampling.temperature or 1.0

    @cached_property
    def winner(self) -> int:
        """The row's token."""
        return self.token(self.logits)

    def token(self, logits: Row) -> int:
        """Return the token that these logits would give."""
        if self.noise is None:
            return int(logits.argmax())
        scores = (logits - logits.max()) / self.sampling.temperature
        kept = passes_filters(scores, self.sampling)
        return int(np.where(kept, scores + self.noise, -np.inf).argmax())

    def distance(self, token: int) -> float:
        """Return the smallest change of margins that makes `token` the row's: 0 if it is already,
        infinity if no change does. Its own logit is raised, or the winner's is lowered."""
        if self.winner == token:
            return 0.0
        if self.noise is None:
            return float(self.logits[self.winner] - self.logits[token])

        def raised(change: float) -> bool:
            logits = self.logits.copy()
            logits[token] += change
            return self.token(logits) == token

        def lowered(change: float) -> bool:
            logits = self.logits.copy()
            logits[self.winner] -= change
            return self.token(logits) == token

        return min(_smallest_change(raised), _smallest_change(lowered))


def _smallest_change(holds: Callable[[float], bool]) -> float:
    """Return approximately the smallest change for which `holds` is true, or infinity."""
    change = 1e-7
    while not holds(change):
        change *= 2
        if change > MAX_DISTANCE:
            return float("inf")
    low = change / 2
    high = change
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def passes_filters(scores: Row, sampling: SamplingParams) -> NDArray[np.bool_]:
    """Return which tokens the filters keep. scores: logits over the temperature. Top-k first;
    top-p of what top-k left, the token that reaches it included; min-p of the most probable one;
    equal tokens stay or go together."""
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order] - scores.max())
    count = len(weights)
    if sampling.top_k:
        count = min(count, sampling.top_k)
    if sampling.top_p < 1:
        sums = weights[:count].cumsum()
        count = int(np.searchsorted(sums, sampling.top_p * sums[-1], side="left")) + 1
        count = min(count, len(sums))
    edge = max(weights[count - 1], sampling.min_p * weights[0])
    return np.exp(scores - scores.max()) >= edge


def processed(
    logits: NDArray[np.float32],
    sampling: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    allowed: NDArray[np.bool_] | None,
) -> Row:
    """Return a row's logits after penalties and the grammar."""
    row = logits.astype(np.float64)
    counts = Counter(output)
    if sampling.repetition_penalty != 1.0:
        for token in {*prompt, *output}:
            scale = sampling.repetition_penalty
            row[token] = row[token] / scale if row[token] > 0 else row[token] * scale
    for token, count in counts.items():
        row[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    if allowed is not None:
        row[: len(allowed)][~allowed[: len(row)]] = -np.inf
        row[len(allowed) :] = -np.inf
    return row
