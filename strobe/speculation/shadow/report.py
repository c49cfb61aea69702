"""Scores of drafters in shadow mode, by kind of prompt, phase and context. Imports no torch.

Blocks of one answer resemble each other, so intervals come from the answers: the acceptance length
is a ratio of sums over answers, with the variance of such a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NamedTuple

from strobe.step import ScoredBlock

CONFIDENCE = 1.96
"""Standard errors of an interval of 95 %."""


class Group(NamedTuple):
    """Blocks that are counted together."""

    drafter: str
    kind: str
    phase: str
    context: str


@dataclass
class BlockSums:
    """Blocks and accepted drafts of answers, and the sums of their products over answers."""

    answers: int = 0
    blocks: int = 0
    drafts: int = 0
    accepted: int = 0
    squared_blocks: int = 0
    squared_accepted: int = 0
    products: int = 0

    def add(self, blocks: int, drafts: int, accepted: int) -> None:
        """Add one answer."""
        self.answers += 1
        self.blocks += blocks
        self.drafts += drafts
        self.accepted += accepted
        self.squared_blocks += blocks * blocks
        self.squared_accepted += accepted * accepted
        self.products += blocks * accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step."""
        return 1 + self.accepted / self.blocks

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of 95 % of the acceptance length; None for one answer."""
        if self.answers < 2:
            return None
        ratio = self.accepted / self.blocks
        squares = self.squared_accepted - 2 * ratio * self.products
        squares += ratio * ratio * self.squared_blocks
        variance = self.answers / (self.answers - 1) * max(squares, 0.0) / self.blocks**2
        reach = CONFIDENCE * sqrt(variance)
        return max(1.0, 1 + ratio - reach), 1 + ratio + reach

    def as_dict(self) -> dict[str, Any]:
        interval = self.interval
        return {
            "answers": self.answers,
            "blocks": self.blocks,
            "drafts": self.drafts,
            "accepted": self.accepted,
            "acceptance_length": round(self.acceptance_length, 3),
            "interval": None if interval is None else [round(end, 3) for end in interval],
        }


@dataclass
class ShadowTally:
    """Scores of all drafters since the start, of answers that have ended."""

    sums: dict[Group, BlockSums] = field(default_factory=dict[Group, BlockSums])

    def add(self, blocks: Sequence[tuple[Group, ScoredBlock]]) -> None:
        """Add the blocks of an answer that has ended, in all groups."""
        for select in (_drafter_only, _kind_only, _phase_only, _context_only):
            self._add(blocks, select)

    def _add(
        self, blocks: Sequence[tuple[Group, ScoredBlock]], select: Callable[[Group], Group]
    ) -> None:
        groups = [select(group) for group, _ in blocks]
        for group in dict.fromkeys(groups):
            own = [block for key, (_, block) in zip(groups, blocks, strict=True) if key == group]
            self.sums.setdefault(group, BlockSums()).add(
                blocks=len(own),
                drafts=sum(block.num_drafts for block in own),
                accepted=sum(block.num_accepted for block in own),
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the scores of each drafter: all, and by kind, phase and context."""
        report: dict[str, Any] = {}
        for group, sums in sorted(self.sums.items()):
            scores = report.setdefault(group.drafter, {"by": {}})
            name = next((name for name in group._fields[1:] if getattr(group, name)), None)
            if name is None:
                scores.update(sums.as_dict())
            else:
                scores["by"].setdefault(name, {})[getattr(group, name)] = sums.as_dict()
        return report

    def as_text(self) -> str:
        """Return the scores as a table."""
        rows = [("drafter", "group", "answers", "steps", "tokens/step", "95 %")]
        for group, sums in sorted(self.sums.items()):
            interval = sums.interval
            ends = "-" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
            name = next((part for part in group[1:] if part), "all")
            counts = str(sums.answers), str(sums.blocks)
            rows.append((group.drafter, name, *counts, f"{sums.acceptance_length:.2f}", ends))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines) + "\n"


def _drafter_only(group: Group) -> Group:
    return Group(drafter=group.drafter, kind="", phase="", context="")


def _kind_only(group: Group) -> Group:
    return group._replace(phase="", context="")


def _phase_only(group: Group) -> Group:
    return group._replace(kind="", context="")


def _context_only(group: Group) -> Group:
    return group._replace(kind="", phase="")
