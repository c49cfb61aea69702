"""The doctor's report: facts and findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """The result of one check: ok, a note or a fault. about: its subject, such as "mask token";
    says: one or more sentences."""

    level: Level
    about: str
    says: str


@dataclass
class Report:
    """The report on one pair. facts: by section; measured: acceptance with thinking off and on;
    margins: for each position in the block, the probability that drafts are right; variants: other
    readings of the drafter's config; formats: tokens per step with rounded weights and without;
    findings: in the order of the checks."""

    target: str
    draft: str
    facts: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    findings: list[Finding] = field(default_factory=list[Finding])
    measured: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    margins: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    variants: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    formats: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def ok(self, about: str, says: str) -> None:
        self.findings.append(Finding("ok", about, says))

    def note(self, about: str, says: str) -> None:
        self.findings.append(Finding("note", about, says))

    def fault(self, about: str, says: str) -> None:
        self.findings.append(Finding("fault", about, says))

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "fault"]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for --json."""
        return asdict(self) | {"healthy": not self.faults}
