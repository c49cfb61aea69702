"""Scores of drafters in shadow mode, by kind of prompt, phase and context. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strobe.speculation.shadow.block_sums import BlockSums, Estimate
from strobe.speculation.shadow.speed_up import Recommendation, ShadowCosts, SpeedUp
from strobe.step import ScoredBlock


class Group(NamedTuple):
    """Blocks that are counted together; an empty name counts all."""

    drafter: str
    kind: str
    phase: str
    context: str


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
            self.sums.setdefault(group, BlockSums()).add(own)

    @property
    def by_drafter(self) -> dict[str, BlockSums]:
        """The sums of all answers."""
        return {g.drafter: sums for g, sums in sorted(self.sums.items()) if not any(g[1:])}


def report_dict(tally: ShadowTally, costs: ShadowCosts | None) -> dict[str, Any]:
    """Return the scores of each drafter, all and by kind, phase and context, and the best drafter.
    costs: of the steps, None if they are not known."""
    drafters: dict[str, Any] = {}
    for group, sums in sorted(tally.sums.items()):
        scores = drafters.setdefault(group.drafter, {"by": {}})
        name = next((name for name in group._fields[1:] if getattr(group, name)), None)
        if name is None:
            scores.update(_scores(group.drafter, sums, costs))
        else:
            part = scores["by"].setdefault(name, {})
            part[getattr(group, name)] = _scores(group.drafter, sums, costs)
    return {
        "costs_measured": costs is not None and bool(costs.drafters),
        "recommended": [
            {
                "concurrency": choice.concurrency,
                "drafter": choice.best,
                "speedup": round(choice.estimate.value, 3),
                "interval": choice.estimate.rounded(),
                "rivals": list(choice.rivals),
            }
            for choice in _recommendations(tally, costs)
        ],
        "drafters": drafters,
    }


def _recommendations(tally: ShadowTally, costs: ShadowCosts | None) -> list[Recommendation]:
    if costs is None:
        return []
    sums = tally.by_drafter
    choices = [costs.recommend(sums, concurrency) for concurrency in costs.concurrencies]
    return [choice for choice in choices if choice is not None]


def _speed_ups(drafter: str, sums: BlockSums, costs: ShadowCosts | None) -> list[SpeedUp]:
    if costs is None:
        return []
    known = [costs.speed_up(drafter, sums, concurrency) for concurrency in costs.concurrencies]
    return [speed_up for speed_up in known if speed_up is not None]


def _scores(drafter: str, sums: BlockSums, costs: ShadowCosts | None) -> dict[str, Any]:
    tokens_per_step = sums.tokens_per_step()
    return {
        "answers": sums.answers,
        "blocks": sums.blocks,
        "drafts": int(sums.drafts[-1]),
        "accepted": int(sums.accepted[-1]),
        "acceptance_length": round(tokens_per_step.value, 3),
        "interval": tokens_per_step.rounded(),
        "speedup": [
            {
                "concurrency": speed_up.concurrency,
                "num_drafts": speed_up.num_drafts,
                "tokens_per_step": round(speed_up.tokens_per_step, 3),
                "speedup": round(speed_up.estimate.value, 3),
                "interval": speed_up.estimate.rounded(),
            }
            for speed_up in _speed_ups(drafter, sums, costs)
        ],
    }


def report_text(tally: ShadowTally, costs: ShadowCosts | None) -> str:
    """Return the scores as tables: drafters side by side, then each one's groups."""
    lines: list[str] = []
    if costs is None or not costs.drafters:
        lines += ["The costs of steps are not known, so there are no speed-ups.", ""]
    elif tally.sums:
        lines += ["Speed-up with the best number of drafts (±: 95 %)", ""]
        lines += [*_comparison(tally, costs), ""]
    header = ["drafter", "group", "answers", "steps", "tokens/step"]
    if costs is not None and costs.drafters:
        header += [f"x at {n}" for n in costs.concurrencies]
    rows = [header]
    for group, sums in sorted(tally.sums.items()):
        name = next((part for part in group[1:] if part), "all")
        row = [group.drafter, name, str(sums.answers), str(sums.blocks)]
        row.append(_cell(sums.tokens_per_step()))
        row += [_cell(s.estimate) for s in _speed_ups(group.drafter, sums, costs)]
        rows.append(row)
    return "\n".join([*lines, *_aligned(rows)]) + "\n"


def _comparison(tally: ShadowTally, costs: ShadowCosts) -> Iterable[str]:
    """Return the table of all drafters by concurrency."""
    sums = tally.by_drafter
    rows = [["requests", *sums, "best"]]
    for choice in _recommendations(tally, costs):
        row = [str(choice.concurrency)]
        for name, own in sums.items():
            speed_up = costs.speed_up(name, own, choice.concurrency)
            row.append(
                "-"
                if speed_up is None
                else f"{_cell(speed_up.estimate)}, {speed_up.num_drafts} drafts"
            )
        row.append(" or ".join([choice.best, *choice.rivals]))
        rows.append(row)
    return _aligned(rows)


def _cell(estimate: Estimate) -> str:
    if estimate.interval is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f}±{estimate.interval[1] - estimate.value:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines. Rows may be shorter than the first one."""
    widths = [max([len(row[i]) for row in rows if i < len(row)]) for i in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _drafter_only(group: Group) -> Group:
    return Group(drafter=group.drafter, kind="", phase="", context="")


def _kind_only(group: Group) -> Group:
    return group._replace(phase="", context="")


def _phase_only(group: Group) -> Group:
    return group._replace(kind="", context="")


def _context_only(group: Group) -> Group:
    return group._replace(kind="", phase="")
