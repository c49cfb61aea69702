"""Answers that end because they repeat themselves: each endpoint's word for it, and the default of
`--max-repeats`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strobe.sampling_params import RepetitionDetection
from tests.server.support.asgi_client import call
from tests.server.support.scripted_server import Script, shared_app

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {**MESSAGES, "max_tokens": 50},
    "/v1/responses": {"input": "hi"},
    "/api/chat": {**MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}
SENTENCE = "repetition_detection ended the answer, because its last tokens repeat a pattern."


def post(path: str, script: Script, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Return the objects of a response: one, or those of a stream."""
    answer = call(shared_app(script, **options), path, body=[json.dumps(body).encode()])
    assert answer.status == 200, answer.body
    lines = [line.removeprefix("data: ") for line in answer.body.decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_completion_ends_with_repetition(path: str, streams: bool):
    script = Script("no no no no", ends="repetition")
    parts = post(path, script, {**REQUESTS[path], "stream": streams})
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["repetition"]
    assert "warnings" not in parts[-1]


def test_repeated_call_is_no_tool_call():
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n' * 3
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {**MESSAGES, "tools": tools}
    (part,) = post("/v1/chat/completions", Script(text, ends="repetition"), body)
    (choice,) = part["choices"]
    assert choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "repetition"


@pytest.mark.parametrize("streams", [False, True])
def test_message_is_cut_off_with_a_warning(streams: bool):
    script = Script("no no no no", ends="repetition")
    parts = post("/v1/messages", script, {**REQUESTS["/v1/messages"], "stream": streams})
    ending = parts[-2] if streams else parts[0]
    reasons = ending["delta"] if streams else ending
    assert (reasons["stop_reason"], reasons["stop_sequence"]) == ("max_tokens", None)
    assert ending["warnings"] == [SENTENCE]


@pytest.mark.parametrize("streams", [False, True])
def test_response_is_incomplete_with_a_warning(streams: bool):
    script = Script("no no no no", ends="repetition")
    parts = post("/v1/responses", script, {"input": "hi", "stream": streams})
    response = parts[-1]["response"] if streams else parts[0]
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["warnings"] == [SENTENCE]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_answer_is_cut_off_with_a_warning(path: str, streams: bool):
    script = Script("no no no no", ends="repetition")
    *_, last = post(path, script, {**REQUESTS[path], "stream": streams, "colour": 1})
    assert last["done_reason"] == "length"
    own, *earlier = last["warnings"][::-1]
    assert own == f"options.{SENTENCE}"
    assert len(earlier) == (not streams)  # in a stream, the first line has the others


@pytest.mark.parametrize("path", REQUESTS)
def test_max_repeats_is_the_default_that_requests_override(path: str):
    def detection(value: Any = None, **options: Any) -> Any:
        script = Script("yes")
        fields = {} if value is None else {"repetition_detection": value}
        if path.startswith("/api") and fields:
            fields = {"options": fields}
        post(path, script, {**REQUESTS[path], **fields}, **options)
        (params,) = script.received
        return params.repetition_detection

    own = {"max_pattern_size": 3, "min_count": 5}
    assert detection() is None
    assert detection(own) == RepetitionDetection(max_pattern_size=3, min_count=5)
    usual = RepetitionDetection(max_pattern_size=256, min_count=20)
    assert detection(max_repeats=20) == usual
    assert detection(own, max_repeats=20) == detection(own)
    assert not detection({}, max_repeats=20).is_on
    assert not detection({"max_pattern_size": 0}, max_repeats=20).is_on
