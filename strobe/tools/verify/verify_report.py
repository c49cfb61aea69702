"""The verdict as text and as Markdown."""

from __future__ import annotations

from rich.text import Text

from strobe.tools import report
from strobe.tools.verify.findings import Verification

_STYLES = {"ok": "green", "note": "yellow", "undecided": "bold yellow", "fault": "bold red"}
_VERDICTS = {
    "clean": "The output is the target's own.",
    "fault": "The output is not the target's own.",
    "undecided": "Nothing could be decided.",
}


def show(verification: Verification) -> None:
    """Print the findings with the faults last, the figures and the verdict."""
    console = report.output()
    console.print(f"target   {verification.target}", soft_wrap=True)
    console.print(f"drafter  {verification.draft or 'none (prompt lookup)'}", soft_wrap=True)
    console.print()
    for level, style in _STYLES.items():
        for finding in verification.of(level):  # type: ignore[arg-type]
            line = Text.assemble((f"{level:<10}", style), f"{finding.about}: {finding.says}")
            console.print(line, soft_wrap=True)
    console.print()
    for line in _figures(verification):
        console.print(line, soft_wrap=True)
    style = _STYLES["ok" if verification.verdict == "clean" else "fault"]
    console.print(verdict(verification), style=style, soft_wrap=True)


def verdict(verification: Verification) -> str:
    """Return the verdict in a sentence, with its power."""
    tokens = verification.figures.get("tokens", 0)
    if verification.verdict != "clean":
        return f"Verdict: {verification.verdict}. {_VERDICTS[verification.verdict]}"
    one_in = int(1 / verification.figures["detectable_rate"])
    return (
        f"Verdict: clean. {_VERDICTS['clean']} {tokens:,} tokens were checked: one wrong token in "
        f"{one_in:,} would have shown with 95 %."
    )


def _figures(verification: Verification) -> list[str]:
    figures = verification.figures
    if "plain_tokens_per_s" not in figures:
        return []
    plain = figures["plain_tokens_per_s"]
    drafted = figures["speculation_tokens_per_s"]
    length = figures["acceptance_length"]
    parts = ", ".join(f"{name} {value:.0f} s" for name, value in verification.seconds.items())
    return [
        f"{plain:.1f} tokens/s plain, {drafted:.1f} with speculation ({drafted / plain:.2f}x), "
        f"{'-' if length is None else f'{length:.2f}'} tokens a step; all drafts verified, with "
        "log probabilities.",
        f"Time: {parts}; the reference and comparing took {figures['overhead']:.0%} of generating.",
    ]


def markdown(verification: Verification) -> str:
    """Return the verdict as a page."""
    rows = [
        (finding.level, finding.about, finding.says)
        for level in reversed(_STYLES)
        for finding in verification.of(level)  # type: ignore[arg-type]
    ]
    sections = [report.Section("Findings", ("", "about", "result"), rows)]
    if verification.divergences:
        parted = [
            (
                d["label"],
                d["run"],
                f"{d['wave']}, {d['case']}",
                str(d["position"]),
                f"{d['margin']:.3g}",
                f"{d['bound']:.2g}",
                d["texts"][0].replace("\n", " "),
                d["texts"][1].replace("\n", " "),
            )
            for d in verification.divergences
        ]
        columns = ("label", "run", "request", "token", "margin", "bound", "plain", "other")
        sections.append(report.Section("Divergences", columns, parted))
    page = report.Report(
        title="Verification",
        command=f"strobe verify {verification.target} {verification.draft or ''}".strip(),
        head=_figures(verification),
        sections=sections,
        warning=verdict(verification),
    )
    return page.markdown()
