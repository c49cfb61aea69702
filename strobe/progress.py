"""Progress of a command on standard error: a live line on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import Any, Self

from rich.console import Console

INTERVAL = 10.0
"""Seconds between lines where standard error is no terminal."""


class Progress:
    """What a command is doing, and how far it is. Use it with `with`."""

    def __init__(self, text: str = "", total: int | None = None, done: int = 0, unit: str = ""):
        """total, done, unit: the number of steps, requests or the like, if it is known; `done` of
        them were there already."""
        self.text, self.total, self.unit = text, total, unit
        self.done = self._start = done
        self._console = Console(stderr=True, highlight=False)
        self._bar: Any = None
        self._left = threading.Event()
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._bar = _bar(self._console, self.total is not None)
            self._task = self._bar.add_task(self.text, total=self.total, completed=self.done)
            self._bar.start()
        else:
            threading.Thread(target=self._show_lines, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._bar is not None:
            self._bar.stop()

    def update(self, text: str | None = None, done: int | None = None) -> None:
        """Change what is shown."""
        self.text = self.text if text is None else text
        self.done = self.done if done is None else done
        if self._bar is not None:
            self._bar.update(self._task, description=self.text, completed=self.done)

    def advance(self) -> None:
        """One more is done."""
        self.update(done=self.done + 1)

    def print(self, line: str) -> None:
        """A line of its own, on a terminal above the live one."""
        self._console.print(line, markup=False, soft_wrap=True)

    def show(self) -> None:
        """Print the line now, except on a terminal, where it always stands."""
        if self._bar is None:
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """What is being done, how far it is, and how long it takes."""
        seconds = time.monotonic() - self._began
        if self.total is None:
            return f"{self.text} ({_clock(seconds)})"
        far = f"{self.text}: {self.done} of {self.total} {self.unit}".rstrip()
        made = self.done - self._start
        if made <= 0 or seconds <= 0:
            return f"{far} ({_clock(seconds)})"
        left = (self.total - self.done) * seconds / made
        return f"{far}, {made / seconds:.3g} per second, {_clock(left)} left"

    def _show_lines(self) -> None:
        while not self._left.wait(INTERVAL):
            self.show()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _bar(console: Console, counts: bool) -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Live

    text = TextColumn("{task.description}", markup=False)
    counted = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    columns = (text, *counted) if counts else (SpinnerColumn(), text)
    return Live(*columns, console=console, transient=True, refresh_per_second=4)
