"""/v1/messages of a real server with the demo models, with and without drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.support.http_client import Talk
from tests.server.support.server_process import Served

SUM = "With 44 coins Tom buys 3 cups. Each cup costs 11 coins. How many coins are left?"
WEATHER = "What is the weather in Athens in celsius?"
PATH = "/v1/messages"
PLAIN = {"thinking": {"type": "disabled"}}
ASKED = {"city": "Athens", "unit": "celsius"}


def tool(name: str) -> dict[str, Any]:
    fields = {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "kelvin"]}}
    schema = {"type": "object", "properties": fields, "required": list(fields),
              "additionalProperties": False}  # fmt: skip
    description = "Use this to know the weather in a city."
    return {"name": name, "description": description, "input_schema": schema}


def body(content: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return {"messages": messages, "max_tokens": 48, "temperature": 0, **fields}


def ask(server: Served, content: Any, **fields: Any) -> dict[str, Any]:
    headers = {"anthropic-version": "2023-06-01"}
    with Talk(server.url, PATH, body(content, **fields), headers=headers) as talk:
        assert talk.status == 200, talk.json()
        return talk.json()


def plain(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer without ids."""
    return [{k: v for k, v in b.items() if k != "id"} for b in message["content"]]


def test_tool_call_and_result(server: Served):
    tools = [tool("get_weather")]
    first = ask(server, WEATHER, tools=tools, max_tokens=128)
    thinking, use = first["content"]
    assert (thinking["type"], use["type"], use["input"]) == ("thinking", "tool_use", ASKED)
    assert first["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": '{"degrees": 31}'}
    messages = [
        {"role": "user", "content": WEATHER},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    second = ask(server, messages, tools=tools, **PLAIN)
    assert [block["type"] for block in second["content"]] == ["text"]
    assert "31" in second["content"][0]["text"]
    assert second["stop_reason"] == "end_turn"


FEATURES: dict[str, dict[str, Any]] = {
    "text": {},
    "stopped": {"stop_sequences": ["Step 2"]},
    "any": {"tools": [tool("f"), tool("g")], "tool_choice": {"type": "any"}},
    "tool": {"tools": [tool("f"), tool("g")], "tool_choice": {"type": "tool", "name": "g"}},
    "seeded": {"temperature": 1.5, "top_p": 1.0, "top_k": 0, "seed": 5},
}


@pytest.mark.parametrize("name", FEATURES)
def test_speculation_changes_no_answer(server: Served, name: str):
    answers: list[dict[str, Any]] = []
    for speculation in (True, False):
        fields = {**FEATURES[name], **PLAIN, "speculation": speculation}
        answers.append(ask(server, SUM, include_speculation=True, **fields))
    assert [answer["speculation"]["used"] for answer in answers] == [True, False]
    assert plain(answers[0]) == plain(answers[1])
    reason, content = answers[0]["stop_reason"], answers[0]["content"]
    if name == "text":
        assert content[0]["text"].endswith("Answer: 11")
        assert reason == "end_turn"
    elif name == "stopped":
        assert "Step 2" not in content[0]["text"]
        assert (reason, answers[0]["stop_sequence"]) == ("stop_sequence", "Step 2")
    elif name != "seeded":
        assert content[0]["name"] in (("f", "g") if name == "any" else ("g",))
        assert content[0]["input"]["unit"] in ("celsius", "kelvin")


def test_stream_equals_whole_message(server: Served):
    whole = ask(server, WEATHER, tools=[tool("get_weather")], max_tokens=128)
    request = body(WEATHER, tools=[tool("get_weather")], max_tokens=128, stream=True)
    with Talk(server.url, PATH, request) as talk:
        events = list(talk.events())
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    thinking = "".join(delta.get("thinking", "") for delta in deltas)
    arguments = "".join(delta.get("partial_json", "") for delta in deltas)
    assert thinking == whole["content"][0]["thinking"]
    assert json.loads(arguments) == ASKED
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_count_tokens_matches_the_message(server: Served):
    prompt = {"system": "Answer the question of the user.", "tools": [tool("get_weather")]}
    usage = ask(server, WEATHER, max_tokens=1, **prompt)["usage"]
    request = {"messages": [{"role": "user", "content": WEATHER}], **prompt}
    with Talk(server.url, f"{PATH}/count_tokens", request) as talk:
        assert talk.json() == {
            "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
        }


def test_answer_continues_the_assistant_prefix(server: Served):
    messages = [
        {"role": "user", "content": SUM},
        {"role": "assistant", "content": "Step 1: The cups"},
    ]
    answer = ask(server, messages, **PLAIN)["content"][0]["text"]
    assert not answer.startswith("Step 1")
    assert answer.endswith("Answer: 11")


def test_error_has_anthropic_format(server: Served):
    with Talk(server.url, PATH, body("hi", max_tokens=-1)) as talk:
        assert talk.status == 400
        response = talk.json()
    assert (response["type"], response["error"]["type"]) == ("error", "invalid_request_error")
    assert "max_tokens is -1" in response["error"]["message"]
    assert response["request_id"] == talk.response.getheader("request-id")
