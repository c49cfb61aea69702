"""One request's life on the host. Knows nothing of pages or tensors."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

from strobe.counters import DraftCounts
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
