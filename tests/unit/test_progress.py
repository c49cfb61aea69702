"""Progress on standard error, with and without a terminal."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.terminal import progress
from strobe.terminal.progress import Progress
from tests.support.text_pair import Pair


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the fake time, as the only element of a list."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_line_has_rate_and_time_left(clock: list[float]):
    bar = Progress("training", total=200, done=50, unit="steps")
    assert bar.line() == "training: 50 of 200 steps (0:00:00)"
    clock[0] += 7.0
    assert bar.line() == "training: 50 of 200 steps (0:00:07)"
    bar.update("training, loss 5.31", done=64)
    assert bar.line() == "training, loss 5.31: 64 of 200 steps, 2 per second, 0:01:08 left"
    bar.advance()
    assert "65 of 200" in bar.line()


def test_line_without_a_total_shows_elapsed_time(clock: list[float]):
    bar = Progress("loading [b]")
    clock[0] += 3700.0
    assert bar.line() == "loading [b] (1:01:40)"


def test_short_work_prints_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]):
    with Progress("loading") as bar:
        bar.update("warming up")
    assert capsys.readouterr() == ("", "")


def test_long_work_prints_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch):
    printed = threading.Event()

    class Stream(io.StringIO):
        def flush(self) -> None:
            if self.getvalue().count("\n") > 1:
                printed.set()

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "INTERVAL", 1e-3)
    with Progress("measuring"):
        assert printed.wait(60)
    lines = stream.getvalue().splitlines()
    assert set(lines) == {"measuring (0:00:00)"}


def test_terminal_line_is_live_and_disappears(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with Progress("training [b]", total=4, unit="steps") as bar:
        bar.update(done=3)
        bar.show()
        bar.print("a line that stays")
    shown = stream.getvalue()
    assert "training [b]" in shown
    assert "3/4" in shown
    assert "\na line that stays\n" in shown.replace("\r", "\n").replace("\x1b[2K", "")
    assert "left" not in shown, "it belongs to lines without a terminal"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("demo", "--prompts=2", "--max-tokens=6", "--repeats=2"), "Comparing: "),
        (("bench", "offline", "--prompts=1", "--max-tokens=4", "--concurrency=1"), "measuring "),
    ],
)
def test_commands_print_lines_without_a_terminal(
    main: Callable[..., Any],
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    line: str,
):
    monkeypatch.setattr(progress, "INTERVAL", 1e-3)
    pair_flags = f"--target={pair.target}", f"--draft={pair.draft}", "--device=cpu"
    status, _, err = main(*arguments, *pair_flags)
    assert status == 0
    assert f"\n{line}" in f"\n{err}"


@pytest.mark.parametrize("live", [False, True])
def test_weights_draw_a_bar_unless_another_display_is_live(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, live: bool
):
    """A bar under a spinner would be printed again at every refresh."""
    bars: list[dict[str, Any]] = []

    class Bar(contextlib.AbstractContextManager[Any]):
        def __init__(self, **options: Any):
            bars.append(options)

        def update(self, count: int) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return live

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with Progress("Loading the models"):
        Engine(EngineConfig(target=str(pair.target), device="cpu"))
    assert [bar["desc"] for bar in bars] == [f"Loading {pair.target.name}"]
    assert [bar["disable"] for bar in bars] == [live or None]
