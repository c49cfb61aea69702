"""What the doctor says: facts, and findings that are in order, worth knowing, or wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. about: which ("mask token"); says: one sentence or more."""

    level: Level
    about: str
    says: str


@dataclass
class Report:
    """Everything that was found of one pair. facts: by section; measured: acceptance as it is, by
    thinking; margins: by place in the block, how likely drafts are to be right; variants: what else
    was tried; findings: in the order they were made."""

    target: str
    draft: str
    facts: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    findings: list[Finding] = field(default_factory=list[Finding])
    measured: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    margins: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    variants: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

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
        """For --json."""
        return asdict(self) | {"healthy": not self.faults}
