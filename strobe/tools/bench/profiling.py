"""The operations of a step, from torch's profiler, and the floor of each part of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from strobe.terminal.wording import counted
from strobe.tools.bench.floor import Rates, Shapes
from strobe.tools.report import Figures, Section, fine, number

_NAME_WIDTH = 60
_NUM_SHOWN = 25


class Profile:
    """Profiles a prefill, or the timed steps of `decode` in place of a `Timeline`: kernels on a
    GPU, torch's operations on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.steps = 0
        on_gpu = device.type == "cuda"
        self._profile = profile(
            activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
        )

    def mark(self, name: str) -> None:
        if name == "start":
            if not self.steps:
                self._profile.start()
            self.steps += 1

    def stop(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._profile.stop()

    def figures(self) -> Figures:
        """Return launches and milliseconds per step of each operation, the longest first, and the
        idle time between operations. On a GPU, the milliseconds of an operation are the time that
        it adds; on a CPU they are its self time, and the idle time is None."""
        idle: float | None = None
        if self.device.type == "cuda":
            times, idle = added_times(
                (event.key, event.time_range.start, event.time_range.end)
                for event in self._profile.events() or ()
                if event.device_type.name == "CUDA" and not event.is_user_annotation
            )
            totals = [(name, len(added), sum(added)) for name, added in times.items()]
        else:
            averages = [
                (e.key, e.count, e.self_cpu_time_total) for e in self._profile.key_averages()
            ]
            totals = [total for total in averages if total[2] > 0]
        unit = 1e3 * self.steps
        rows: list[Figures] = [
            {"name": name, "launches": launches / self.steps, "ms": micros / unit}
            for name, launches, micros in totals
        ]
        rows.sort(key=lambda row: -row["ms"])
        return {"operations": rows, "idle_ms": None if idle is None else idle / unit}


def added_times(
    events: Iterable[tuple[str, float, float]],
) -> tuple[dict[str, list[float]], float]:
    """Return the time that each launch of each operation adds, and the idle time in between.

    In the order of their starts, each adds the time from the latest end so far, or from its own
    start if that is later, to its end, and 0 if it ends earlier: a kernel that is launched early
    starts while the previous one runs, and waits for it. events: name, start, end, of any streams.
    """
    ordered = sorted(events, key=lambda event: event[1:])
    times = dict[str, list[float]]()
    idle = 0.0
    busy_until = ordered[0][1] if ordered else 0.0
    for name, start, end in ordered:
        idle += max(0.0, start - busy_until)
        times.setdefault(name, []).append(max(0.0, end - max(start, busy_until)))
        busy_until = max(busy_until, end)
    return times, idle


def floor_by_part(shapes: Shapes, rates: Rates, requests: int, context: float) -> list[Figures]:
    """Return bytes, operations and the minimum milliseconds of each part of a step."""
    verify = shapes.verify_parts(requests, context)
    parts = {f"target: {name}": work for name, work in verify.items()}
    parts["drafter"] = shapes.drafting(requests, context)
    return [
        {
            "name": name,
            "bytes": round(work.bytes),
            "operations": round(work.operations),
            "ms": 1e3 * rates.seconds(work),
        }
        for name, work in parts.items()
        if work.bytes
    ]


def profile_sections(rows: Sequence[Figures]) -> list[Section]:
    """Return two tables for each row that was profiled."""
    sections: list[Section] = []
    for row in rows:
        if not row["profile"]:
            continue
        where = (
            f"{row['method']}, {counted(row['concurrency'], 'request')} of "
            f"{row['prompt_tokens']:,} tokens"
        )
        sections += operations_section(f"Operations of a step: {where}", row["profile"])
        cells = [
            (
                part["name"],
                fine(part["bytes"] / 1e9),
                fine(part["operations"] / 1e9),
                fine(part["ms"]),
                number(100 * part["ms"] / row["ms"], 1),
            )
            for part in row["floor"]["parts"]
        ]
        columns = ("part", "GB", "GFLOP", "floor ms", "% of the step")
        sections.append(Section(title=f"Floor by part: {where}", columns=columns, rows=cells))
    return sections


def operations_section(title: str, profile: Figures) -> list[Section]:
    """Return a table of a profile's longest operations; nothing without any."""
    operations: list[Figures] = profile.get("operations", [])
    total = sum(part["ms"] for part in operations)
    shown = operations[:_NUM_SHOWN]
    if not total:
        return []
    if rest := operations[_NUM_SHOWN:]:
        sums: Figures = {key: sum(part[key] for part in rest) for key in ("launches", "ms")}
        shown.append(sums | {"name": f"{len(rest)} others"})
    cells = [
        (
            part["name"][:_NAME_WIDTH],
            number(part["launches"], 1),
            fine(part["ms"]),
            number(100 * part["ms"] / total, 1),
        )
        for part in shown
    ]
    note = ""
    if (idle := profile["idle_ms"]) is not None:
        note = f"GPU busy: {fine(total)} ms; idle between operations: {fine(idle)} ms"
    columns = ("operation", "launches", "ms", "% of the sum")
    return [Section(title=title, columns=columns, rows=cells, note=note)]
