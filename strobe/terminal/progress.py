"""Progress of a command on standard error: a live line on a terminal, else periodic lines."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress as LiveProgress
    from rich.progress import ProgressColumn

INTERVAL = 10.0
"""Seconds between lines if standard error is not a terminal."""


class Progress:
    """Shows a command's activity and progress; a context manager.

    num_live: displays that now redraw a line of the terminal, while nothing else may.
    """

    num_live = 0

    def __init__(self, text: str = "", total: int | None = None, done: int = 0, unit: str = ""):
        """total: number of steps, requests or other `unit`s, if known; `done` of them were finished
        before."""
        self.text = text
        self.total = total
        self.unit = unit
        self.done = self._initial = done
        self._console = Console(stderr=True, highlight=False)
        self._bar: LiveProgress | None = None
        self._finished = threading.Event()
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._bar = _bar(self._console, self.total is not None)
            self._task = self._bar.add_task(self.text, total=self.total, completed=self.done)
            self._bar.start()
            Progress.num_live += 1
        else:
            threading.Thread(target=self._show_lines, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        if self._bar is not None:
            self._bar.stop()
            Progress.num_live -= 1

    def update(
        self, text: str | None = None, done: int | None = None, unfinished: float = 0.0
    ) -> None:
        """Change the text and the number done. unfinished: an estimate of the work done on further
        ones, which moves the bar."""
        self.text = self.text if text is None else text
        self.done = self.done if done is None else done
        if self._bar is not None:
            completed = self.done + unfinished
            self._bar.update(self._task, description=self.text, completed=completed)

    def advance(self) -> None:
        """Count one more as done."""
        self.update(done=self.done + 1)

    def print(self, line: str) -> None:
        """Print a separate line, on a terminal above the live one."""
        self._console.print(line, markup=False, soft_wrap=True)

    def show(self) -> None:
        """Print the progress line now, except on a terminal, which always shows it."""
        if self._bar is None:
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """Return the progress line: text, number done, rate and time left."""
        seconds = time.monotonic() - self._started
        if self.total is None:
            return f"{self.text} ({_clock(seconds)})"
        summary = f"{self.text}: {self.done} of {self.total} {self.unit}".rstrip()
        new = self.done - self._initial
        if new <= 0 or seconds <= 0:
            return f"{summary} ({_clock(seconds)})"
        remaining = (self.total - self.done) * seconds / new
        return f"{summary}, {new / seconds:.3g} per second, {_clock(remaining)} left"

    def _show_lines(self) -> None:
        while not self._finished.wait(INTERVAL):
            self.show()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _bar(console: Console, counts: bool) -> LiveProgress:
    from rich.progress import Progress as LiveProgress

    return LiveProgress(*_columns(counts), console=console, transient=True, refresh_per_second=4)


def _columns(counts: bool) -> list[ProgressColumn]:
    """Return the columns of the live line. counts: whether the number of steps is known."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    if not counts:
        return [SpinnerColumn(), text]
    return [text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
