"""Random batches for the logits processors: slots with settings and histories, spans with drafts,
rows of logits, and what plain Python makes of them."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

import slow_processors
import torch
from torch import Tensor

from strobe.sampling.processors import FLOOR, LogitRows
from strobe.sampling.state import SamplingState
from strobe.sampling_params import SamplingParams, StructuredOutputs

STRENGTHS = (-2.0, -0.7, 0.0, 0.5, 2.0)
REPETITIONS = (0.3, 1.0, 1.3, 5.0)
STRUCTURED = StructuredOutputs(json_object=True)


class Admitted(NamedTuple):
    """What a slot is given."""

    slot: int
    tokens: Sequence[int]
    num_prompt: int
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    sibling: int = 0
    stop_ids: frozenset[int] = frozenset()


def words_of(allowed: Sequence[Collection[int]], size: int) -> Tensor:
    """Sets of token ids as rows of 32-bit words, lowest bit first."""
    count = -(-size // 32)
    unsigned = [
        [sum(1 << (t - 32 * w) for t in ids if t // 32 == w) for w in range(count)]
        for ids in allowed
    ]
    signed = [[x - 2**32 if x >= 2**31 else x for x in row] for row in unsigned]
    return torch.tensor(signed, dtype=torch.int32).view(len(allowed), count)


class World:
    """Spans of 1 + K rows over slots of which some ask for nothing."""

    slots = 5

    def __init__(self, seed: int, size: int = 0, most_drafts: int = 3):
        self.rng = rng = random.Random(seed)
        self.size = size or rng.choice([3, 31, 32, 33, 64, 70])
        self.admitted = [self._admitted(slot) for slot in range(self.slots)]
        self.spans = rng.sample(range(self.slots), rng.randint(1, self.slots))
        self.drafts = [[rng.randrange(self.size) for _ in range(most_drafts)] for _ in self.spans]
        self.places = [
            (span, rank) for span in range(len(self.spans)) for rank in range(most_drafts + 1)
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

    def tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(self.size) for _ in range(self.rng.randint(0, most))]

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
        given = {name: value for name, value in settings.items() if rng.random() < 0.5}
        sampling = SamplingParams(max_tokens=None, **given) if slot % 3 else SamplingParams()
        return Admitted(
            slot,
            prompt + answer,
            len(prompt),
            sampling,
            stop_ids=frozenset(self.tokens(5)),
        )

    def state(self, *, kernels: bool = False, device: torch.device | None = None) -> SamplingState:
        """A state whose slots held something else before."""
        state = SamplingState(self.slots, self.size, device or torch.device("cpu"), kernels=kernels)
        before = World.__new__(World)
        before.rng, before.size = random.Random(99), self.size
        state.admit([before._admitted(slot)._replace(slot=slot) for slot in range(self.slots)])
        state.admit(self.admitted)
        return state

    @property
    def rows(self) -> LogitRows:
        span = [s for s, _ in self.places]
        rank = [r for _, r in self.places]
        at = [self.admitted[self.spans[s]] for s in span]
        positions = [len(a.tokens) + r for a, r in zip(at, rank, strict=True)]
        return LogitRows(
            slots=torch.tensor([a.slot for a in at]),
            positions=torch.tensor(positions),
            drafts=torch.tensor(self.drafts, dtype=torch.int64).view(len(self.spans), -1),
            span=torch.tensor(span),
            rank=torch.tensor(rank),
        )

    @property
    def masks(self) -> Tensor:
        return words_of(self.allowed, self.size)

    def wanted(self) -> list[list[float]]:
        """Plain Python's rows."""
        found = []
        for row, (span, rank), allowed in zip(self.logits, self.places, self.allowed, strict=True):
            a = self.admitted[self.spans[span]]
            made = [*a.tokens[a.num_prompt :], *self.drafts[span][:rank]]
            prompt = a.tokens[: a.num_prompt]
            changed = slow_processors.processed(row, a.sampling, prompt, made, a.stop_ids)
            if a.sampling.structured_outputs is not None:
                changed = slow_processors.within(changed, allowed)
            found.append(changed)
        return found


def normalized(found: Tensor) -> list[list[float]]:
    """Rows as the oracle writes them: where only what a grammar allows is left, 0, else -inf."""
    rows = []
    for row in found.tolist():
        alone = max(row) <= FLOOR / 2
        rows.append(
            [x if x > FLOOR / 2 else 0.0 if alone and x > -math.inf else -math.inf for x in row]
        )
    return rows


def check(found: Tensor, wanted: Sequence[Sequence[float]], *, abs_tol: float = 1e-4) -> None:
    assert found.dtype == torch.float32
    assert found.shape == (len(wanted), len(wanted[0]))
    for row, other in zip(normalized(found), wanted, strict=True):
        for x, y in zip(row, other, strict=True):
            assert x == y or math.isclose(x, y, rel_tol=1e-5, abs_tol=abs_tol), (x, y)
