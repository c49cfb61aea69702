"""Requests that are answered by the application in another process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strobe.integrations.forwarding import (
    ForwardedRequest,
    RoutingState,
    merge,
    merge_metrics,
    read_body,
    respond,
    send_failure,
)

PAGE = b"""\
# HELP answers Answers.
# TYPE answers counter
answers{engine="0",text="a, {b}"} 2.0
# HELP memory Bytes.
# TYPE memory gauge
memory 7.0
"""


def request(path: str, body: Any = None, method: str = "POST") -> ForwardedRequest:
    """Return a forwarded request with a JSON body."""
    scope = {"type": "http", "method": method, "path": path, "headers": [(b"accept", b"*/*")]}
    return ForwardedRequest.of(scope, json.dumps(body).encode())


def chat(*messages: str, **fields: Any) -> str:
    """Return the text by which a conversation is routed."""
    turns = [{"role": "user", "content": message} for message in messages]
    return request("/v1/chat/completions", {"messages": turns, **fields}).prompt


def test_prompt_of_a_next_turn_begins_with_the_last_one():
    assert chat("Hello", "How are you?").startswith(chat("Hello"))
    assert chat("Hello", system="Be brief.").startswith("Be brief.")
    salted = chat("Hello", cache_salt="mine")
    assert salted.endswith(chat("Hello"))
    assert not salted.startswith(chat("Hello"))


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": [3, 4]}, "3\n4"),
        ("/v1/responses", {"input": "Hi", "instructions": "Be brief."}, "Be brief.\nHi"),
        ("/v1/completions", ["no object"], ""),
        ("/v1/completions", {"prompt": None}, ""),
    ],
)
def test_prompt_is_read_from_every_form(path: str, body: Any, expected: str):
    assert request(path, body).prompt == expected


def test_body_that_is_no_json_has_no_prompt():
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    assert ForwardedRequest.of(scope, b"\xff{").prompt == ""


def test_stored_response_names_its_replica():
    follow_up = {"input": "And?", "previous_response_id": "resp_k3x9_req-7"}
    assert request("/v1/responses", follow_up).owner == "k3x9"
    assert request("/v1/responses/resp_k3x9_req-7/input_items", method="GET").owner == "k3x9"
    assert request("/v1/responses", {"input": "And?"}).owner == ""


def test_body_beyond_the_limit_is_read_no_further():
    parts = [b"1234", b"5678", b"never read"]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": True}

    assert asyncio.run(read_body(receive, 6)) == b"12345678"
    assert parts == [b"never read"]


async def _events(send: Any, *bodies: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for body in bodies:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def test_closing_a_response_disconnects_the_client():
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"].decode())
        await _events(send, b"first")
        seen.append((await receive())["type"])

    async def close_after_first() -> None:
        messages: AsyncGenerator[Any] = respond(app, request("/v1/completions", "ask"))
        parts = await anext(messages)
        assert [part.get("body") for part in parts] == [None, b"first"]
        await messages.aclose()
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(close_after_first())
    assert seen == ['"ask"', "http.disconnect"]


def test_slow_reader_gets_all_messages():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _events(send, b"first")
        for _ in range(2):
            await asyncio.sleep(0)
        await _events(send, b"second")

    async def read() -> list[Any]:
        parts: list[Any] = []
        async for batch in respond(app, request("/v1/completions")):
            parts += [message.get("body") for message in batch]
            for _ in range(5):  # the application sends the rest meanwhile
                await asyncio.sleep(0)
        return parts

    assert asyncio.run(read()) == [None, b"first", None, b"second"]


def test_failing_application_fails_the_response():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _events(send, b"half")
        raise RuntimeError("broken")

    async def read() -> None:
        async for _ in respond(app, request("/v1/completions")):
            pass

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(read())


def test_merged_metrics_keep_one_family_and_all_samples():
    merged = merge_metrics({"a1": PAGE, "b2": PAGE.replace(b"2.0", b"5.0")}).decode()
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert merged.count("# TYPE") == 3
    samples = [(s.labels, s.value) for s in families["answers"].samples]
    labels = {"engine": "0", "text": "a, {b}"}
    assert samples == [({"replica": "a1", **labels}, 2.0), ({"replica": "b2", **labels}, 5.0)]
    assert [s.labels for s in families["memory"].samples] == [{"replica": "a1"}, {"replica": "b2"}]


def test_merged_metrics_name_silent_replicas():
    merged = merge_metrics({"a1": PAGE}, ["b2"]).decode()
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    samples = families["strobe:replica_up"].samples
    assert {s.labels["replica"]: s.value for s in samples} == {"a1": 1, "b2": 0}
    assert len(families["memory"].samples) == 1


def whole(status: int, body: bytes) -> list[dict[str, Any]]:
    """Return the messages of a response."""
    length = (b"content-length", str(len(body)).encode())
    start = {"type": "http.response.start", "status": status, "headers": [length]}
    return [start, {"type": "http.response.body", "body": body}]


def test_loads_are_added_and_an_error_stays():
    loads = {"a": whole(200, b'{"server_load":2}'), "b": whole(200, b'{"server_load":3}')}
    start, body = merge("/load", loads)
    assert json.loads(body["body"]) == {"server_load": 5}
    assert start["headers"] == [(b"content-length", str(len(body["body"])).encode())]
    failed = whole(401, b"no key")
    assert merge("/load", {**loads, "b": failed}) == failed


def test_merged_responses_name_silent_replicas():
    load = {"a": whole(200, b'{"server_load":2}')}
    (_, body) = merge("/load", load, {"c", "b"})
    assert json.loads(body["body"]) == {"server_load": 2, "silent_replicas": ["b", "c"]}
    with pytest.raises(ValueError, match="cache of b and c may not be cleared"):
        merge("/reset_prefix_cache", {"a": whole(200, b"")}, {"c", "b"})
    assert merge("/reset_prefix_cache", {"a": whole(200, b"")})[1]["body"] == b""


def test_routing_counts_requests_until_they_are_answered():
    routing, first, second = RoutingState(), request("/v1/completions"), request("/load")
    routing.record_sent(first, "a")
    routing.record_sent(second, "a")
    assert routing.num_open() == {"a": 2}
    routing.record_sent(second, "b")
    assert routing.num_open() == {"a": 1, "b": 1}
    routing.record_answered(first)
    routing.record_sent(first, "a")  # the router is late
    assert routing.num_open() == {"b": 1}
    assert (routing.replica_of(first), routing.replica_of(second)) == ("", "b")
    routing.record_silent("b")
    assert [routing.is_silent(name) for name in "ab"] == [False, True]


def failure(path: str, start: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the messages that end a response whose replica is lost."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(send_failure(request(path), send, start, "It was lost.", "replica_lost"))
    return sent


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", {"error": {"code": "replica_lost", "param": None}}),
        ("/v1/messages", {"type": "error", "error": {"type": "overloaded_error"}}),
        ("/api/chat", {"error": "It was lost."}),
    ],
)
def test_lost_replica_is_an_error_in_the_form_of_the_api(path: str, expected: dict[str, Any]):
    start, body = failure(path, None)
    assert start["status"] == 503
    error = json.loads(body["body"])
    assert "It was lost." in json.dumps(error)
    if isinstance(expected["error"], dict):
        assert expected["error"].items() <= error["error"].items()
    else:
        assert error == expected


@pytest.mark.parametrize(
    ("path", "kind", "beginning"),
    [
        ("/v1/completions", b"text/event-stream", b'data: {"error"'),
        ("/v1/messages", b"text/event-stream", b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", b"text/event-stream", b'event: error\ndata: {"type":"error"'),
        ("/api/chat", b"application/x-ndjson", b'{"error"'),
    ],
)
def test_lost_replica_ends_a_stream_with_an_error(path: str, kind: bytes, beginning: bytes):
    (body,) = failure(path, {"status": 200, "headers": [(b"content-type", kind)]})
    assert body["body"].startswith(beginning)
    assert b"It was lost." in body["body"]
    assert body["body"].endswith(b"\n")
    assert not body.get("more_body", False)


def test_half_of_a_whole_body_breaks_the_connection():
    start = {"status": 200, "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(ConnectionError, match="It was lost"):
        failure("/v1/completions", start)
