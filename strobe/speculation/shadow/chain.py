"""The verify steps that an answer would have had with a drafter. Imports no torch.

    position   p     p+1   p+2   p+3   p+4
    answer     t0    t1    t2    t3    t4
    drafts           t1    t2    x            two accepted: t3 comes from the target itself
                                 |
                                 next block: after t3, the newest token then

So a block after position p of which `a` drafts are accepted leads to the next one after p + a + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Block:
    """A block that waits for the answer's tokens. start: position of the newest token before it;
    is_exact: whether a verify step would have begun there."""

    start: int
    drafts: Sequence[int]
    is_exact: bool

    def num_accepted(self, tokens: Sequence[int], *, ended: bool) -> int | None:
        """Return the number of leading drafts that the sequence `tokens` continues with; None while
        it is too short to decide this, unless the answer has ended."""
        following = tokens[self.start + 1 : self.start + 1 + len(self.drafts)]
        for i, (draft, token) in enumerate(zip(self.drafts, following, strict=False)):
            if draft != token:
                return i
        return len(following) if ended or len(following) == len(self.drafts) else None


@dataclass
class Chain:
    """One drafter's blocks over one answer. next_start: where the next block is due, None for
    wherever the answer is."""

    next_start: int | None = None
    block: Block | None = None
    is_broken: bool = False
    """Whether a block was left out, so that the next one starts where no verify step would."""

    def is_due(self, start: int) -> bool:
        """Whether a verify step would begin after the newest token at this position. A chain that
        has missed its position goes on from this one, outside the count."""
        if self.block is not None:
            return False
        if self.next_start is None:
            return True
        if start > self.next_start:
            self.is_broken = True
        return start >= self.next_start

    def begin(self, start: int, drafts: Sequence[int]) -> None:
        """Take in the drafts after a position."""
        self.block = Block(start=start, drafts=drafts, is_exact=not self.is_broken)
        self.is_broken = False

    def resolve(self, tokens: Sequence[int], *, ended: bool) -> tuple[Block, int] | None:
        """Return the block with its accepted drafts once the answer's tokens decide it."""
        block = self.block
        if block is None:
            return None
        num_accepted = block.num_accepted(tokens, ended=ended)
        if num_accepted is None:
            return None
        self.block = None
        self.next_start = block.start + num_accepted + 1
        return block, num_accepted
