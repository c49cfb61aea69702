"""The findings of a verification, and the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "note", "undecided", "fault"]
EXIT_STATUS = {"clean": 0, "fault": 1, "undecided": 2}


@dataclass(frozen=True)
class Finding:
    """The result of one check. about: its subject; says: one or more sentences."""

    level: Level
    about: str
    says: str


@dataclass
class Verification:
    """All results. figures: by section; divergences: each with its label; findings: in the order of
    the checks; seconds: by part."""

    target: str
    draft: str | None
    findings: list[Finding] = field(default_factory=list[Finding])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    divergences: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, level: Level, about: str, says: str) -> None:
        self.findings.append(Finding(level, about, says))

    def of(self, level: Level) -> Sequence[Finding]:
        """Return the findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    @property
    def verdict(self) -> str:
        """fault if there is one, else undecided if a check could not run, else clean."""
        if self.of("fault"):
            return "fault"
        return "undecided" if self.of("undecided") else "clean"

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        """Return everything for --json."""
        return {"verdict": self.verdict, **asdict(self)}
