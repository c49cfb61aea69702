"""Plots of an evaluation: histogram of accepted drafts, rate by position, speed-up by load."""

from __future__ import annotations

from pathlib import Path

from strobe.tools.bench.plot_style import COLOURS, MARKERS, new_figure, save
from strobe.tools.report import Figures


def draw(folder: Path, figures: Figures) -> list[tuple[str, str]]:
    """Write the plots that the figures have data for; return their names and captions."""
    rows: dict[str, Figures] = {}
    for row in figures["rows"]:
        if row["acceptance"] is not None:
            rows.setdefault(row["data_set"], row)
    drawn: list[tuple[str, str]] = []
    if rows:
        _histogram(folder / "histogram.png", list(rows.values()))
        drawn.append(("histogram.png", "Share of verify steps by accepted drafts"))
        _positions(folder / "positions.png", list(rows.values()))
        drawn.append(("positions.png", "Acceptance rate by position"))
    if figures["evaluation"] == "speed" and any(pair["speedup"] for pair in figures["pairs"]):
        _speed(folder / "speedup.png", figures["pairs"])
        drawn.append(("speedup.png", "Speed-up by requests in flight"))
    return drawn


def _histogram(path: Path, rows: list[Figures]) -> None:
    """Plot a panel for each data set, so that bars do not overlap."""
    figure, axes = new_figure(7, 1.2 + 2.0 * len(rows), len(rows))
    max_length = max(len(row["acceptance"]["histogram"]) for row in rows)
    for i, (axis, row) in enumerate(zip(axes, rows, strict=True)):
        acceptance = row["acceptance"]
        shares = [100 * share for share in acceptance["histogram"]]
        axis.bar(range(len(shares)), shares, width=0.8, color=COLOURS[i % len(COLOURS)])
        mean = acceptance["acceptance_length"] - 1
        axis.axvline(mean, color="#444444", linestyle="--", linewidth=1.2)
        label = f"{row['data_set']}: mean {mean:.2f} drafts, {acceptance['steps']:,} steps"
        axis.set_title(label, loc="left", fontsize=10)
        axis.set_ylabel("% of steps")
    axes[-1].set_xlabel("drafts accepted in a verify step")
    axes[-1].set_xticks(range(max_length))
    save(figure, path)


def _positions(path: Path, rows: list[Figures]) -> None:
    figure, (axis,) = new_figure(7, 4)
    for i, row in enumerate(rows):
        rates = [100 * rate for rate in row["acceptance"]["rate_by_position"]]
        axis.plot(
            range(1, len(rates) + 1), rates, color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)], markersize=5, label=row["data_set"],
        )  # fmt: skip
    axis.set_ylim(0, 102)
    max_positions = max(len(row["acceptance"]["rate_by_position"]) for row in rows)
    axis.set_xticks(range(1, max_positions + 1))
    axis.set_xlabel("position of the draft")
    axis.set_ylabel("% of steps that accepted it")
    axis.set_title("Acceptance rate by position", loc="left", fontsize=11)
    axis.legend(frameon=False)
    save(figure, path)


def _speed(path: Path, pairs: list[Figures]) -> None:
    figure, (axis,) = new_figure(7, 4)
    names = list(dict.fromkeys(pair["data_set"] for pair in pairs))
    counts = sorted({pair["concurrency"] for pair in pairs})
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        speedups = {p["concurrency"]: p["speedup"] or 0.0 for p in pairs if p["data_set"] == name}
        places = [counts.index(count) + (i - (len(names) - 1) / 2) * width for count in speedups]
        bars = axis.bar(
            places, list(speedups.values()), width=0.92 * width, label=name,
            color=COLOURS[i % len(COLOURS)],
        )  # fmt: skip
        axis.bar_label(
            bars,
            fmt="%.1f" if len(names) > 3 else "%.2f",
            fontsize=7 if len(names) > 3 else 10,
            padding=2,
        )
    axis.axhline(1, color="#444444", linestyle="--", linewidth=1.2)
    axis.set_xticks(range(len(counts)), [f"{count}" for count in counts])
    axis.set_xlabel("requests in flight")
    axis.set_ylabel("tokens/s relative to plain decoding")
    axis.set_title("Speed-up by requests in flight", loc="left", fontsize=11)
    if len(names) > 1:  # below, where it covers no bar
        figure.legend(
            loc="outside lower center", ncols=min(len(names), 6), frameon=False, fontsize=9,
            handlelength=1, columnspacing=1.2,
        )  # fmt: skip
    save(figure, path)
