"""Random batches for the logits processors: slots with settings and histories, spans with drafts,
rows of logits, and the rows that plain Python computes."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from strobe.sampling.processors import FLOOR, LogitRows
from strobe.sampling.sampling_ops import SamplingOps
from strobe.sampling.sampling_state import SamplingState
from strobe.sampling_params import SamplingParams, StructuredOutputs
from tests.support import reference_processors

STRENGTHS = (-2.0, -0.7, 0.0, 0.5, 2.0)
REPETITIONS = (0.3, 1.0, 1.3, 5.0)
STRUCTURED = StructuredOutputs(json_object=True)


class Admitted(NamedTuple):
    """An admission as SamplingState reads it."""

    slot: int
    tokens: Sequence[int]
    num_prompt: int
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    sibling: int = 0
    stop_ids: frozenset[int] = frozenset()


def words_of(allowed: Sequence[Collection[int]], size: int) -> Tensor:
    """Return sets of token ids as rows of 32-bit words, lowest bit first."""
    count = -(-size // 32)
    unsigned = [
        [sum(1 << (t - 32 * w) for t in ids if t // 32 == w) for w in range(count)]
        for ids in allowed
    ]
    signed = [[x - 2**32 if x >= 2**31 else x for x in row] for row in unsigned]
    return torch.tensor(signed, dtype=torch.int32).view(len(allowed), count)


class World:
    """Spans of 1 + K rows over slots; some slots use no processor."""

    slots = 5

    def __init__(self, seed: int, size: int = 0, max_drafts: int = 3):
        self.rng = rng = random.Random(seed)
        self.size = size or rng.choice([3, 31, 32, 33, 64, 70])
        self.admitted = [self._admitted(slot) for slot in range(self.slots)]
        self.spans = rng.sample(range(self.slots), rng.randint(1, self.slots))
        self.drafts = [[rng.randrange(self.size) for _ in range(max_drafts)] for _ in self.spans]
        self.places = [
            (span, rank) for span in range(len(self.spans)) for rank in range(max_drafts + 1)
        ]
        rng.shuffle(self.places)
        self.logits = [
            [rng.choice([-math.inf, rng.uniform(-9, 9), rng.uniform(-9, 9), 0.0]) for _ in self.ids]
            for _ in self.places
        ]
        self.allowed = [{*self.tokens(12), rng.randrange(self.size)} for _ in self.places]

    @property
    def ids(self) -> range:
        return range(self.size)

    def tokens(self, max_count: int) -> list[int]:
        return [self.rng.randrange(self.size) for _ in range(self.rng.randint(0, max_count))]

    def _admitted(self, slot: int) -> Admitted:
        rng = self.rng
        prompt, answer = self.tokens(6), self.tokens(8)
        bias = {t: rng.uniform(-100, 100) for t in set(self.tokens(4))}
        settings = {
            "presence_penalty": rng.choice(STRENGTHS),
            "frequency_penalty": rng.choice(STRENGTHS),
            "repetition_penalty": rng.choice(REPETITIONS),
            "logit_bias": bias or None,
            "allowed_token_ids": self.tokens(9) or None,
            "min_tokens": rng.choice([0, len(answer) + rng.randint(0, 4)]),
            "structured_outputs": STRUCTURED,
        }
        chosen = {name: value for name, value in settings.items() if rng.random() < 0.5}
        sampling = SamplingParams(max_tokens=None, **chosen) if slot % 3 else SamplingParams()
        return Admitted(
            slot,
            prompt + answer,
            len(prompt),
            sampling,
            stop_ids=frozenset(self.tokens(5)),
        )

    def state(
        self, ops: SamplingOps | None = None, *, device: torch.device | None = None
    ) -> SamplingState:
        """Return a state whose slots held other requests before."""
        state = SamplingState(
            self.slots, self.size, device or torch.device("cpu"), ops or SamplingOps()
        )
        before = World.__new__(World)
        before.rng, before.size = random.Random(99), self.size
        state.admit([before._admitted(slot)._replace(slot=slot) for slot in range(self.slots)])
        state.admit(self.admitted)
        return state

    @property
    def rows(self) -> LogitRows:
        span = [s for s, _ in self.places]
        rank = [r for _, r in self.places]
        admitted = [self.admitted[self.spans[s]] for s in span]
        positions = [len(a.tokens) + r for a, r in zip(admitted, rank, strict=True)]
        return LogitRows(
            slots=torch.tensor([a.slot for a in admitted]),
            positions=torch.tensor(positions),
            drafts=torch.tensor(self.drafts, dtype=torch.int64).view(len(self.spans), -1),
            span=torch.tensor(span),
            rank=torch.tensor(rank),
        )

    @property
    def masks(self) -> Tensor:
        return words_of(self.allowed, self.size)

    def expected(self) -> list[list[float]]:
        """Return the rows as plain Python processes them."""
        rows = []
        for row, (span, rank), allowed in zip(self.logits, self.places, self.allowed, strict=True):
            a = self.admitted[self.spans[span]]
            output = [*a.tokens[a.num_prompt :], *self.drafts[span][:rank]]
            prompt = a.tokens[: a.num_prompt]
            changed = reference_processors.processed(row, a.sampling, prompt, output, a.stop_ids)
            if a.sampling.structured_outputs is not None:
                changed = reference_processors.within(changed, allowed)
            rows.append(changed)
        return rows


def normalized(logits: Tensor) -> list[list[float]]:
    """Return rows in the oracle's form: where only tokens that a grammar allows are left, 0 for
    them and -inf for the rest."""
    rows = []
    for row in logits.tolist():
        alone = max(row) <= FLOOR / 2
        rows.append(
            [x if x > FLOOR / 2 else 0.0 if alone and x > -math.inf else -math.inf for x in row]
        )
    return rows


def check(logits: Tensor, expected: Sequence[Sequence[float]], *, abs_tol: float = 1e-4) -> None:
    assert logits.dtype == torch.float32
    assert logits.shape == (len(expected), len(expected[0]))
    for row, expected_row in zip(normalized(logits), expected, strict=True):
        for x, y in zip(row, expected_row, strict=True):
            assert x == y or math.isclose(x, y, rel_tol=1e-5, abs_tol=abs_tol), (x, y)
