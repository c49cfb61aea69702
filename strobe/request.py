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
    """A token's natural log probability under the model itself, before temperature, penalties and
    masks; its rank from 1; and the highest log probabilities with their tokens."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SchedulingOptions(NamedTuple):
    """Scheduling of a request. priority: lower values run first; cache_salt: prefixes are shared
    only among requests with the same salt."""

    priority: int = 0
    cache_salt: str = ""


DEFAULT_SCHEDULING = SchedulingOptions()


class PageKeys(list[bytes]):
    """Content keys of a sequence's full pages; root: the key before the first one."""

    def __init__(self, cache_salt: str = ""):
        digest = hashlib.blake2b(cache_salt.encode(), digest_size=16).digest()
        self.root = digest if cache_salt else b""


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class DraftCounts:
    """Counts of drafting, of one answer or of many. steps: verify steps with drafts. num_proposed:
    drafts proposed; num_verified, num_accepted: of these verified and accepted;
    accepted_per_position: steps that accepted the draft at each position. rows: target rows in all
    steps that could draft; skipped_steps: steps among these without drafts."""

    steps: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list[int])
    num_proposed: int = 0
    rows: int = 0
    skipped_steps: int = 0

    def add(self, num_verified: int, num_accepted: int, num_proposed: int | None = None) -> None:
        """Count one decode step. num_proposed defaults to num_verified."""
        num_proposed = num_verified if num_proposed is None else num_proposed
        self.num_proposed += num_proposed
        self.rows += 1 + num_verified
        self.skipped_steps += not num_proposed
        self.steps += num_verified > 0
        self.num_verified += num_verified
        self.num_accepted += num_accepted
        self.accepted_per_position += [0] * (num_verified - len(self.accepted_per_position))
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def merge(self, counts: DraftCounts) -> None:
        """Add other counts to these."""
        for name in (
            "steps",
            "num_verified",
            "num_accepted",
            "num_proposed",
            "rows",
            "skipped_steps",
        ):
            setattr(self, name, getattr(self, name) + getattr(counts, name))
        pairs = self.accepted_per_position, counts.accepted_per_position
        self.accepted_per_position = list(map(sum, zip_longest(*pairs, fillvalue=0)))

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / steps, vLLM's formula: tokens per verify step, the target's own included,
        or a little more where an answer ended on a draft. None before the first step."""
        return 1 + self.num_accepted / self.steps if self.steps else None


class Request:
    """One answer in progress. The scheduler owns its status; `tokens` is the prompt, then the
    output."""

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
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    ):
        """sibling: index among the prompt's n answers; key: the caller's name for the prompt.
        queue_time: seconds in the queue."""
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
        self.draft_counts = DraftCounts()
        self.num_preemptions = 0
        self.num_cached: int | None = None
        self.arrived_at = time.monotonic()
        self.queue_time = 0.0
        self.started = False
        self.failures, self.failed_at = 0, -1
        self.priority, self.page_keys = scheduling.priority, PageKeys(scheduling.cache_salt)
        self.wants_prompt_logprobs = sampling.prompt_logprobs is not None and not sibling
        first = [None] if self.wants_prompt_logprobs else []
        self.prompt_logprobs: list[TokenLogprob | None] = [*first]

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
