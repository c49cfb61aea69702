"""Starting and stopping real servers: signals, engine deaths, invalid settings."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.server.support.http_client import CHAT, Talk
from tests.server.support.polling import PATIENCE, until
from tests.server.support.server_process import Served, child_of, launched
from tests.support.processes import has_ended

MESSAGES = [{"role": "user", "content": "Sort these words: pear kiwi apple fig"}]
LONG = {"messages": MESSAGES, "max_tokens": 250, "ignore_eos": True, "temperature": 0}


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Served]:
    served = Served("--no-adaptive", *options)  # else each start times steps for seconds
    try:
        yield served
    finally:
        served.resume()
        served.process.kill()
        served.process.wait(PATIENCE)


def opened(served: Served) -> tuple[Talk, Talk, Talk]:
    """Open a stream that has begun, one that has not, and a request without a stream, with the
    engine paused."""
    begun = Talk(served.url, CHAT, {**LONG, "stream": True})
    assert begun.status == 200
    served.pause()
    stream = Talk(served.url, CHAT, {**LONG, "max_tokens": 30, "stream": True})
    whole = Talk(served.url, CHAT, {**LONG, "max_tokens": 30})
    until(lambda: served.metric("strobe:open_answers") == 3, "all three are open")
    return begun, stream, whole


def health(served: Served) -> int:
    with Talk(served.url, "/health") as talk:
        return talk.status


def test_sigterm_drains_open_streams():
    with serving("--grace=600") as served:
        memory = Path(f"/proc/{served.engine_pid}/maps").read_text()
        assert "/dev/shm/sem." not in memory, "a killed engine would leave a semaphore behind"
        begun, stream, whole = opened(served)
        served.process.send_signal(signal.SIGTERM)
        until(lambda: health(served) == 503, "the server is stopping")
        for path in (CHAT, "/v1/completions", "/tokenize"):
            with Talk(served.url, path, LONG) as talk:
                assert talk.status == 503
                assert int(talk.response.headers["Retry-After"]) > 0
                assert talk.error["code"] == "server_stopping"
        assert served.metric("strobe:open_answers") == 3
        assert served.process.poll() is None
        served.resume()
        for talk in (begun, stream):
            reported = list(talk.events())
            assert reported[-1] == "[DONE]"
            assert reported[-2]["choices"][0]["finish_reason"] == "length"
        assert whole.json()["usage"]["completion_tokens"] == 30
        assert served.process.wait(PATIENCE) == 0
        assert "Traceback" not in served.log


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "signals"),
    [
        (("--grace=0.1",), (signal.SIGINT,)),
        (("--grace=600",), (signal.SIGTERM, signal.SIGINT)),
    ],
    ids=["grace period ends", "signalled twice"],
)
def test_unfinished_request_at_deadline_gets_error_and_status_0(
    options: tuple[str, ...], signals: tuple[int, ...]
):
    with serving(*options) as served:
        talks = opened(served)
        for number in signals:
            served.process.send_signal(number)
            until(lambda: "stopping: finishing 3 answers" in served.log, "the server is stopping")
        until(lambda: "stopping with 3 answers unfinished" in served.log, "it waits no longer")
        served.resume()
        assert_ended(talks, 503, "server_stopping")
        assert served.process.wait(PATIENCE) == 0
        assert "Traceback" not in served.log


def assert_ended(talks: tuple[Talk, Talk, Talk], status: int, code: str) -> None:
    """Check that all three requests of `opened` end with that error."""
    begun, stream, whole = talks
    reported = list(begun.events())
    assert reported[-1] == "[DONE]"
    assert reported[-2]["error"]["code"] == code
    for talk in (stream, whole):
        assert talk.status == status
        assert talk.error["code"] == code


@pytest.mark.full
def test_engine_death_fails_open_requests_and_exits_with_1():
    with serving("--no-restart-engine") as served:
        talks = opened(served)
        os.kill(served.engine_pid, signal.SIGKILL)
        assert_ended(talks, 500, "engine_dead")
        assert served.process.wait(PATIENCE) == 1
        assert "the engine's process has ended" in served.log
        assert "Traceback" not in served.log


@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.full)])
def test_killed_engine_is_restarted_under_load(deaths: int):
    with serving() as served:
        steps = 0.0
        for number in range(1, deaths + 1):
            talks = opened(served)
            steps = max(steps, served.metric("strobe:engine_steps_total"))
            killed = served.engine_pid
            os.kill(killed, signal.SIGKILL)
            assert_ended(talks, 503, "engine_restarting")
            with Talk(served.url, "/health") as talk:
                assert (talk.status, talk.error["message"]) == (503, "The engine is restarting.")
            with Talk(served.url, CHAT, LONG) as talk:
                assert talk.status == 503
                assert "restarting" in talk.error["message"]
                assert int(talk.response.headers["Retry-After"]) > 0
            until(lambda: health(served) == 200, "the engine answers again")
            assert served.engine_pid != killed
            assert has_ended(killed)
            assert served.metric("strobe:engine_restarts_total") == number
            assert served.metric("strobe:engine_steps_total") >= steps
            with Talk(served.url, CHAT, {**LONG, "max_tokens": 5}) as talk:
                assert talk.json()["usage"]["completion_tokens"] == 5
        assert "Traceback" not in served.log


@pytest.mark.full
def test_third_engine_end_exits_with_1():
    """The second and third time it ends before it is ready, so the starts' duration is ignored."""
    with serving() as served:
        killed: set[int] = set()
        for _ in range(3):
            (fresh,) = until(lambda k=killed: set(child_of(served.process.pid)) - k, "it runs")
            os.kill(fresh, signal.SIGKILL)
            killed.add(fresh)
        assert served.process.wait(PATIENCE) == 1
        assert "has ended 3 times within a minute" in served.log
        assert "Traceback" not in served.log


@pytest.mark.full
def test_sigterm_while_the_engine_restarts_exits_with_0():
    with serving() as served:
        os.kill(served.engine_pid, signal.SIGKILL)
        until(lambda: health(served) == 503, "the engine restarts")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE) == 0
        assert "Traceback" not in served.log


def test_engine_exits_when_server_is_killed():
    with serving() as served:
        engine = served.engine_pid
        assert Talk(served.url, CHAT, {**LONG, "stream": True, "n": 4}).status == 200
        served.process.kill()
        until(lambda: has_ended(engine), "the engine's process has ended")
        assert "Traceback" not in served.log


@pytest.mark.full
def test_server_reports_engine_start():
    port = unused_port()
    url = f"http://127.0.0.1:{port}"
    process = launched(f"--port={port}")
    try:
        (engine,) = until(lambda: child_of(process.pid), "the engine's process has begun")
        os.kill(engine, signal.SIGSTOP)
        until(lambda: listens(url), "the server listens")
        for path, body in (("/health", None), (CHAT, LONG), ("/v1/models", None)):
            with Talk(url, path, body) as talk:
                assert talk.status == 503
                assert "still starting" in talk.error["message"]
        with urlopen(f"{url}/version", timeout=PATIENCE) as answer:
            assert answer.status == 200
        os.kill(engine, signal.SIGKILL)
        _, log = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert "ended before it could answer" in log
        assert "Traceback" not in log
    finally:
        process.kill()


@pytest.mark.full
def test_sigterm_during_engine_start_exits_with_0():
    process = launched("--port=0")
    try:
        (engine,) = until(lambda: child_of(process.pid), "the engine's process has begun")
        for pid in (engine, process.pid):  # as systemd does
            os.kill(pid, signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert has_ended(engine)
        assert "Traceback" not in log
    finally:
        process.kill()


def unused_port() -> int:
    """Return a port below the range from which the system assigns ports, also to other tests."""
    for port in random.Random(os.getpid()).sample(range(20000, 30000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def listens(url: str) -> bool:
    with contextlib.suppress(OSError), Talk(url, "/version") as talk:
        return talk.status == 200
    return False


def test_invalid_start_is_one_sentence_and_status_2(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        cases = {
            (
                "--port=0",
                str(tmp_path / "no"),
            ): f"{tmp_path / 'no'} does not exist; name a directory",
            (f"--port={port}",): f"port {port}",
            ("--port=0", "--chat-template={{ x"): "chat template",
        }
        for options, word in cases.items():
            process = launched(*options)
            try:
                _, log = process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
            assert process.returncode == 2, log
            sentence = [line for line in log.splitlines() if line.startswith("strobe: ")]
            assert len(sentence) == 1, log
            assert word in sentence[0]
            assert "Traceback" not in log
