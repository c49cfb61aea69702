"""Restarts of the engine process, with a simulated clock, and what counts as a stall."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from strobe.config import EngineConfig
from strobe.request import DEFAULT_SCHEDULING
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process import client as module
from strobe.server.engine_process.client import EngineClient, EngineDead
from strobe.server.engine_process.engine_messages import Failed, Ready, StepEvents
from strobe.server.engine_process.watchdog import SILENT_SECONDS, STOPPED_SECONDS
from strobe.server.server_settings import LogSettings

READY = Ready(2048, 2, 2048, 15, ("dflash", "none"), {}, "float32", "cpu", 100)


def verdicts(*ends: tuple[float, bool], failed: bool = False, restart: bool = True) -> list[bool]:
    """Return whether the process is restarted after each end. ends: (time, whether the engine was
    ready)."""
    client = EngineClient(EngineConfig(), LogSettings(), restart=restart)

    async def end(time: float, answered: bool) -> bool:
        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "time", lambda: time)
            client.facts = READY if answered else None
            client.failed = Failed("no", False) if failed else None
            client.restarting = client._may_restart()
        return client.restarting

    async def all_ends() -> list[bool]:
        return [await end(*end_args) for end_args in ends]

    return asyncio.run(all_ends())


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0, True), (10, True), (59, True)], [True, True, False]),
        ([(0, True), (10, True), (61, True), (69, True)], [True, True, True, False]),
        ([(0, True), (100, True), (200, True), (300, True)], [True] * 4),
        ([(0, True), (100, False), (200, False)], [True, True, False]),
        ([(0, False)], [False]),
    ],
    ids=["third in a minute", "sliding minute", "rare", "never answers again", "first start"],
)
def test_engine_is_restarted_until_the_third_end_within_a_minute(
    ends: list[tuple[float, bool]], expected: list[bool]
):
    assert verdicts(*ends) == expected


def test_engine_is_not_restarted_after_failed_start_or_if_disabled():
    assert verdicts((0, True), failed=True) == [False]
    assert verdicts((0, True), restart=False) == [False]


class Process:
    """A process that is only killed. pid: what the watchdog looks at."""

    def __init__(self, pid: int):
        self.pid, self.killed = pid, False

    def kill(self) -> None:
        self.killed = True


def with_open_answer(scenario: Callable[[EngineClient, Process], None], pid: int = 0) -> str:
    """Run a scenario with a client that waits for an answer; return how the answer failed."""

    async def main() -> str:
        client = EngineClient(EngineConfig(), LogSettings())
        client.process = process = Process(pid)  # pyright: ignore[reportAttributeAccessIssue]
        client._handle(READY)
        generation = client.submit([1], SamplingParams(), "r", DEFAULT_SCHEDULING)
        scenario(client, process)
        assert process.killed == client.dead
        client._watchdog.stop()
        if not client.dead:
            return ""
        with pytest.raises(EngineDead) as failure:
            await anext(generation)
        return str(failure.value)

    return asyncio.run(main())


def seconds_pass(client: EngineClient, count: int) -> None:
    for _ in range(count):
        client._watchdog.start(client.process.pid)


def test_silent_engine_is_killed(caplog: pytest.LogCaptureFixture):
    def silence(client: EngineClient, process: Process) -> None:
        seconds_pass(client, SILENT_SECONDS - 1)
        client._handle(StepEvents([], None))
        seconds_pass(client, SILENT_SECONDS - 1)
        assert not process.killed
        seconds_pass(client, 1)

    assert "ended while it was answering" in with_open_answer(silence)
    assert "has sent nothing for 300 s while answers are open; it is killed" in caplog.text


def test_idle_engine_may_be_silent():
    def silence(client: EngineClient, process: Process) -> None:
        for generation in list(client._generations.values()):
            generation.close()
        seconds_pass(client, 2 * SILENT_SECONDS)

    assert with_open_answer(silence) == ""


def test_stopped_process_is_killed_unless_it_goes_on(caplog: pytest.LogCaptureFixture):
    def stop_twice(client: EngineClient, process: Process) -> None:
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
            os.kill(child.pid, number)
            os.waitpid(child.pid, os.WUNTRACED | os.WCONTINUED)
            assert not process.killed
            seconds_pass(client, STOPPED_SECONDS - 1)
        assert not process.killed
        seconds_pass(client, 1)

    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            assert with_open_answer(stop_twice, child.pid)
        finally:
            child.kill()
    assert "was stopped by a signal 30 s ago; it is killed" in caplog.text


def test_engine_with_a_full_pipe_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(module, "FULL_PIPE_SECONDS", 0.01)

    def fill(client: EngineClient, process: Process) -> None:
        client.submit([0] * (1 << 20), SamplingParams(), "long", DEFAULT_SCHEDULING)

    assert "ended while it was answering" in with_open_answer(fill)
    assert "has not read from its full pipe for 0.01 s; it is killed" in caplog.text
