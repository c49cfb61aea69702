"""One request's life on the host. Knows nothing of pages or tensors."""

from __future__ import annotations

import enum
import hashlib
import reprlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Literal, NamedTuple

from strobe.counters import DraftCounts
from strobe.sampling_params import RepetitionDetection, SamplingParams

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]

CUT_SHORT: frozenset[FinishReason | None] = frozenset({"length", "repetition"})
"""Finish reasons of answers that the model would have gone on with."""


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
MAX_PASSED = 256
"""Requests that may be admitted before one that arrived earlier, whatever their priority."""


class PageKeys(list[bytes]):
    """Content keys of a sequence's full pages; root: the key before the first one."""

    def __init__(self, cache_salt: str = ""):
        """Raises ValueError for a salt that is no whole Unicode text."""
        try:
            salt = cache_salt.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"cache_salt is {reprlib.repr(cache_salt)}, but must be a text of one or more "
                "whole Unicode characters."
            ) from None
        self.root = hashlib.blake2b(salt, digest_size=16).digest() if salt else b""


class RepetitionDetector:
    """Reads an answer token by token and tells whether it ends in a repeated pattern.

    The answer ends in `min_count` copies of a pattern of `size` tokens if each of the newest
    size * (min_count - 1) tokens equals the one `size` places before it. A token that does not
    rules this out until so many tokens follow it, and only then is this size compared again. So no
    token is compared twice for a size, and few are compared at all: about one per token of the
    answer for 8 copies of up to 256 tokens.
    """

    def __init__(self, settings: RepetitionDetection, *, min_tokens: int = 0):
        """min_tokens: no repetition is reported before the answer has this many tokens."""
        self._min_count = settings.min_count
        self._min_size = max(settings.min_pattern_size, 1)
        self._max_size = settings.max_pattern_size
        self._min_tokens = min_tokens
        self._tokens: list[int] = []
        self._sizes_at: dict[int, list[int]] = {}
        """Pattern sizes to compare once the answer has that many tokens."""

    def push(self, token: int) -> bool:
        """Add the answer's next token; return whether the answer ends in a repeated pattern."""
        self._tokens.append(token)
        length = len(self._tokens)
        sizes = self._sizes_at.pop(length, [])
        size, rest = divmod(length, self._min_count)
        if not rest and self._min_size <= size <= self._max_size:
            sizes.append(size)
        for size in sizes:
            needed = size * (self._min_count - 1)
            num_equal = self._count_equal(size, needed)
            if num_equal < needed:
                following = length - num_equal + needed
            elif length < self._min_tokens:
                following = self._min_tokens
            else:
                return True
            self._sizes_at.setdefault(following, []).append(size)
        return False

    def _count_equal(self, size: int, limit: int) -> int:
        """Return how many of the newest tokens equal the one `size` places before, up to a
        limit."""
        tokens = self._tokens
        last = len(tokens) - 1
        for count in range(limit):
            if tokens[last - count] != tokens[last - count - size]:
                return count
        return limit


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One answer in progress. The scheduler owns its status.

    tokens: the prompt, then the output. sibling: index among the prompt's n answers; key: the
    caller's name for the prompt; off_reason: reason for no speculation; always_drafts: no
    step may leave its drafts out; queue_time: seconds in the
    queue.
    """

    id: str
    prompt_ids: InitVar[Sequence[int]]
    sampling: SamplingParams
    seed: int
    sibling: int = 0
    stop_ids: frozenset[int] = frozenset()
    method: str = "none"
    num_drafts: int = 0
    off_reason: str | None = None
    always_drafts: bool = False
    key: Hashable = None
    scheduling: SchedulingOptions = DEFAULT_SCHEDULING
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    page_keys: PageKeys = field(init=False)
    wants_prompt_logprobs: bool = field(init=False)
    repetition_detector: RepetitionDetector | None = field(init=False)
    prompt_logprobs: list[TokenLogprob | None] = field(init=False)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop_reason: int | str | None = None
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    num_preemptions: int = 0
    num_cached: int | None = None
    """Positions of its prompt that the prefix cache had, once it was admitted."""
    num_host_cached: int = 0
    """Of these, positions that were brought back from host memory."""
    arrived_at: float = field(default_factory=time.monotonic)
    queue_time: float = 0.0
    started: bool = False
    failures: int = 0
    failed_at: int = -1
    order: int = 0
    """Its place among all requests by arrival, which the scheduler counts."""
    num_assumed: int = 0
    """Positions of its prompt that count as computed, whatever their K/V and states hold, to time
    steps."""
    num_passed: int = 0
    """Times that a request which arrived later was admitted before it."""

    def __post_init__(self, prompt_ids: Sequence[int]) -> None:
        self.tokens = list(prompt_ids)
        self.num_prompt = len(self.tokens)
        self.page_keys = PageKeys(self.scheduling.cache_salt)
        self.wants_prompt_logprobs = self.sampling.prompt_logprobs is not None and not self.sibling
        self.repetition_detector = self._make_repetition_detector()
        first = [None] if self.wants_prompt_logprobs else []
        self.prompt_logprobs = [*first]

    def _make_repetition_detector(self) -> RepetitionDetector | None:
        settings = self.sampling.repetition_detection
        if not isinstance(settings, RepetitionDetection) or not settings.is_on:
            return None
        return RepetitionDetector(settings, min_tokens=self.sampling.min_tokens)

    def truncate(self, count: int) -> None:
        """Keep the first `count` tokens, as before a step that is undone."""
        if len(self.tokens) == count:
            return
        del self.tokens[count:]
        self.repetition_detector = self._make_repetition_detector()
        if self.repetition_detector is not None:
            for token in self.output_ids:
                self.repetition_detector.push(token)

    @property
    def is_overdue(self) -> bool:
        """Whether so many others went before it that no more may, whatever their priority."""
        return self.num_passed >= MAX_PASSED

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]
