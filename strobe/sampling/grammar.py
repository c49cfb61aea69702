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


class MaskJob(NamedTuple):
    """Masks from `row` of a span on, one more than there are tokens: of where the matcher stands,
    and behind each of the tokens; None: behind the grammar's end, where only the end may come."""

    matcher: LLMatcher | None
    row: int
    tokens: list[int]


class GrammarWalk(NamedTuple):
    """drafts: as they came, but for forced tokens. jobs: the masks to compute, by place among the
    drafts; rows of no job are free."""

    drafts: list[list[int]]
    jobs: dict[int, tuple[GrammarCursor, list[MaskJob]]]


class GrammarCursor:
    """One request's place in its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, structured: StructuredOutputs):
        self.matcher, self.tokenizer = matcher, tokenizer
        self.end_ids = frozenset(tokenizer.eos_tokens)
        self.unforced = structured.grammar is not None or structured.instead is not None
        self.think_end, self.think_start = tuple(structured.after), structured.opener
        self.unconstrained = bool(self.think_end) and self.think_start is None
        self.output_ids: list[int] = []
        self.error: str | None = None

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Take in committed tokens; returns what went wrong, now or earlier."""
        for token in tokens:
            self.output_ids.append(token)
            if self._starts_thinking(self.output_ids):
                self.unconstrained = True
            elif self.unconstrained:
                self.unconstrained = not self._ends_thinking(self.output_ids)
            elif self.error is None and not self.matcher.consume_token(token):
                self.fail()
        return self.error

    def fail(self) -> None:
        reason = one_line(self.matcher.get_error())
        self.error = f"structured_outputs: the grammar cannot be followed further: {reason}"

    def walk(self, drafts: list[int]) -> list[MaskJob]:
        """Put forced tokens among the drafts, and give the masks to compute."""
        matcher, unconstrained, num_consumed = self.matcher, self.unconstrained, 0
        jobs = list[MaskJob]()
        recent = self.output_ids[-max(len(self.think_end), 1) :]
        for row in range(len(drafts) + 1):
            is_stopped = not unconstrained and matcher.is_stopped()
            if not unconstrained:
                active = None if is_stopped else matcher
                if not jobs or jobs[-1].matcher is not active:
                    jobs.append(MaskJob(active, row, []))
                else:
                    jobs[-1].tokens.append(drafts[row - 1])
            if row == len(drafts):
                break
            recent.append(drafts[row])
            if self._starts_thinking(recent):
                jobs, unconstrained = [MaskJob(matcher.deep_copy(), 0, [])], True
            elif unconstrained:
                unconstrained = not self._ends_thinking(recent)
            elif is_stopped:
                if drafts[row] not in self.end_ids:  # behind the end comes only the end
                    break
            else:
                if not matcher.try_consume_tokens([drafts[row]]):
                    forced = self._forced()
                    drafts[row:] = [*forced, *drafts[row + len(forced) :]][: len(drafts) - row]
                    if not forced or not matcher.try_consume_tokens([drafts[row]]):
                        break
                    recent[-1] = drafts[row]
                num_consumed += 1
        if num_consumed:
            matcher.rollback(num_consumed)
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

    def _starts_thinking(self, tokens: Sequence[int]) -> bool:
        """Whether the newest token is the answer's first and begins thinking."""
        return len(tokens) == 1 and tokens[0] == self.think_start

    def _ends_thinking(self, tokens: Sequence[int]) -> bool:
        return tuple(tokens[-len(self.think_end) :]) == self.think_end


class GrammarState:
    """Follows the grammars of requests by their slots, one matcher each."""

    def __init__(self, compiler: GrammarCompiler):
        self.compiler = compiler
        self._cursors: dict[int, GrammarCursor] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._cursors

    def admit(
        self, slot: int, structured: StructuredOutputs | None, output_tokens: Sequence[int] = ()
    ) -> None:
        """Follow a request that has made some tokens already, None for one without a grammar; what
        the slot held before is gone. Raises ValueError for a grammar that does not compile."""
        self._cursors.pop(slot, None)
        if structured is None:
            return
        matcher = self.compiler.compile(structured, slot % LANES)
        self._cursors[slot] = cursor = GrammarCursor(matcher, self.compiler.tokenizer, structured)
        cursor.advance(output_tokens)

    def advance(self, slot: int, tokens: Sequence[int]) -> str | None:
        """Take in the tokens that a step committed; returns what went wrong, which every later
        walk says, too. A slot that follows no grammar takes in nothing."""
        cursor = self._cursors.get(slot)
        return None if cursor is None else cursor.advance(tokens)

    def walk(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> GrammarWalk:
        """Walk along the drafts of n slots; one that follows no grammar has no part in it."""
        walked = [list(tokens) for tokens in drafts]
        jobs = dict[int, tuple[GrammarCursor, list[MaskJob]]]()
        for i, slot in enumerate(slots):
            if (cursor := self._cursors.get(slot)) is not None:
                cursor_jobs = [] if cursor.error is not None else cursor.walk(walked[i])
                jobs[i] = cursor, cursor_jobs
        return GrammarWalk(walked, jobs)

    def fill(self, walk: GrammarWalk, masks: Masks) -> dict[int, str]:
        """Write the masks [n or more, K + 1 or more, words] of a walk, before its slots advance;
        those of slots that follow no grammar are left as they are. Returns what ails a request's
        grammar, by its place among the n; its rows are free."""
        width = masks.shape[1]
        paths, single_rows = list[tuple[LLMatcher, int, list[int]]](), list[tuple[LLMatcher, int]]()
        for i, (_, jobs) in walk.jobs.items():
            free = np.ones(width, dtype=np.bool_)
            for matcher, row, tokens in jobs:
                rows = slice(row, row + len(tokens) + 1)
                free[rows] = False
                if matcher is None:
                    masks[i, rows] = self._end_mask
                elif tokens:
                    paths.append((matcher, i * width + row, tokens))
                else:
                    single_rows.append((matcher, i * width + row))
            masks[i, free] = -1
        buffer = masks.ctypes.data, masks.strides[1], masks.shape[0] * width
        if paths:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(paths, *buffer)
        if single_rows:
            self._executor.unsafe_compute_mask_ptr(single_rows, *buffer)
        errors: dict[int, str] = {}
        for i, (cursor, _) in walk.jobs.items():
            if cursor.matcher.is_error() and cursor.error is None:
                cursor.fail()
            if cursor.error is not None:
                errors[i], masks[i] = cursor.error, -1
            elif cursor.think_start is not None and not cursor.output_ids:
                masks[i, 0] |= _bits([cursor.think_start], self.compiler.words)
        return errors

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    @cached_property
    def _end_mask(self) -> NDArray[np.int32]:
        return _bits(self.compiler.tokenizer.eos_tokens, self.compiler.words)


def _bits(ids: Sequence[int], words: int) -> NDArray[np.int32]:
    """A mask [words] of some tokens."""
    bits = np.zeros(words * 32, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
