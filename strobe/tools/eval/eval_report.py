"""The report of an evaluation: its sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence

from strobe.terminal.wording import counted
from strobe.tools.report import Figures, Report, Section, number


def report(figures: Figures) -> Report:
    """Return the report of an evaluation."""
    return Report(
        title=f"`strobe eval {figures['evaluation']}`, {figures['date'][:10]}",
        command=figures["command"],
        head=head(figures),
        sections=sections(figures),
        remarks=remarks(figures),
    )


def sections(figures: Figures) -> list[Section]:
    """Return the sections, the evaluated kind first; rates only for speed, which warms up."""
    order = {
        "acceptance": (_expected, _acceptance, _positions, _accuracy),
        "accuracy": (_expected, _accuracy, _acceptance, _positions),
        "speed": (_expected, _speed, _rates, _acceptance, _positions, _accuracy),
    }[figures["evaluation"]]
    all_sections = [make(figures) for make in order]
    return [section for section in all_sections if section.rows]


def head(figures: Figures) -> list[str]:
    """Return sentences on the pair, the settings, the machine and the data."""
    pair = figures["pair"]
    settings = figures["settings"]
    num_drafts = pair["drafts_per_step"]
    drafts = f", {counted(num_drafts, 'draft')} per step" if num_drafts else ""
    sampling = f"temperature {settings['temperature']:g}, top-p {settings['top_p']:g}"
    data = "; ".join(
        f"{d['name']}: {d['prompts']} of {counted(d['of'], 'prompt')} ({d['source']})"
        for d in figures["data_sets"]
    )
    thinking = "with" if settings["thinking"] else "without"
    demo = any(d["name"] == "demo" for d in figures["data_sets"])
    return [
        f"Target {pair['target']} ({pair['architecture']}, {counted(pair['layers'], 'layer')}, "
        f"hidden size {pair['hidden_size']}), drafter {pair['draft'] or 'none'}{drafts}.",
        f"{sampling[:1].upper()}{sampling[1:]}, up to {counted(settings['max_tokens'], 'token')}, "
        f"{thinking} thinking{' (demo: every other pair of tasks)' if demo else ''}.",
        f"{figures['device']}, threads: {figures['threads']}, {figures['dtype']}, torch "
        f"{figures['versions']['torch']}.",
        f"{data}.",
    ]


def remarks(figures: Figures) -> list[str]:
    """Return sentences on failures, truncated answers and other deviations."""
    lines: list[str] = list(figures["notes"])
    for row in figures["rows"]:
        location = f"{row['data_set']}, {row['method']}, c = {row['concurrency']}"
        if row["failed"]:
            lines.append(
                f"{location}: {counted(row['failed'], 'prompt')} could not run. {row['errors'][0]}"
            )
        if cut := row["cut_at_max_tokens"]:
            lines.append(f"{location}: {counted(cut, 'answer')} cut off at --max-tokens.")
    for name in dict.fromkeys(row["data_set"] for row in figures["rows"]):
        notes = [r["accuracy"]["note"] for r in figures["rows"] if r["data_set"] == name]
        if notes[0]:
            lines.append(f"{name}: {notes[0]}.")
    for pair in figures["pairs"]:
        if pair["identical"] < pair["prompts"]:
            exact = figures["dtype"] == "float32"
            verdict = "in fp32 they must not" if exact else "lower precision rounds differently"
            lines.append(
                f"{pair['data_set']}, c = {pair['concurrency']}: with speculation, the answers to "
                f"{pair['prompts'] - pair['identical']} of {counted(pair['prompts'], 'prompt')} "
                f"differ ({verdict})."
            )
    if figures["pairs"] and all(p["identical"] == p["prompts"] for p in figures["pairs"]):
        lines.append("Every answer has the same tokens with speculation and without.")
    below = sum(not check["met"] for check in figures["expected"])
    if below:
        num_figures = counted(len(figures["expected"]), "figure")
        lines.append(f"Below the expected value: {below} of {num_figures}.")
    return lines


def _drafted(figures: Figures) -> list[Figures]:
    return [row for row in figures["rows"] if row["acceptance"] is not None]


def _expected(figures: Figures) -> Section:
    rows = [
        (
            check["data_set"],
            f"{check['concurrency']}",
            check["what"].replace("_", " "),
            number(check["published"], 3),
            f"x {check['factor']:g}",
            number(check["floor"], 3),
            number(check["measured"], 3),
            "yes" if check["met"] else "NO",
        )
        for check in figures["expected"]
    ]
    columns = ("data set", "c", "figure", "expected", "factor", "minimum", "measured", "met")
    sources = ", ".join(dict.fromkeys(check["source"] for check in figures["expected"]))
    return Section(
        title="Compared with expected figures", columns=columns, rows=rows, note=f"From: {sources}."
    )


def _acceptance(figures: Figures) -> Section:
    rows = [
        (
            row["data_set"],
            f"{row['concurrency']}",
            f"{row['answers']:,}",
            f"{row['tokens']:,}",
            f"{row['acceptance']['steps']:,}",
            number(row["acceptance"]["acceptance_length"], 3),
            number(row["acceptance"]["mean_of_answers"], 3),
            number(row["acceptance"]["tokens_per_step"], 3),
            number(100 * row["acceptance"]["draft_acceptance_rate"], 1),
        )
        for row in _drafted(figures)
    ]
    columns = ("data set", "c", "answers", "tokens", "steps", "acceptance length",
               "mean of answers", "tokens/step", "drafts, %")  # fmt: skip
    note = (
        "Acceptance length: 1 + accepted drafts / verify steps, over all answers together; mean of "
        "answers: the mean of the answers' acceptance lengths; tokens/step: tokens per verify "
        "step, without each answer's first token; drafts: accepted per verified draft."
    )
    return Section(title="Acceptance", columns=columns, rows=rows, note=note)


def _positions(figures: Figures) -> Section:
    rows: list[tuple[str, ...]] = []
    max_positions = 0
    for row in _first_rows(_drafted(figures)):
        rates = row["acceptance"]["rate_by_position"]
        max_positions = max(max_positions, len(rates))
        rows.append((row["data_set"], *(f"{100 * rate:.0f}" for rate in rates)))
    rows = [(*row, *("-" for _ in range(max_positions + 1 - len(row)))) for row in rows]
    columns = ("data set", *(f"{i + 1}" for i in range(max_positions)))
    note = "Percentage of verify steps that accepted the draft at this position."
    return Section(title="Acceptance rate by position", columns=columns, rows=rows, note=note)


def _first_rows(rows: Sequence[Figures]) -> list[Figures]:
    """Return the row with the lowest concurrency of each data set."""
    first_rows: dict[str, Figures] = {}
    for row in rows:
        first_rows.setdefault(row["data_set"], row)
    return list(first_rows.values())


def _accuracy(figures: Figures) -> Section:
    rows = [
        (
            row["data_set"],
            f"{row['concurrency']}",
            row["method"],
            f"{row['accuracy']['right']}",
            f"{row['accuracy']['graded']}",
            number(100 * row["accuracy"]["accuracy"], 1),
        )
        for row in figures["rows"]
        if row["accuracy"]["graded"]
    ]
    columns = ("data set", "c", "method", "right", "of", "per cent")
    return Section(title="Accuracy", columns=columns, rows=rows)


def _speed(figures: Figures) -> Section:
    counts = sorted({pair["concurrency"] for pair in figures["pairs"]})
    by_name: dict[str, dict[int, float | None]] = {}
    for pair in figures["pairs"]:
        by_name.setdefault(pair["data_set"], {})[pair["concurrency"]] = pair["speedup"]
    rows = [
        (name, *(f"{x:.2f}x" if (x := cells.get(count)) else "-" for count in counts))
        for name, cells in by_name.items()
    ]
    columns = ("data set", *(f"c = {count}" for count in counts))
    note = "Tokens/s with speculation divided by tokens/s without, prefill included."
    return Section(title="Speed-up", columns=columns, rows=rows, note=note)


def _rates(figures: Figures) -> Section:
    rows = [
        (
            row["data_set"],
            f"{row['concurrency']}",
            row["method"],
            f"{row['tokens']:,}",
            number(row["seconds"]),
            number(row["tokens_per_s"], 1),
        )
        for row in figures["rows"]
    ]
    columns = ("data set", "c", "method", "tokens", "seconds", "tokens/s")
    return Section(title="Rates", columns=columns, rows=rows)
