"""/v1/messages with a scripted engine: blocks, events, errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from strobe.server.anthropic.protocol import message_bodies as bodies
from strobe.server.engine_process.client import EngineDead, EngineStopped, PromptRejected
from strobe.server.http.guards import ApiKeyEntry
from strobe.server.http.middleware import MiddlewareSettings, wrap
from strobe.server.schema.field_errors import FieldError
from tests.server.support.answer_checks import check_body
from tests.server.support.asgi_client import Answer, call
from tests.server.support.scripted_server import Script, app, post, tokenizer

USER = {"role": "user", "content": "hello"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CONTEXT = 2048
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": {"b": "é <x> {}"}}}\n</tool_call>'
MIXED = f"<think>\nHm {{}}.\n</think>\n\nFirst <b>.\n{CALL}\nThen this.\n{CALL}"
INPUT = {"a": {"b": "é <x> {}"}}


def ask(script: Script, **body: Any) -> Answer:
    return post("/v1/messages", script, **{"messages": [USER], "max_tokens": 99, **body})


def message(script: Script, **body: Any) -> dict[str, Any]:
    answer = ask(script, **body)
    assert answer.status == 200, answer.body
    body_json = json.loads(answer.body)
    check_body(bodies.Message, body_json)
    return body_json


def stream(script: Script, **body: Any) -> list[dict[str, Any]]:
    """Parse the events and check their names."""
    answer = ask(script, stream=True, **body)
    assert answer.header("content-type") == "text/event-stream; charset=utf-8"
    blocks = answer.body.decode().split("\n\n")
    assert blocks.pop() == ""
    events: list[dict[str, Any]] = []
    for block in blocks:
        match = re.fullmatch(r"event: (\S+)\ndata: (\{.*\})", block)
        assert match, block
        events.append(json.loads(match[2]))
        assert events[-1]["type"] == match[1]
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Assemble the message from the events, which must be in order."""
    first, ping, *rest, delta, last = events
    assert (first["type"], ping, last) == (
        "message_start", {"type": "ping"}, {"type": "message_stop"}
    )  # fmt: skip
    built, opened, texts = first["message"], None, ""
    assert (built["content"], built["stop_reason"]) == ([], None)
    for event in rest:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert opened is None
            opened, texts = event["index"], ""
            assert opened == len(built["content"])
            built["content"].append(event["content_block"])
            continue
        assert event["index"] == opened
        block = built["content"][opened]
        if kind == "stop":
            opened = None
            if block["type"] == "tool_use":
                block["input"] = json.loads(texts or "{}")
            continue
        change = {name: value for name, value in event["delta"].items() if name != "type"}
        ((name, more),) = change.items()
        kinds = {"text": "text_delta", "thinking": "thinking_delta",
                 "signature": "signature_delta", "partial_json": "input_json_delta"}  # fmt: skip
        assert event["delta"]["type"] == kinds[name]
        assert more
        if name == "partial_json":
            texts += more
        else:
            block[name] += more
    assert opened is None
    assert delta.pop("type") == "message_delta"
    return built | delta.pop("delta") | delta


def bare(content: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(type, content) of each block."""
    names = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block["type"], block[names[block["type"]]]) for block in content]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "content": content, "id": ""}


@pytest.mark.parametrize("size", [1, 4, 15])
def test_blocks_follow_generation_order(size: int):
    script = Script(MIXED, size)
    whole = message(script, tools=[TOOL])
    assert bare(whole["content"]) == [
        ("thinking", "Hm {}."), ("text", "First <b>."), ("tool_use", INPUT),
        ("text", "\nThen this."), ("tool_use", INPUT),
    ]  # fmt: skip
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    thinking, _, first, _, second = whole["content"]
    assert thinking["signature"]
    assert first["name"] == second["name"] == "f"
    assert first["id"].startswith("toolu_")
    assert first["id"] != second["id"]
    streamed = assembled(stream(script, tools=[TOOL]))
    assert without_ids(streamed) == without_ids(whole)


def test_thinking_can_be_omitted():
    hidden: dict[str, Any] = {"thinking": {"type": "enabled", "display": "omitted"}}
    whole = message(Script(MIXED, 4), tools=[TOOL], **hidden)
    thinking = whole["content"][0]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "")
    assert thinking["signature"]
    streamed = assembled(stream(Script(MIXED, 4), tools=[TOOL], **hidden))
    assert without_ids(streamed) == without_ids(whole)


def test_usage_splits_prompt_into_cached_and_new_tokens():
    script = Script("<think>\nHm, so.\n</think>\n\nYes.", 3)
    usage = message(script)["usage"]
    counted = post("/v1/messages/count_tokens", Script(""), messages=[USER])
    prompt = json.loads(counted.body)["input_tokens"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] == prompt - 3
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == len(script.ids)
    thinking = len(Script("Hm, so.", ends="length").ids)
    assert usage["output_tokens_details"] == {"thinking_tokens": thinking}
    first, *_, delta, _ = stream(script)
    assert delta["usage"] == usage
    begun = first["message"]["usage"]
    assert begun["input_tokens"] == usage["input_tokens"]
    assert begun["output_tokens"] <= 3


@pytest.mark.parametrize(
    ("script", "body", "reason", "sequence", "content"),
    [
        (Script("Yes."), {}, "end_turn", None, [("text", "Yes.")]),
        (Script("Yes, so", ends="length"), {}, "max_tokens", None, [("text", "Yes, so")]),
        (Script("Yes. No. So."), {"stop_sequences": [" No"]}, "stop_sequence", " No",
         [("text", "Yes.")]),
        (Script(CALL), {"tools": [TOOL]}, "tool_use", None, [("tool_use", INPUT)]),
        (Script(CALL), {"tools": [TOOL], "stop_sequences": ["<x>"]}, "stop_sequence", "<x>",
         [("text", CALL.partition("<x>")[0])]),
        (Script(CALL[:50], ends="length"), {"tools": [TOOL]}, "max_tokens", None, []),
        (Script(""), {}, "end_turn", None, [("text", "")]),
        (Script("<think>\nHm.\n</think>\n\n"), {}, "end_turn", None,
         [("thinking", "Hm."), ("text", "")]),
    ],
)  # fmt: skip
def test_stop_reason(
    script: Script, body: dict[str, Any], reason: str, sequence: str | None, content: Any
):
    whole = message(script, **body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert bare(whole["content"]) == content
    delta = stream(script, **body)[-2]
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_parallel_off_gives_one_call():
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    whole = message(Script(f"{CALL}\n{CALL}"), tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in whole["content"]] == ["tool_use"]


def test_warnings_and_speculation_are_reported():
    script = Script("Yes, it is so.", 3)
    fields: dict[str, Any] = {"metadata": {"user_id": "u"}, "include_speculation": True}
    whole = message(script, request_id="r1", **fields)
    assert whole["id"] == "msg_r1"
    assert whole["warnings"] == ["metadata has no effect: nothing is stored."]
    assert whole["speculation"]["accepted"] > 0
    first, *_, delta, _ = stream(script, **fields)
    assert first["message"]["warnings"] == whole["warnings"]
    assert delta["speculation"] == whole["speculation"]
    assert not {"warnings", "speculation"} & message(script).keys()


def test_sampling_fields_reach_the_engine():
    script = Script("Yes.")
    message(script, max_tokens=7, temperature=0.5, top_k=3, stop_sequences=["x"])
    (params,) = script.received
    assert (params.max_tokens, params.temperature, params.top_k) == (7, 0.5, 3)
    assert (params.stop, params.top_p) == (("x",), 0.9)  # top_p is the model's default


def test_max_tokens_above_context_is_lowered_with_a_warning():
    script = Script("Yes.")
    whole = message(script, max_tokens=16384)
    used = whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
    assert script.received[0].max_tokens == CONTEXT - used
    assert whole["warnings"] == [
        f"max_tokens is 16384, but the answer has at most {CONTEXT - used} tokens: the context "
        f"holds {CONTEXT} and the prompt has {used}."
    ]
    first, *_ = stream(script, max_tokens=16384)
    assert first["message"]["warnings"] == whole["warnings"]
    assert "warnings" not in message(script, max_tokens=CONTEXT - used)
    long = post("/v1/messages", script, max_tokens=1, messages=[
        {"role": "user", "content": "hello " * 5000}
    ])  # fmt: skip
    assert long.status == 400


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_new_thread_has_no_effect_and_continued_thread_is_rejected(path: str):
    more = {} if path.endswith("count_tokens") else {"max_tokens": 5}
    begun = post(path, Script("Yes."), messages=[USER], thread={"type": "create"}, **more)
    assert begun.status == 200
    assert json.loads(begun.body)["warnings"] == [
        "thread has no effect: the server holds no conversations."
    ]
    for thread in ({"type": "continue", "previous_message_id": "msg_1"}, {}, "create"):
        answer = post(path, Script(""), messages=[USER], thread=thread, **more)
        assert is_anthropic(answer, 400, "invalid_request_error")
        error = json.loads(answer.body)["error"]
        assert error["message"].startswith("thread is ")
        assert error["details"] == {"error_code": "thread_unsupported_request"}


def test_count_tokens_matches_the_prompt():
    body: dict[str, Any] = {"messages": [USER], "system": "be brief", "tools": [TOOL]}
    answer = post("/v1/messages/count_tokens", Script(""), **body, cache_control={})
    counted = json.loads(answer.body)
    usage = message(Script("Yes."), **body)["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted["warnings"] == ["cache_control has no effect: prefix caching is automatic."]
    long = post("/v1/messages/count_tokens", Script(""), messages=[
        {"role": "user", "content": "hello " * 5000}
    ])  # fmt: skip
    assert json.loads(long.body)["input_tokens"] > 5000  # more than the context holds
    ids = tokenizer().render_chat([USER])
    assert json.loads(post("/v1/messages/count_tokens", Script(""), messages=[USER]).body) == {
        "input_tokens": len(ids)
    }


def is_anthropic(answer: Answer, status: int, kind: str) -> bool:
    body = json.loads(answer.body)
    check_body(bodies.MessageErrorResponse, body)
    return (
        answer.status == status
        and answer.header("content-length") == str(len(answer.body))
        and list(body) == ["type", "error", "request_id"]
        and (body["type"], body["error"]["type"]) == ("error", kind)
        and body["request_id"] == answer.header("request-id") == answer.header("x-request-id")
    )


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_have_anthropic_format(path: str):
    served = app(Script(""))

    def sent(body: bytes, **more: Any) -> Answer:
        return call(served, path, body=[body], **more)

    good = json.dumps({"messages": [USER], "max_tokens": 5}).encode()
    named = json.dumps({"messages": [USER], "model": "x", "max_tokens": 5}).encode()
    invalid = "invalid_request_error"
    assert is_anthropic(sent(b"{"), 400, invalid)
    assert is_anthropic(sent(b'{"messages": []}'), 400, invalid)
    assert is_anthropic(sent(good, headers=[("Content-Type", "text/plain")]), 415, invalid)
    assert is_anthropic(sent(named if path == "/v1/messages" else named.replace(
        b', "max_tokens": 5', b"")), 404, "not_found_error")  # fmt: skip
    assert is_anthropic(sent(b"", method="GET"), 405, "not_found_error")
    assert is_anthropic(call(served, "/v1/messages/x", body=[b"{}"]), 404, "not_found_error")
    elsewhere = call(served, "/v1/messagesx", body=[b"{}"])
    assert list(elsewhere.error) == ["message", "type", "param", "code"]
    settings = MiddlewareSettings(api_keys=(ApiKeyEntry("k"),), max_body_bytes=3)
    guarded = wrap(served, settings)
    assert is_anthropic(call(guarded, path, body=[good]), 401, "authentication_error")
    large = call(guarded, path, body=[good], headers=[("x-api-key", "k")])
    assert is_anthropic(large, 413, "request_too_large")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("ends", "status", "kind"),
    [
        (PromptRejected("max_tokens is 5, which is wrong."), 400, "invalid_request_error"),
        (EngineDead("It ended."), 500, "api_error"),
        (EngineStopped("It stops."), 503, "overloaded_error"),
        (FieldError("messages is wrong.", "messages"), 400, "invalid_request_error"),
        (TimeoutError(), 504, "timeout_error"),
    ],
)
def test_failure_before_first_event_is_http_error(
    ends: Exception, status: int, kind: str, streams: bool
):
    assert is_anthropic(ask(Script("", ends=ends), stream=streams), status, kind)


def test_failure_in_stream_is_last_event():
    events = stream(Script("Yes, it", ends=EngineDead("It ended.")), request_id="r1")
    assert events[-1] == {
        "type": "error", "error": {"type": "api_error", "message": "It ended."},
        "request_id": "r1",
    }  # fmt: skip
    assert events[-2]["type"] == "content_block_delta"


def test_rejected_constraint_uses_request_field_name():
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    refused = PromptRejected("structured_outputs has a schema of no use.")
    answer = ask(Script("", ends=refused), output_config=form)
    text = json.loads(answer.body)["error"]["message"]
    assert text == "output_config.format has a schema of no use."
