"""Structured output: grammar masks after each draft, and drafts that a grammar forces.

A request's matcher has consumed the committed tokens. Before a verify step's forward it walks along
the drafts once. Where the grammar leaves only one continuation, such as a schema's next key, the
forced tokens replace drafts that it does not allow. Then the matcher rolls back, and the masks of
all rows on the way are computed together while the target runs:

    committed | tail  d1    d2    d3        (d3 is not allowed, nothing is forced)
              | mask0 mask1 mask2 free      tokens after each row; none after d3 is accepted
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from strobe.grammars.source import free_thinking, is_unforced, unfollowed
from strobe.sampling.grammar_compiler import GrammarCompiler
from strobe.sampling_params import StructuredOutputs

LANES = 16
"""Slots of one grammar whose matchers share no lock."""

MAX_BEGINNINGS = 32

Masks = NDArray[np.int32]


class MaskJob(NamedTuple):
    """Masks of len(tokens) + 1 rows from `row` of a span on: at the matcher's position, and after
    each of the tokens. matcher: None after the grammar's end, where only end tokens may follow."""

    matcher: LLMatcher | None
    row: int
    tokens: list[int]


class GrammarWalk(NamedTuple):
    """drafts: with forced tokens in place. jobs: cursors and masks to compute, by index in
    `drafts`; rows of no job are unconstrained."""

    drafts: list[list[int]]
    jobs: dict[int, tuple[GrammarCursor, list[MaskJob]]]


class GrammarCursor:
    """A request's position in its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, structured: StructuredOutputs):
        self.matcher = matcher
        self.tokenizer = tokenizer
        self.end_ids = frozenset(tokenizer.eos_tokens)
        self.unforced = is_unforced(structured)
        self.think_end, self.think_start = free_thinking(structured)
        self.unconstrained = bool(self.think_end) and self.think_start is None
        self.output_ids: list[int] = []
        self.error: str | None = None

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Consume committed tokens; return an error, also one of earlier tokens."""
        for token in tokens:
            self.output_ids.append(token)
            if self._starts_thinking(self.output_ids):
                self.unconstrained = True
            elif self.unconstrained:
                self.unconstrained = not self._ends_thinking(self.output_ids)
            elif self.error is None and not self.matcher.consume_token(token):
                self.error = unfollowed(self.matcher)
        return self.error

    def walk(self, drafts: list[int]) -> list[MaskJob]:
        """Replace drafts by forced tokens in place; return the masks to compute."""
        matcher = self.matcher
        unconstrained = self.unconstrained
        num_consumed = 0
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
                jobs = [MaskJob(matcher.deep_copy(), 0, [])]
                unconstrained = True
            elif unconstrained:
                unconstrained = not self._ends_thinking(recent)
            elif is_stopped:
                if drafts[row] not in self.end_ids:  # only end tokens may follow the end
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
        """Return the tokens that the grammar forces next. If llguidance must not search for them
        (see `grammars.source`): the longest allowed token if all others are prefixes of it."""
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
        """Whether the only token so far starts thinking."""
        return len(tokens) == 1 and tokens[0] == self.think_start

    def _ends_thinking(self, tokens: Sequence[int]) -> bool:
        return tuple(tokens[-len(self.think_end) :]) == self.think_end


class GrammarState:
    """The grammar cursors of running requests, by slot."""

    def __init__(self, compiler: GrammarCompiler):
        self.compiler = compiler
        self._cursors: dict[int, GrammarCursor] = {}

    def admit(
        self, slot: int, structured: StructuredOutputs | None, output_tokens: Sequence[int] = ()
    ) -> None:
        """Replace the slot's cursor by one for a request that has generated `output_tokens`, or by
        none. Raises ValueError for a grammar that does not compile."""
        self._cursors.pop(slot, None)
        if structured is None:
            return
        matcher = self.compiler.compile(structured, slot % LANES)
        self._cursors[slot] = cursor = GrammarCursor(matcher, self.compiler.tokenizer, structured)
        cursor.advance(output_tokens)

    def advance(self, slot: int, tokens: Sequence[int]) -> str | None:
        """Consume the tokens that a step committed; return the error of a failed grammar, which
        `fill` reports, too. Slots without a grammar consume nothing."""
        cursor = self._cursors.get(slot)
        return None if cursor is None else cursor.advance(tokens)

    def walk(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> GrammarWalk:
        """Walk along the drafts of n slots; those without a grammar are skipped."""
        walked = [list(tokens) for tokens in drafts]
        jobs = dict[int, tuple[GrammarCursor, list[MaskJob]]]()
        for i, slot in enumerate(slots):
            if (cursor := self._cursors.get(slot)) is not None:
                cursor_jobs = [] if cursor.error is not None else cursor.walk(walked[i])
                jobs[i] = cursor, cursor_jobs
        return GrammarWalk(walked, jobs)

    def fill(self, walk: GrammarWalk, masks: Masks) -> dict[int, str]:
        """Write the masks [>= n, >= K + 1, words] of a walk before its slots advance; masks of
        slots without a grammar are left as they are. Return the errors of failed grammars by index
        among the n slots; their rows are unconstrained."""
        width = masks.shape[1]
        paths = list[tuple[LLMatcher, int, list[int]]]()
        single_rows = list[tuple[LLMatcher, int]]()
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
        address = masks.ctypes.data
        row_bytes = masks.strides[1]
        num_rows = masks.shape[0] * width
        if paths:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                paths, address, row_bytes, num_rows
            )
        if single_rows:
            self._executor.unsafe_compute_mask_ptr(single_rows, address, row_bytes, num_rows)
        errors: dict[int, str] = {}
        for i, (cursor, _) in walk.jobs.items():
            if cursor.matcher.is_error() and cursor.error is None:
                cursor.error = unfollowed(cursor.matcher)
            if cursor.error is not None:
                errors[i] = cursor.error
                masks[i] = -1
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
    """Return a mask [words] of the tokens."""
    bits = np.zeros(words * 32, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
