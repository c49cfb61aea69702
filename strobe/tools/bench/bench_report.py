"""Describe the machine and software of a benchmark, and write figures as tables and JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
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
from strobe.models.quantization.methods import experts_format
from strobe.models.quantization.packed import FORMATS, head_format
from strobe.speculation.registry import DRAFTER_METHOD
from strobe.terminal.progress import Progress
from strobe.tools.bench.floor import Rates, Shapes, Widths
from strobe.tools.bench.timeline import Split

_PIPED_WIDTH = 100
Figures = dict[str, Any]


def shapes_of(resolved: ResolvedConfig) -> Shapes:
    """Return the models, rows and value sizes of a verify step with these settings."""
    config = resolved.config
    dtype = resolved.dtype
    linear = dtype.itemsize if config.weight_dtype != "fp8" else 1
    head = dtype.itemsize
    if (packed := resolved.backends.packed) is not None:
        linear = FORMATS[packed].value_bytes
        head = head_format(FORMATS[packed]).value_bytes
    kv = 1 if config.kv_cache_dtype == "fp8" else dtype.itemsize
    draft = resolved.draft if resolved.method == DRAFTER_METHOD else None
    rows = 1 + (resolved.limits.num_drafts if resolved.method != "none" else 0)
    stored = resolved.target.quantization
    experts = None
    if stored is not None:
        held = experts_format(stored, resolved.target.decoder)
        experts = None if held is None else held.bits_per_value / 8
    widths = Widths(linear=linear, head=head, rest=dtype.itemsize, kv=kv, experts=experts)
    return Shapes(target=resolved.target, draft=draft, rows=rows, widths=widths)


def header(name: str, command: str, ways: dict[str, ResolvedConfig], rates: Rates) -> Figures:
    """Return the file's first entries: date, command, device, settings, and this run's rates."""
    resolved = next(iter(ways.values()))
    return {
        "benchmark": name,
        **circumstances(command, resolved),
        "config": {way: asdict(setup.config) for way, setup in ways.items()},
        "limits": {way: asdict(setup.limits) for way, setup in ways.items()},
        "shapes": {
            part: asdict(config)
            for part in ("target", "draft")
            for setup in ways.values()
            if (config := getattr(setup, part)) is not None
        },
        "rates": {
            "reduction_bytes_per_s": rates.reduction,
            "copy_bytes_per_s": rates.copy,
            "matrix_operations_per_s": rates.matrix,
            "linear_operations_per_s": rates.linear,
        },
    }


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


def split_figures(split: Split | None) -> Figures:
    """Return the milliseconds of a step's parts, all None if no step was timed."""
    names = ("draft_ms", "verify_ms", "rest_ms", "median_ms")
    if split is None:
        return dict.fromkeys(names)
    values = split.draft, split.verify, split.rest, split.median
    return {name: round(ms, 4) for name, ms in zip(names, values, strict=True)}


def floor_figures(shapes: Shapes, rates: Rates, requests: int, context: float) -> Figures:
    """Return the work and the floor of one step, by part."""
    figures: Figures = {}
    for part in ("drafting", "verify"):
        work = getattr(shapes, part)(requests, context)
        figures[part] = {
            "bytes": round(work.bytes),
            "operations": round(work.operations),
            "ms": round(1e3 * rates.seconds(work), 4),
            "bound": rates.bound(work),
        }
    return figures | {"ms": round(1e3 * shapes.seconds(rates, requests, context), 4)}


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
        words = any(row[i][:1].isalpha() for row in rows)
        new_table.add_column(name, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        new_table.add_row(*row)
    return new_table


def number(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:,.{places}f}"


def fine(value: float | None) -> str:
    """Format with three decimals, or one from 100 on."""
    return number(value, 3 if value is None or abs(value) < 100 else 1)


def output() -> Console:
    """Return a console for standard output; if that is no terminal, wide enough for the tables."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def show_head(console: Console, figures: Figures) -> None:
    """Print the command, device, versions and measured rates."""
    rates = figures["rates"]
    reads, copies = (rates[f"{name}_bytes_per_s"] / 1e9 for name in ("reduction", "copy"))
    matrix, linear = (rates[f"{name}_operations_per_s"] / 1e12 for name in ("matrix", "linear"))
    fp8 = f" ({fine(linear)} in FP8)" if linear != matrix else ""
    show_circumstances(
        console,
        figures,
        f"; reads {reads:,.0f} GB/s, copies {copies:,.0f} GB/s, multiplies {fine(matrix)} "
        f"TFLOP/s{fp8}. Floor: the time to read a step's bytes at {max(reads, copies):,.0f} GB/s "
        "or to compute its operations at that rate, whichever is longer",
    )


def show_circumstances(console: Console, figures: Figures, extra: str = "") -> None:
    """Print the command, device and versions."""
    console.print(figures["command"], soft_wrap=True)
    text = f"{figures['device']}, {figures['dtype']}, torch {figures['versions']['torch']}{extra}."
    console.print(text, soft_wrap=not console.is_terminal)


@contextmanager
def progress() -> Generator[Any]:
    """Yield a function that shows its text on standard error as the current progress."""
    with Progress() as shown:
        yield shown.update


def write(path: str, figures: Figures) -> None:
    """Write the figures as JSON, if a path is set."""
    if path:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
