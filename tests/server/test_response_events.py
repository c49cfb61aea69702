"""/v1/responses with a scripted engine: items, events, failures."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from strobe.server.engine_process.client import EngineDead, PromptRejected
from strobe.server.openai.protocol import response_bodies as answers
from tests.server.support.answer_checks import check_body
from tests.server.support.scripted_server import Script, post

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": {"b": "é <x> {}"}}}\n</tool_call>'
ARGUMENTS = '{"a": {"b": "é <x> {}"}}'
MIXED = f"<think>\nHm {{}}.\n</think>\n\nFirst <b>.\n{CALL}\nThen this.\n{CALL}"
TEXT = "response.output_text"
CALLED = "response.function_call_arguments"
THOUGHT = "response.reasoning_text"


def respond(script: Script, **body: Any) -> dict[str, Any]:
    answer = post("/v1/responses", script, **{"input": "hello", **body})
    assert answer.status == 200, answer.body
    response = json.loads(answer.body)
    check_body(answers.Response, response)
    return response


def stream(script: Script, **body: Any) -> list[dict[str, Any]]:
    """Parse the events and check their names and numbers."""
    answer = post("/v1/responses", script, **{"input": "hello", "stream": True, **body})
    assert answer.header("content-type") == "text/event-stream; charset=utf-8"
    blocks = answer.body.decode().split("\n\n")
    assert blocks.pop() == ""
    events: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match = re.fullmatch(r"event: (\S+)\ndata: (\{.*\})", block)
        assert match, block
        events.append(json.loads(match[2]))
        assert events[-1]["type"] == match[1]
        assert events[-1]["sequence_number"] == number
    return events


def bare(output: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(type, text, status) of each item."""
    return [
        (item["type"], item.get("arguments") or "".join(p["text"] for p in item.get("content", [])),
         item["status"])
        for item in output
    ]  # fmt: skip


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of events, with consecutive deltas listed once."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(types) if i == 0 or kind != types[i - 1]]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("streams", [False, True])
def test_items_follow_generation_order(size: int, streams: bool):
    script = Script(MIXED, size)
    if streams:
        response = stream(script, tools=[TOOL])[-1]["response"]
    else:
        response = respond(script, tools=[TOOL])
    assert response["status"] == "completed"
    done = "completed"
    assert bare(response["output"]) == [
        ("reasoning", "Hm {}.", done),
        ("message", "First <b>.", done),
        ("function_call", ARGUMENTS, done),
        ("message", "\nThen this.", done),
        ("function_call", ARGUMENTS, done),
    ]
    reasoning, message, first, _, second = response["output"]
    assert (reasoning["summary"], message["content"][0]["annotations"]) == ([], [])
    assert first["name"] == second["name"] == "f"
    prefixes = [item["id"].split("_")[0] for item in response["output"]]
    assert prefixes == ["rs", "msg", "fc", "msg", "fc"]
    assert first["call_id"].startswith("call_")
    ids = {item["id"] for item in response["output"]} | {first["call_id"], second["call_id"]}
    assert len(ids) == 7


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_events_describe_one_item_at_a_time(size: int):
    events = stream(Script(MIXED, size), tools=[TOOL])
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
            "content_part.done", "output_item.done"]  # fmt: skip
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done"]  # fmt: skip
    thought = [kind.replace("output_text", "reasoning_text") for kind in text]
    assert kinds(events) == [
        "created", "in_progress", *thought, *text, *call, *text, *call, "completed"
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    assert events[0]["response"]["output"] == events[1]["response"]["output"] == []
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["item"]["status"] == "in_progress"
        assert own[0]["item"]["id"] == item["id"]
        assert own[-1]["item"] == item
        inner = own[1:-1]
        assert {event["item_id"] for event in inner} == {item["id"]}
        whole = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(e["delta"] for e in inner if e["type"].endswith(".delta")) == whole
        (done,) = [e for e in inner if e["type"] in (f"{TEXT}.done", f"{THOUGHT}.done",
                                                     f"{CALLED}.done")]  # fmt: skip
        assert done.get("text", done.get("arguments")) == whole
        if "content" in item:
            assert {event["content_index"] for event in inner} == {0}
            assert inner[-1]["part"] == item["content"][0]


def test_usage_counts_reasoning_tokens():
    script = Script("<think>\nHm, so.\n</think>\n\nYes.", 3)
    response = respond(script)
    marks = {"<think>", "</think>", "\n", "\n\n", "Yes", "."}
    total = len(script.ids)
    thinking = len(Script("Hm, so.", ends="length").ids)
    assert thinking < total - len(marks) + 1
    usage = response["usage"]
    assert usage["output_tokens"] == total
    assert usage["output_tokens_details"] == {"reasoning_tokens": thinking}
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert usage["total_tokens"] == usage["input_tokens"] + total
    assert usage == stream(script)[-1]["response"]["usage"]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_logprobs_match_text_tokens(size: int):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    text = "So: hello 1 < 2, <b>"
    script = Script(f"<think>\nHm.\n</think>\n\n{text}", size)
    events = stream(script, **fields)
    part = events[-1]["response"]["output"][1]["content"][0]
    assert spelt(part["logprobs"]) == part["text"] == text
    assert [entry["logprob"] for entry in part["logprobs"]] == [-0.5] * len(part["logprobs"])
    assert script.received[0].logprobs == 2
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    deltas = [event for event in events if event["type"] == f"{TEXT}.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert [spelt(event["logprobs"]) for event in deltas] == [e["delta"] for e in deltas]
    assert respond(script, **fields)["output"][1]["content"][0]["logprobs"] == part["logprobs"]
    assert respond(script)["output"][1]["content"][0]["logprobs"] == []


def spelt(logprobs: list[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in logprobs).decode()


def test_multi_token_character_has_all_logprobs():
    script = Script("<think>\nHm.\n</think>\n\n😀", ends="length")
    alone = len(Script("😀", ends="length").ids)
    response = respond(script, include=["message.output_text.logprobs"])
    assert response["output"][1]["content"][0]["text"] == "😀"
    assert len(response["output"][1]["content"][0]["logprobs"]) == alone > 1


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("<think>\nHm", [("reasoning", "Hm", "incomplete")]),
        ("Well <", [("message", "Well <", "incomplete")]),
        (CALL[:50], []),
        ("<think>", []),
    ],
)
def test_truncated_answer_is_incomplete(text: str, output: list[Any]):
    response = respond(Script(text, ends="length"), tools=[TOOL])
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert bare(response["output"]) == output
    events = stream(Script(text, ends="length"), tools=[TOOL])
    assert events[-1]["type"] == "response.incomplete"
    assert bare(events[-1]["response"]["output"]) == output


@pytest.mark.parametrize("text", ["", "<think>\nHm.\n</think>\n\n"])
def test_empty_answer_is_an_empty_message(text: str):
    events = stream(Script(text))
    assert bare(events[-1]["response"]["output"])[-1] == ("message", "", "completed")
    assert [event["type"] for event in events[-6:-1]] == [
        "response.output_item.added", "response.content_part.added", f"{TEXT}.done",
        "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, 4])
def test_stop_text_ends_answer_despite_later_engine_steps(size: int):
    script = Script("Yes. No. So it is, and so it will be.", size)
    response = respond(script, stop=[" No"])
    assert bare(response["output"]) == [("message", "Yes.", "completed")]
    last = stream(script, stop=[" No"])[-1]
    assert bare(last["response"]["output"]) == [("message", "Yes.", "completed")]


def test_parallel_off_gives_one_call():
    response = respond(Script(f"{CALL}\n{CALL}"), tools=[TOOL], parallel_tool_calls=False)
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert response["parallel_tool_calls"] is False


def test_response_echoes_request_fields():
    script = Script("Yes.")
    response = respond(
        script, instructions="be brief", max_output_tokens=9, temperature=0.5, tools=[TOOL],
        tool_choice="none", metadata={"a": "b"}, user="me", reasoning={"effort": "low"},
        text={"format": {"type": "text"}}, request_id="r1",
    )  # fmt: skip
    assert (response["id"], response["object"], response["model"]) == (
        "resp_r1", "response", "scripted"
    )  # fmt: skip
    request_fields = {
        "instructions": "be brief", "max_output_tokens": 9, "temperature": 0.5, "tools": [TOOL],
        "tool_choice": "none", "metadata": {"a": "b"}, "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low", "summary": None}, "previous_response_id": None,
    }  # fmt: skip
    assert {name: response[name] for name in request_fields} == request_fields
    assert (script.received[0].temperature, script.received[0].max_tokens) == (0.5, 9)
    assert response["top_p"] == script.received[0].top_p == 0.9  # the model's default
    fields = [sentence.split()[0] for sentence in response["warnings"]]
    assert fields == ["user", "reasoning.effort"]
    assert "warnings" not in respond(Script("Yes."))


def test_speculation_is_reported_when_requested_and_at_stream_end():
    script = Script("Yes, it is so.", 3)
    assert "speculation" not in respond(script)
    report = respond(script, include_speculation=True)["speculation"]
    assert report["used"]
    assert report["accepted"] > 0
    first, *_, last = stream(script)
    assert "speculation" not in first["response"]
    assert last["response"]["speculation"] == report


def test_failure_in_stream_is_response_failed():
    events = stream(Script("Yes, it", ends=EngineDead("The engine's process ended.")))
    assert kinds(events)[-3:] == ["output_text.delta", "error", "failed"]
    error, last = events[-2:]
    assert (error["code"], error["message"]) == ("engine_dead", "The engine's process ended.")
    response = last["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": error["message"]}
    assert bare(response["output"]) == [("message", "Yes, it", "incomplete")]
    assert stream(Script("Yes, it", ends="error"))[-1]["type"] == "response.failed"


def test_chunk_stream_ends_with_done_after_an_error():
    dead = Script("Yes, it", ends=EngineDead("It ended."))
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
    ):
        *_, error, done, rest = post(path, dead, stream=True, **body).body.split(b"\n\n")
        check_body(answers.ErrorResponse, json.loads(error[6:]))
        assert (json.loads(error[6:])["error"]["code"], done, rest) == (
            "engine_dead", b"data: [DONE]", b""
        )  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
def test_failure_before_first_event_is_http_error(streams: bool):
    refused = PromptRejected("max_tokens is 5, which is wrong.")
    answer = post("/v1/responses", Script("", ends=refused), input="x", stream=streams)
    assert (answer.status, answer.error["param"]) == (400, "max_output_tokens")
    assert answer.error["message"] == "max_output_tokens is 5, which is wrong."
    dead = Script("", ends=EngineDead("It ended."))
    assert post("/v1/responses", dead, input="x", stream=streams).status == 500
    assert post("/v1/responses", Script("x", ends="error"), input="x").status == 500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_output_tokens": 2047}, "max_output_tokens"),
        ({"input": "x" * 9999}, "input"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"n": 2}, "n"),
        ({"model": "other"}, "model"),
    ],
)
def test_errors_use_this_endpoints_field_names(body: dict[str, Any], param: str):
    answer = post("/v1/responses", Script("Yes."), **{"input": "hello", **body})
    assert answer.status == (404 if param == "model" else 400)
    assert answer.error["param"] == param
    assert "max_tokens" not in answer.error["message"]
    assert "messages" not in answer.error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"regex": "["}, "regex"),
    ],
)
def test_uncompilable_grammar_names_its_field(body: dict[str, Any], param: str):
    refused = PromptRejected("structured_outputs: the grammar does not compile: no.")
    answer = post("/v1/responses", Script("", ends=refused), input="x", **body)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_stuck_grammar_is_a_client_error(path: str, caplog: pytest.LogCaptureFixture):
    message = 'structured_outputs: the grammar cannot be followed further: at "secret" it ends.'
    fields = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    answer = post(path, Script("x", ends="error", error=message), **fields, guided_regex="x+")
    assert (answer.status, answer.error["param"]) == (400, "guided_regex")
    assert answer.error["message"] == message.replace("structured_outputs", "guided_regex")
    (line,) = [r.getMessage() for r in caplog.records if "followed further" in r.getMessage()]
    assert line.endswith(": guided_regex: the grammar cannot be followed further: at ")
    assert post(path, Script("x", ends="error"), **fields).status == 500


def test_input_tokens_match_the_response():
    body: dict[str, Any] = {
        "instructions": "be brief",
        "tools": [TOOL],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
    }
    counted = post("/v1/responses/input_tokens", Script(""), input="hello", **body)
    assert counted.status == 200, counted.body
    counts = json.loads(counted.body)
    check_body(answers.InputTokens, counts)
    whole = respond(Script("Yes."), **body)
    assert counts == {
        "object": "response.input_tokens",
        "input_tokens": whole["usage"]["input_tokens"],
        "warnings": whole["warnings"],
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "hello", "temperature": 1}, "temperature"),
        ({"input": "hello", "conversation": "conv_1"}, "conversation"),
        ({"input": "hello", "truncation": "auto"}, "truncation"),
        ({"input": "hello", "model": "other"}, "model"),
    ],
)
def test_input_tokens_reject_sampling_fields(body: dict[str, Any], param: str):
    answer = post("/v1/responses/input_tokens", Script(""), **body)
    assert answer.status == (404 if param == "model" else 400)
    assert answer.error["param"] == param
