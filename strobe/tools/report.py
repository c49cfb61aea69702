"""A command's report: a description of the machine, and figures as tables, JSON and Markdown."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from strobe import __version__
from strobe.engine.build import ResolvedConfig
from strobe.terminal.progress import Progress

_PIPED_WIDTH = 100
_MARKDOWN_WIDTH = 120
Figures = dict[str, Any]


# the machine


def circumstances(command: str, resolved: ResolvedConfig) -> Figures:
    """Return date, command, device and versions of a measurement."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "device": device_name(resolved.device),
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        rows = []
    names = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Return the versions that the figures depend on; None for a package not installed."""
    packages: dict[str, str | None] = {"python": platform.python_version()}
    packages["torch"] = str(torch.__version__)  # with the build's suffix, which metadata can lack
    packages["strobe"] = __version__
    try:
        packages["triton"] = version("triton")
    except PackageNotFoundError:
        packages["triton"] = None
    return packages | {"cuda": torch.version.cuda}


# the report


@dataclass(frozen=True)
class Section:
    """A table with a title, and text below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Report:
    """A report for reading. head: sentences on the circumstances; warning: a sentence that stands
    out; remarks: sentences after the tables."""

    title: str
    command: str
    head: Sequence[str]
    sections: Sequence[Section]
    warning: str = ""
    remarks: Sequence[str] = field(default_factory=tuple[str, ...])

    def show(self, console: Console) -> None:
        """Print the report; a pipe gets each sentence on one line."""
        wrap = not console.is_terminal
        console.print(self.command, soft_wrap=True)
        for line in self.head:
            console.print(line, soft_wrap=wrap)
        if self.warning:
            console.print(self.warning, style="bold", soft_wrap=wrap)
        for section in self.sections:
            console.print(table(section.title, section.columns, section.rows))
            if section.note:
                console.print(section.note, soft_wrap=wrap)
        if self.remarks:
            console.print()
        for line in self.remarks:
            console.print(line, soft_wrap=wrap)

    def markdown(self, pictures: Sequence[tuple[str, str]] = ()) -> str:
        """Return the report as a page. pictures: file names in the same directory, with
        captions."""
        lines = [f"# {self.title}", "", f"`{self.command}`", ""]
        lines += [_wrapped(f"- {line}") for line in (*self.head, self.warning) if line]
        for section in self.sections:
            lines += ["", f"## {section.title}", "", *_markdown_table(section)]
            if section.note:
                lines += ["", _wrapped(section.note)]
        for name, caption in pictures:
            lines += ["", f"![{caption}]({name})"]
        if self.remarks:
            lines += ["", "## Remarks", "", *(_wrapped(f"- {line}") for line in self.remarks)]
        return "\n".join(lines) + "\n"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table with words aligned left and numbers right."""
    new_table = Table(
        title=f"\n{title}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for i, name in enumerate(columns):
        justify = "left" if _has_words(rows, i) else "right"
        new_table.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        new_table.add_row(*row)
    return new_table


def _markdown_table(section: Section) -> list[str]:
    count = len(section.columns)
    rules = ["---" if _has_words(section.rows, i) else "---:" for i in range(count)]
    rows = [section.columns, rules, *section.rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]


def _has_words(rows: Sequence[Sequence[str]], column: int) -> bool:
    return any(row[column][:1].isalpha() for row in rows)


def _wrapped(text: str) -> str:
    """Wrap a paragraph or a list item."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(
        text,
        _MARKDOWN_WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def number(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:,.{places}f}"


def fine(value: float | None) -> str:
    """Format with three decimals, or one from 100 on."""
    return number(value, 3 if value is None or abs(value) < 100 else 1)


# where it goes


def output() -> Console:
    """Return a console for standard output; if that is no terminal, wide enough for the tables."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def write_json(path: str | Path, figures: Figures) -> None:
    """Write the figures to a file; nowhere if the path is empty."""
    if path:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


@contextmanager
def progress(*, quiet: bool = False) -> Generator[Callable[[str], None]]:
    """Yield a function that shows its text on standard error as the current progress."""
    if quiet:
        yield lambda text: None
        return
    with Progress() as shown:
        yield shown.update
