"""A real server: keys, limits, disconnects, time limits, the log.

A test that needs an open request pauses the engine process, so nothing here depends on speed.
Starting and stopping is tested in test_stopping.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.support.http_client import CHAT, Talk
from tests.server.support.polling import until
from tests.server.support.server_process import Served

KEY = {"Authorization": "Bearer two"}
PAGE = "https://page.example"
MARK = "zebrawombat"
"""A word in every text that clients send here."""
MESSAGES = [{"role": "user", "content": f"Sort these words: pear {MARK} apple fig"}]
LONG = {"messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SHORT = LONG | {"max_tokens": 8}
OPTIONS = (
    "--api-key=one", "--api-key=two", f"--cors-origin={PAGE}", "--log-level=debug", "--log-json",
    "--max-num-seqs=2", "--max-waiting=2", "--max-body-bytes=60000", "--no-adaptive",
)  # fmt: skip


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    """A server with two slots, a queue of two, two keys and small limits."""
    served = Served(*OPTIONS)
    yield served
    assert served.stop() == 0
    assert "Traceback" not in served.log


@pytest.fixture
def server(strict: Served) -> Iterator[Served]:
    """The same server; after each test nothing may be open, running, waiting or allocated."""
    yield strict
    strict.resume()
    until(lambda: idle(strict), "the server is idle again")


def idle(server: Served) -> bool:
    names = ("strobe:open_answers", "vllm:num_requests_running", "vllm:num_requests_waiting")
    return all(server.metric(name) == 0 for name in (*names, "vllm:kv_cache_usage_perc"))


def post(server: Served, body: Any, path: str = CHAT, **headers: str) -> Talk:
    return Talk(server.url, path, body, headers=KEY | headers)


def lines(server: Served) -> list[dict[str, Any]]:
    """The access log so far."""
    records = [json.loads(line) for line in server.lines if '"strobe.access"' in line]
    return [line for line in records if line["path"] != "/metrics"]


def line_of(server: Served, name: str) -> dict[str, Any]:
    """The access log's line of a request, by its id."""
    (line,) = until(
        lambda: [line for line in lines(server) if line["request_id"] == name], f"a line of {name}"
    )
    return line


def test_only_configured_keys_open_the_api(server: Served):
    with Talk(server.url, body=SHORT) as talk:
        assert talk.status == 401
        assert talk.response.headers["WWW-Authenticate"] == "Bearer"
    with Talk(server.url, "/v1/models", headers={"Authorization": "Bearer three"}) as talk:
        assert talk.status == 401
    with post(server, SHORT) as talk:
        assert talk.status == 200
    with Talk(server.url, "/health") as talk:
        assert talk.status == 200


def test_cors_allows_only_the_named_origin(server: Served):
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    for origin, allowed in ((PAGE, PAGE), ("https://other.example", None)):
        with post(server, SHORT, Origin=origin) as talk:
            assert talk.status == 200
            assert talk.response.headers["Access-Control-Allow-Origin"] == allowed
        headers = asks | {"Origin": origin}
        with Talk(server.url, CHAT, headers=headers, method="OPTIONS") as talk:
            assert talk.response.headers["Access-Control-Allow-Origin"] == allowed


def test_body_above_the_limit_is_413(server: Served):
    with post(server, {**SHORT, "user": MARK * 6000}) as talk:
        assert talk.status == 413
        assert "60000 bytes" in talk.error["message"]
    with post(server, {**SHORT, "user": MARK * 5000}) as talk:
        assert talk.status == 200


@pytest.mark.parametrize("streams", [False, True])
def test_oversized_prompt_is_400(server: Served, streams: bool):
    many = [{"role": "user", "content": f"{MARK} " * 4000}]
    with post(server, {"messages": many, "stream": streams}) as talk:
        assert talk.status == 400
        error = talk.error
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
    with post(server, {**LONG, "max_tokens": 2048, "stream": streams}) as talk:
        assert (talk.status, talk.error["param"]) == (400, "max_tokens")


def test_full_queue_is_429_with_retry_after(server: Served):
    server.pause()
    refused = server.metric("strobe:http_requests_refused_total")
    with post(server, {**LONG, "n": 3}) as first:
        until(lambda: server.metric("strobe:open_answers") == 3, "three of four slots are in use")
        for fields in ({"n": 2}, {"n": 2, "stream": True}):
            with post(server, {**SHORT, **fields}) as talk:
                assert talk.status == 429
                assert int(talk.response.headers["Retry-After"]) >= 1
                assert talk.error["code"] == "queue_full"
        with post(server, {**SHORT, "n": 5}) as talk:
            assert (talk.status, talk.error["param"]) == (400, "n")
        with post(server, SHORT) as last:
            until(lambda: server.metric("strobe:open_answers") == 4, "the last slot is in use")
            first.leave()
            server.resume()
            assert last.status == 200
    assert server.metric("strobe:http_requests_refused_total") == refused + 3


@pytest.mark.parametrize("streams", [False, True])
def test_disconnect_during_answer_frees_pages(server: Served, streams: bool):
    name = f"leaves-{streams}"
    with post(server, {**LONG, "n": 2, "stream": streams}, **{"X-Request-Id": name}) as talk:
        if streams:
            events = talk.events()
            assert [next(events)["object"] for _ in range(3)] == ["chat.completion.chunk"] * 3
        until(lambda: server.metric("vllm:kv_cache_usage_perc") > 0, "it holds pages")
    until(lambda: idle(server), "its pages are free")
    line = line_of(server, name)
    assert (line["status"], line["finish_reason"]) == (499, "abort")
    assert line["completion_tokens"] < 3000
    if streams:
        assert line["completion_tokens"] > 0


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_disconnect_in_queue_removes_the_request(server: Served, path: str, streams: bool):
    server.pause()
    name = f"waits-{path}-{streams}"
    body = LONG if path == CHAT else {"prompt": "Sort", "max_tokens": 1500, "logprobs": 1}
    with post(server, {**LONG, "n": 2}) as first:
        until(lambda: server.metric("strobe:open_answers") == 2, "both slots are in use")
        with post(server, {**body, "stream": streams}, path, **{"X-Request-Id": name}):
            until(lambda: server.metric("strobe:open_answers") == 3, "one waits")
        until(lambda: server.metric("strobe:open_answers") == 2, "nobody waits")
        line = line_of(server, name)
        assert (line["status"], line["finish_reason"]) == (499, "abort")
        assert line["completion_tokens"] == 0
        first.leave()
    assert "Traceback" not in server.log


def test_immediate_disconnects_leave_no_requests(server: Served):
    for _ in range(4):
        for fields in ({}, {"stream": True}, {"response_format": {"type": "json_object"}}):
            post(server, {**LONG, "ignore_eos": False, **fields}).leave()
    until(lambda: idle(server), "nothing of them is left")
    with post(server, SHORT) as talk:
        assert talk.json()["choices"][0]["finish_reason"] == "length"


def test_request_timeout_is_504(server: Served):
    server.pause()
    for streams in (False, True):
        with post(server, {**LONG, "timeout": 0.05, "stream": streams}) as talk:
            assert talk.status == 504
            assert talk.error["code"] == "timeout"


def test_stream_timeout_ends_in_error_event(server: Served):
    seconds = 0.5
    while True:  # until the first token arrives in time
        with post(server, {**LONG, "timeout": seconds, "stream": True}) as talk:
            if talk.status == 200:
                server.pause()
                reported = list(talk.events())
                break
        seconds *= 2
        assert seconds < 60
    assert reported[-1] == "[DONE]"
    assert reported[-2]["error"]["code"] == "timeout"


@pytest.mark.parametrize("streams", [False, True])
def test_request_id_is_echoed_and_logged_with_figures(server: Served, streams: bool):
    name = f"figures-{streams}"
    fields = {"stream": streams, "include_speculation": True, "max_tokens": 40}
    if streams:
        fields["stream_options"] = {"include_usage": True}
    with post(server, {**LONG, **fields}, **{"X-Request-Id": name}) as talk:
        assert talk.status == 200
        assert talk.response.headers["X-Request-Id"] == name
        last = [e for e in talk.events() if e != "[DONE]"][-1] if streams else talk.json()
    assert name in last["id"]
    line = line_of(server, name)
    assert (line["method"], line["path"], line["status"]) == ("POST", CHAT, 200)
    assert (line["model"], line["stream"], line["finish_reason"]) == (
        last["model"],
        streams,
        "length",
    )
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert line[key] == last["usage"][key]
    assert line["speculation"] == last["speculation"]["method"] == "dflash"
    assert line["acceptance_length"] == round(last["speculation"]["acceptance_length"], 3)
    assert line["duration_ms"] > 0
    assert line["bytes"] > 0


def test_request_without_id_gets_one(server: Served):
    names: list[str] = []
    for _ in range(2):
        with post(server, SHORT) as talk:
            names.append(talk.response.headers["X-Request-Id"])
            assert names[-1] in talk.json()["id"]
        line_of(server, names[-1])
    assert len(set(names)) == 2


def test_client_text_is_never_logged(server: Served):
    tool = {"type": "function", "function": {"name": MARK, "parameters": {"type": "object"}}}
    bodies: list[Any] = [
        SHORT,
        {**SHORT, "stop": [MARK], "stream": True},
        {**SHORT, "model": MARK},
        {**SHORT, MARK: 1},
        {**SHORT, "temperature": MARK},
        {**SHORT, "tools": [tool], "tool_choice": "required", "ignore_eos": False},
        {**SHORT, "ignore_eos": False, "structured_outputs": {"choice": [MARK]}},
        {**SHORT, "ignore_eos": False, "structured_outputs": {"regex": f"({MARK}"}},
        {**SHORT, "chat_template": f"{{{{ {MARK}.x.y }}}}", "stream": False},
        {**SHORT, "messages": [{"role": MARK, "content": MARK}]},
        f'{{"messages": "{MARK}"'.encode(),
        MARK.encode(),
    ]
    answers = ""
    for number, body in enumerate(bodies):
        with post(server, body, **{"X-Request-Id": f"text-{number}"}) as talk:
            assert talk.status < 500
            response = talk.response.read().decode()
            if talk.status == 200 and b"{" in response.encode()[:1]:
                answers += (
                    json.loads(response)["choices"][0]["message"].get("reasoning_content") or ""
                )
        line_of(server, f"text-{number}")
    assert "verify request=" in server.log, "the debug level is on"
    assert MARK not in server.log
    assert len(answers) > 10
    assert answers[:20] not in server.log


def test_http_process_loads_no_torch(server: Served):
    assert "libtorch" in Path(f"/proc/{server.engine_pid}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
