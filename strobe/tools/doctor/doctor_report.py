"""Print the doctor's report as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strobe.tools.doctor.findings import Report

_SIGNS = {"ok": ("green", "ok"), "note": ("yellow", "note"), "fault": ("bold red", "wrong")}


def show(report: Report) -> None:
    """Print facts, acceptance and variants, then the findings with the faults last."""
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(f"target   {report.target}", soft_wrap=True)
    console.print(f"drafter  {report.draft}", soft_wrap=True)
    for title, facts in report.facts.items():
        console.print()
        console.print(title.capitalize(), style="bold")
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(name, _text(name, value))
        console.print(table)
    if report.measured:
        _show_measured(console, report)
    if report.formats:
        _show_formats(console, report)
    console.print()
    console.print("Findings", style="bold")
    console.print(_findings(report))
    wrong = len(report.faults)
    result = "Nothing is wrong." if not wrong else f"{wrong} thing{'s' * (wrong > 1)} wrong."
    console.print()
    console.print(result, style="bold green" if not wrong else "bold red")
    if report.measured and not wrong:
        console.print(
            "strobe verify shows that the output stays the target's, and strobe serve --shadow "
            "what the drafter brings on your own traffic.",
            style="dim",
            soft_wrap=True,
        )


def _findings(report: Report) -> Table:
    """Return a table of the findings with the faults last, where they are read."""
    grid = Table(show_header=False, box=None, padding=(0, 2, 0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in sorted(report.findings, key=lambda f: list(_SIGNS).index(f.level)):
        style, sign = _SIGNS[finding.level]
        grid.add_row(Text(sign, style), Text(finding.about), Text(finding.says))
    return grid


def _show_measured(console: Console, report: Report) -> None:
    """Print acceptance per position, the margins, and the variants."""
    console.print()
    console.print("Acceptance, greedy", style="bold")
    table = _table("tokens per step")
    width = max(len(row["rate_per_position"]) for row in report.measured)
    shown = _shown(width)
    for position in shown:
        table.add_column(str(position + 1), justify="right")
    names = {None: "as it is", False: "thinking off", True: "thinking on"}
    rows = [(names[row["thinking"]], row) for row in report.measured]
    for name, row in rows:
        table.add_row(name, *_row(row, shown))
    console.print(table)
    console.print(" rate: the share of steps that accepted the draft at that position", style="dim")
    if report.margins:
        _show_margins(console, report)
    if report.variants:
        console.print()
        console.print("Variants of the drafter's config", style="bold")
        table = _table("tokens", "standard errors above")
        for row in report.variants:
            sure = f"{row['gain']:+.1f}" if "gain" in row else ""
            table.add_row(row["what"], f"{row['tokens']:.2f}", sure)
        console.print(table)
        console.print(
            " tokens: of a block from every token of the answers, the target's own included",
            style="dim",
        )


def _table(*columns: str) -> Table:
    """Return a table with a column of names before the others."""
    table = Table(box=None, padding=(0, 1, 0, 1), header_style="dim")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _show_formats(console: Console, report: Report) -> None:
    """Print tokens per step with rounded weights and without."""
    console.print()
    console.print("Rounded weights", style="bold")
    table = _table("tokens per step", "lost by rounding")
    for row in report.formats:
        lost = f"{row['lost']:+.1%}" if "lost" in row else ""
        table.add_row(row["what"], f"{row['tokens_per_step']:.2f}", lost)
    console.print(table)


def _show_margins(console: Console, report: Report) -> None:
    """Print, by position, the fit that adaptive drafting uses."""
    console.print()
    console.print("Margins and right drafts", style="bold")
    shown = _shown(len(report.margins))
    table = _table(*[str(position + 1) for position in shown])
    rows = {
        "right, if all before it are": "right",
        "at low evidence": "chance_at_low",
        "at high evidence": "chance_at_high",
        "low evidence": "low_evidence",
        "high evidence": "high_evidence",
        "slope": "slope",
        "intercept": "intercept",
    }
    for title, name in rows.items():
        table.add_row(title, *[f"{report.margins[i][name]:.2f}" for i in shown])
    console.print(table)
    console.print(
        " margin m: a draft's logit minus the second largest\n"
        " evidence: (m M^3)^(1/8), with M the mean of its block's margins\n"
        " low and high: the quartiles of the evidence\n"
        " chance: about 1 / (1 + exp(-slope x evidence - intercept))",
        style="dim",
    )


def _shown(width: int) -> list[int]:
    """Return all positions of a short block, and a selection of a long one's."""
    if width <= 8:
        return list(range(width))
    return sorted({0, 1, 2, 3, 5, 7, 10, width - 1} & set(range(width)))


def _row(row: dict[str, Any], shown: list[int]) -> list[str]:
    rates = row["rate_per_position"]
    cells = [f"{rates[i]:.2f}".lstrip("0") if i < len(rates) else "" for i in shown]
    return [f"{row['tokens_per_step']:.2f}", *cells]


def _text(name: str, value: object) -> str:
    """Format a fact for reading."""
    if isinstance(value, dict):
        return "\n".join(f"{key} {_short(str(item))}" for key, item in value.items()) or "none"
    if name.endswith(("of a token", "free memory")) and isinstance(value, int):
        return _bytes(value)
    if isinstance(value, int):
        return f"{value:,}"
    return _short(str(value)) if name == "tokenizer" else str(value)


def _short(digest: str) -> str:
    """Shorten a hash, enough to distinguish files; --json has it in full."""
    head, mark, tail = digest.rpartition(": ")
    return head + mark + (tail[:16] if len(tail) == 64 else tail)


def _bytes(value: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value} bytes"
