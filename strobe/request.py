"""One request's life on the host. Knows nothing of pages or tensors."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

from strobe.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprob(NamedTuple):
    """What the model itself gave a token: its natural log probability before temperature, penalties
    and masks, its rank from 1, and the most probable tokens with theirs."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Place(NamedTuple):
    """How a request stands to others. priority: lower ones run first; salt: only requests of the
    same one find each other's prefixes."""

    priority: int = 0
    salt: str = ""


USUAL = Place()


class PageKeys(list[bytes]):
    """Content keys of a sequence's first full pages; root: what the first of them follows."""

    def __init__(self, salt: str = ""):
        self.root = hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class SpeculationCount:
    """Verify steps that carried drafts, and what came of them: drafts verified, those accepted,
    and the steps that accepted each position of a draft. made: drafts made, verified or not;
    rows: of the target in all steps that could have drafts; rested: those of them for which
    nothing was drafted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list[int])
    made: int = 0
    rows: int = 0
    rested: int = 0

    def add(self, drafted: int, accepted: int, made: int | None = None) -> None:
        """Count one step that decoded. made: by default what was verified."""
        made = drafted if made is None else made
        self.made += made
        self.rows += 1 + drafted
        self.rested += not made
        self.steps += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.per_position += [0] * (drafted - len(self.per_position))
        for position in range(accepted):
            self.per_position[position] += 1

    def merge(self, other: SpeculationCount) -> None:
        """Add another's counts."""
        for name in ("steps", "drafted", "accepted", "made", "rows", "rested"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        positions = zip_longest(self.per_position, other.per_position, fillvalue=0)
        self.per_position = list(map(sum, positions))

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / steps, vLLM's formula: tokens per verify step, the target's own included,
        or a little more where an answer ended on a draft. None before the first step."""
        return 1 + self.accepted / self.steps if self.steps else None


class Request:
    """One answer in the making. The scheduler owns its status; `tokens` is prompt then output."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int,
        sibling: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        method: str = "none",
        num_drafts: int = 0,
        off_reason: str | None = None,
        key: Hashable = None,
        place: Place = USUAL,
    ):
        """sibling: which of a prompt's n answers; key: what the caller names the prompt by. Of its
        own, `queued`: seconds until it ran."""
        self.id, self.key = request_id, key
        self.tokens = list(prompt_ids)
        self.num_prompt = len(self.tokens)
        self.sampling = sampling
        self.seed, self.sibling = seed, sibling
        self.stop_ids = stop_ids
        self.method, self.num_drafts = method, num_drafts
        self.off_reason = off_reason
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.stop_reason: int | str | None = None
        self.speculation = SpeculationCount()
        self.num_preemptions = 0
        self.num_cached: int | None = None
        self.arrived_at = time.monotonic()
        self.queued = 0.0
        self.started = False
        self.failures, self.failed_at = 0, -1
        self.priority, self.page_keys = place.priority, PageKeys(place.salt)
        self.scores_prompt = sampling.prompt_logprobs is not None and not sibling
        self.prompt_logprobs: list[TokenLogprob | None] = [None] if self.scores_prompt else []

    @property
    def methods(self) -> list[str]:
        """The parts of its method."""
        return self.method.split("+")

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]
