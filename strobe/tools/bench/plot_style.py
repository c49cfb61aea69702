"""Plots in one common style, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vP*X"
FORMATS = ".png", ".svg", ".pdf"


def missing() -> str:
    """Return a sentence that says why no plot can be drawn, or an empty string."""
    if find_spec("matplotlib") is not None:
        return ""
    return "Plots need matplotlib; install it with pip install 'strobe[eval]'."


def new_figure(
    width: float, height: float, panels: int = 1, *, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, stacked vertically."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(width, height), layout="constrained")
    subplots = figure.subplots(panels, 1, sharex=True, sharey=sharey, squeeze=False)
    axes = [row[0] for row in subplots]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write the figure to a path that ends in one of FORMATS; equal figures give equal files."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    undated = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}[path.suffix.lower()]
    with matplotlib.rc_context({"svg.hashsalt": "strobe"}):
        figure.savefig(path, dpi=120, metadata={undated: None})


def lines(
    axis: Axes, rows: Mapping[str, Sequence[tuple[float, float]]], *, strong: str = ""
) -> None:
    """Draw a line through the points of each name; the one named `strong` is thicker."""
    for i, (name, points) in enumerate(rows.items()):
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            linewidth=2.6 if name == strong else 1.3,
            zorder=3 if name == strong else 2,
        )
