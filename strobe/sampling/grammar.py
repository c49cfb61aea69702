"""Structured output: what a grammar allows behind each draft, and the drafts that it forces.

The matcher of a request stands behind its committed tokens. Before a verify step's forward it walks
along the drafts once: a draft that is not allowed gives way to what the grammar forces there, where
it leaves one continuation only, such as a schema's next key. The matcher then stands where it was,
and while the target runs the masks of all rows on the way are computed together:

    committed | tail  d1    d2    d3        (d3 not allowed, nothing forced)
              | mask0 mask1 mask2 free      what may follow; behind d3 nothing is kept
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from strobe.grammars.source import one_line
from strobe.sampling.grammar_compiler import GrammarCompiler
from strobe.sampling_params import StructuredOutputs

LANES = 16
"""Slots whose matchers do not wait for one another, even where they are of one grammar."""

MAX_BEGINNINGS = 32

Masks = NDArray[np.int32]


class Job(NamedTuple):
    """Masks from `row` of a span on, one more than there are tokens: of where the matcher stands,
    and behind each of the tokens; None: behind the grammar's end, where only the end may come."""

    matcher: LLMatcher | None
    row: int
    tokens: list[int]


class GrammarWalk(NamedTuple):
    """drafts: as they came, but for forced tokens. jobs: the masks to compute, by place among the
    drafts; rows of no job are free."""

    drafts: list[list[int]]
    jobs: dict[int, tuple[Follower, list[Job]]]


class Follower:
    """One request's place in its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, structured: StructuredOutputs):
        self.matcher, self.tokenizer = matcher, tokenizer
        self.ends = frozenset(tokenizer.eos_tokens)
        self.unforced = structured.grammar is not None or structured.instead is not None
        self.after, self.opener = tuple(structured.after), structured.opener
        self.free = bool(self.after) and self.opener is None
        self.made: list[int] = []
        self.error: str | None = None

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Take in committed tokens; returns what went wrong, now or earlier."""
        for token in tokens:
            self.made.append(token)
            if self._opens(self.made):
                self.free = True
            elif self.free:
                self.free = not self._begins(self.made)
            elif self.error is None and not self.matcher.consume_token(token):
                self.fail()
        return self.error

    def fail(self) -> None:
        reason = one_line(self.matcher.get_error())
        self.error = f"structured_outputs: the grammar cannot be followed further: {reason}"

    def walk(self, drafts: list[int]) -> list[Job]:
        """Put forced tokens among the drafts, and give the masks to compute."""
        matcher, free, taken, jobs = self.matcher, self.free, 0, list[Job]()
        known = self.made[-max(len(self.after), 1) :]
        for row in range(len(drafts) + 1):
            stopped = not free and matcher.is_stopped()
            if not free:
                now = None if stopped else matcher
                if not jobs or jobs[-1].matcher is not now:
                    jobs.append(Job(now, row, []))
                else:
                    jobs[-1].tokens.append(drafts[row - 1])
            if row == len(drafts):
                break
            known.append(drafts[row])
            if self._opens(known):
                jobs, free = [Job(matcher.deep_copy(), 0, [])], True
            elif free:
                free = not self._begins(known)
            elif stopped:
                if drafts[row] not in self.ends:  # behind the end comes only the end
                    break
            else:
                if not matcher.try_consume_tokens([drafts[row]]):
                    forced = self._forced()
                    drafts[row:] = [*forced, *drafts[row + len(forced) :]][: len(drafts) - row]
                    if not forced or not matcher.try_consume_tokens([drafts[row]]):
                        break
                    known[-1] = drafts[row]
                taken += 1
        if taken:
            matcher.rollback(taken)
        return jobs

    def _forced(self) -> list[int]:
        """The tokens that the grammar forces next. Where llguidance must not look for them, see
        `grammars.source`: the longest token that may come, where the others are its beginnings."""
        if not self.unforced:
            return self.matcher.compute_ff_tokens()
        mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if not 0 < len(allowed) <= MAX_BEGINNINGS:
            return []
        texts = {self.tokenizer.decode_bytes([token]): token for token in allowed}
        longest = max(texts, key=len)
        return [texts[longest]] if all(longest.startswith(text) for text in texts) else []

    def _opens(self, tokens: Sequence[int]) -> bool:
        """Whether the newest token is the answer's first and begins thinking."""
        return len(tokens) == 1 and tokens[0] == self.opener

    def _begins(self, tokens: Sequence[int]) -> bool:
        return tuple(tokens[-len(self.after) :]) == self.after


class GrammarState:
    """Follows the grammars of requests by their slots, one matcher each."""

    def __init__(self, compiler: GrammarCompiler):
        self.compiler = compiler
        self._followers: dict[int, Follower] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._followers

    def admit(
        self, slot: int, structured: StructuredOutputs | None, output_tokens: Sequence[int] = ()
    ) -> None:
        """Follow a request that has made some tokens already, None for one without a grammar; what
        the slot held before is gone. Raises ValueError for a grammar that does not compile."""
        self._followers.pop(slot, None)
        if structured is None:
            return
        matcher = self.compiler.compile(structured, slot % LANES)
        self._followers[slot] = follower = Follower(matcher, self.compiler.tokenizer, structured)
        follower.advance(output_tokens)

    def advance(self, slot: int, tokens: Sequence[int]) -> str | None:
        """Take in the tokens that a step committed; returns what went wrong, which every later
        walk says, too. A slot that follows no grammar takes in nothing."""
        follower = self._followers.get(slot)
        return None if follower is None else follower.advance(tokens)

    def walk(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> GrammarWalk:
        """Walk along the drafts of n slots; one that follows no grammar has no part in it."""
        found, jobs = [list(tokens) for tokens in drafts], dict[int, tuple[Follower, list[Job]]]()
        for i, slot in enumerate(slots):
            if (follower := self._followers.get(slot)) is not None:
                made = [] if follower.error is not None else follower.walk(found[i])
                jobs[i] = follower, made
        return GrammarWalk(found, jobs)

    def fill(self, walk: GrammarWalk, masks: Masks) -> dict[int, str]:
        """Write the masks [n or more, K + 1 or more, words] of a walk, before its slots advance;
        those of slots that follow no grammar are left as they are. Returns what ails a request's
        grammar, by its place among the n; its rows are free."""
        width = masks.shape[1]
        paths, places = list[tuple[LLMatcher, int, list[int]]](), list[tuple[LLMatcher, int]]()
        for i, (_, jobs) in walk.jobs.items():
            free = np.ones(width, dtype=np.bool_)
            for matcher, row, tokens in jobs:
                rows = slice(row, row + len(tokens) + 1)
                free[rows] = False
                if matcher is None:
                    masks[i, rows] = self._ended
                elif tokens:
                    paths.append((matcher, i * width + row, tokens))
                else:
                    places.append((matcher, i * width + row))
            masks[i, free] = -1
        where = masks.ctypes.data, masks.strides[1], masks.shape[0] * width
        if paths:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(paths, *where)
        if places:
            self._executor.unsafe_compute_mask_ptr(places, *where)
        errors: dict[int, str] = {}
        for i, (follower, _) in walk.jobs.items():
            if follower.matcher.is_error() and follower.error is None:
                follower.fail()
            if follower.error is not None:
                errors[i], masks[i] = follower.error, -1
            elif follower.opener is not None and not follower.made:
                masks[i, 0] |= _bits([follower.opener], self.compiler.words)
        return errors

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    @cached_property
    def _ended(self) -> NDArray[np.int32]:
        return _bits(self.compiler.tokenizer.eos_tokens, self.compiler.words)


def _bits(ids: Sequence[int], words: int) -> NDArray[np.int32]:
    """A mask [words] of some tokens."""
    bits = np.zeros(words * 32, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
