"""`strobe serve --data-parallel-size 2` on the demo models."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.server.support.http_client import CHAT, Talk
from tests.server.support.polling import PATIENCE, until
from tests.server.support.server_process import Served, child_of, launched

MESSAGES = [{"role": "user", "content": "Sort these words: pear kiwi apple fig"}]
BODY = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}
LONG = {**BODY, "max_tokens": 250, "ignore_eos": True}


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Served]:
    served = Served("--no-adaptive", "--data-parallel-size=2", *options)
    try:
        yield served
    finally:
        for pid in child_of(served.process.pid):
            os.kill(pid, signal.SIGCONT)
        served.process.kill()
        served.process.wait(PATIENCE)


def by_engine(served: Served, name: str) -> list[float]:
    """The sums of a metric's samples by engine."""
    pattern = rf'^{re.escape(name)}{{[^}}]*engine="(\d)"[^}}]*}} (\S+)$'
    sums = [0.0, 0.0]
    for engine, value in re.findall(pattern, served.get("/metrics"), re.M):
        sums[int(engine)] += float(value)
    return sums


def opened(served: Served, count: int, each: int | None = None) -> list[Talk]:
    """Open so many requests with all engines paused, until each has so many, by default half."""
    for pid in child_of(served.process.pid):
        os.kill(pid, signal.SIGSTOP)
    talks = [Talk(served.url, CHAT, {**LONG, "cache_salt": str(i)}) for i in range(count)]
    shares = [each or count // 2] * 2
    until(lambda: by_engine(served, "strobe:open_answers") == shares, "each engine has its share")
    return talks


@pytest.mark.full
def test_engines_answer_alike_and_keep_conversations():
    with serving() as served:
        texts: list[str] = []
        for salt in ("a", "b"):
            with Talk(served.url, CHAT, {**BODY, "cache_salt": salt}) as talk:
                texts.append(talk.json()["choices"][0]["message"]["content"])
        assert texts[0] == texts[1] != ""
        assert by_engine(served, "vllm:request_success_total") == [1, 1]
        assert by_engine(served, "vllm:prefix_cache_hits_total") == [0, 0]
        turns = [*MESSAGES, {"role": "assistant", "content": texts[0]}, *MESSAGES]
        for salt in ("b", "b", "a"):
            with Talk(served.url, CHAT, {**BODY, "messages": turns, "cache_salt": salt}) as talk:
                assert talk.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert by_engine(served, "vllm:request_success_total") == [2, 3]
        until(lambda: all(by_engine(served, "vllm:prefix_cache_hits_total")), "both engines report")
        info = re.findall(r"^vllm:cache_config_info{.*} 1\.0$", served.get("/metrics"), re.M)
        assert len(info) == 2
        assert "engine 0: warmed up" in served.log
        assert "engine 1: warmed up" in served.log
        assert "on 2 engines, cpu" in served.log
        lines = re.compile(r"status=200 .* engine=(\d)")
        until(lambda: len(lines.findall(served.log)) == 5, "each answer has its line")
        assert sorted(lines.findall(served.log)) == ["0", "0", "1", "1", "1"]
        assert served.stop() == 0
        assert "Traceback" not in served.log


@pytest.mark.full
def test_each_engine_publishes_its_cache(tmp_path: Path):
    endpoints = {name: f"ipc://{tmp_path}/{name}" for name in ("endpoint", "replay_endpoint")}
    config = json.dumps({"enable_kv_cache_events": True, **endpoints})
    with serving(f"--kv-events-config={config}"):
        for rank, suffix in enumerate(("", "_dp1")):
            socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.connect(f"{endpoints['replay_endpoint']}{suffix}")
            socket.send_multipart((b"", bytes(8)))
            assert socket.poll(1000 * PATIENCE)
            _, _, sender = msgspec.msgpack.decode(socket.recv_multipart()[2])
            assert sender == rank
            socket.close(0)


@pytest.mark.full
def test_killed_engine_fails_only_its_started_requests():
    with serving() as served:
        streams = [Talk(served.url, CHAT, {**LONG, "stream": True}) for _ in range(2)]
        for stream in streams:
            assert next(event["choices"] for event in stream.events())
        talks, (killed, other) = opened(served, 6, each=4), sorted(child_of(served.process.pid))
        os.kill(killed, signal.SIGKILL)
        until(lambda: served.metric("strobe:open_answers") == 7, "its requests have moved")
        assert served.get("/health") == ""
        os.kill(other, signal.SIGCONT)
        with Talk(served.url, CHAT, {**LONG, "max_tokens": 5}) as talk:
            assert talk.json()["usage"]["completion_tokens"] == 5
        for talk in talks:
            assert talk.status == 200
            assert talk.json()["usage"]["completion_tokens"] == 250
        errors = [event["error"] for s in streams for event in s.events() if "error" in event]
        assert [error["code"] for error in errors] == ["engine_restarting"]
        assert "send the request again" in errors[0]["message"]
        until(lambda: len(child_of(served.process.pid)) == 2, "a new engine has begun")
        until(lambda: "the engine can answer again" in served.log, "it can answer")
        assert sorted(by_engine(served, "strobe:engine_restarts_total")) == [0, 1]
        finished = by_engine(served, "vllm:request_success_total")
        for number in range(4):
            with Talk(served.url, CHAT, {**BODY, "cache_salt": f"new {number}"}) as talk:
                assert talk.status == 200
        later = by_engine(served, "vllm:request_success_total")
        assert all(before < after for before, after in zip(finished, later, strict=True))
        assert re.search(r"engine \d: the engine's process ended \(exit code -9\)", served.log)
        assert served.stop() == 0
        assert "Traceback" not in served.log


@pytest.mark.full
def test_sigterm_drains_all_engines():
    with serving("--grace=600") as served:
        talks = opened(served, 4)
        served.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping: finishing 4 answers" in served.log, "the server is stopping")
        for pid in child_of(served.process.pid):
            os.kill(pid, signal.SIGCONT)
        assert [talk.json()["usage"]["completion_tokens"] for talk in talks] == [250] * 4
        assert served.process.wait(PATIENCE) == 0
        assert "Traceback" not in served.log


@pytest.mark.full
def test_failed_start_of_one_engine_is_reported_once():
    process = launched("--port=0", "--data-parallel-size=2")
    try:
        until(lambda: len(child_of(process.pid)) == 2, "both engines begin to start")
        os.kill(max(child_of(process.pid)), signal.SIGKILL)
        _, log = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 1
    assert log.count("ended before it could answer") == 1
    assert "Traceback" not in log


@pytest.mark.full
def test_missing_gpu_is_one_sentence_and_status_2():
    options = "--port=0", "--data-parallel-size=2", "--device=cuda"
    process = launched(*options, CUDA_VISIBLE_DEVICES="77,78")
    try:
        _, log = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 2
    assert log.count("strobe: data_parallel_size gives engine") == 1


@pytest.mark.full
def test_server_ends_with_its_last_engine():
    with serving("--no-restart-engine") as served:
        first, last = child_of(served.process.pid)
        os.kill(first, signal.SIGKILL)
        until(lambda: "will not be restarted; the other engines keep" in served.log, "it has ended")
        with Talk(served.url, CHAT, BODY) as talk:
            assert talk.status == 200
        os.kill(last, signal.SIGKILL)
        assert served.process.wait(PATIENCE) == 1
        assert "Traceback" not in served.log
