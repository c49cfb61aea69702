"""A chat's messages, the chat template's options, and tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.responses_request import ResponsesRequest
from strobe.server.openai.protocol.token_requests import TokenizeRequest
from strobe.server.schema.base import RequestModel
from strobe.server.schema.field_errors import FieldError
from strobe.server.schema.tools import ToolChoice
from tests.server.support.request_bodies import NAMED, TOOL, USER, chat, refusal, respond, tool


def test_messages_match_template_input():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
        {"role": "user", "content": "c", "name": "Ann", "tool_calls": None},
        {
            "role": "assistant", "content": None, "refusal": None, "audio": None,
            "annotations": [], "function_call": None, "reasoning": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "index": 0,
                 "function": {"name": "f", "arguments": '{"a": 1}'}},
                {"id": "2", "function": {"name": "g", "arguments": "not json"}},
                {"function": {"name": "h"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "5"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
        {"role": "assistant", "content": None, "refusal": "never"},
    ]  # fmt: skip
    request = chat(messages=messages)
    assert request.warnings() == []
    assert request.generation.messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c", "name": "Ann"},
        {
            "role": "assistant", "content": None, "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "2", "type": "function",
                 "function": {"name": "g", "arguments": "not json"}},
                {"type": "function", "function": {"name": "h", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "never"},
    ]  # fmt: skip
    messages = request.generation.messages
    assert chat(messages=messages).generation.messages == messages


@pytest.mark.parametrize("arguments", ["", "5", "[1]", "nul", '{"a": NaN}', '"x"'])
def test_non_object_arguments_stay_text(arguments: str):
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).generation.messages
    assert message["tool_calls"][0]["function"]["arguments"] == (arguments or {})


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"content": "x"}, ".role"),
        ({"role": "robot", "content": "x"}, ".role"),
        ({"role": [], "content": "x"}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": None}, ".content"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "user", "content": ["x"]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": {}}]}, ".content[0].type"),
        ({"role": "user", "content": [{"text": "x", "weight": 2}]}, ".content[0].weight"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, ".tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, ".tool_call_id"),
        ({"role": "user", "content": "x", "weight": 0}, ".weight"),
        ({"role": "user", "content": "x", "name": 5}, ".name"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, ".audio"),
        ({"role": "assistant", "function_call": {"name": "f"}}, ".function_call"),
        ({"role": "assistant", "tool_calls": "f"}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, ".tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, ".tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, ".tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, ".tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
         ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "reasoning": "a", "reasoning_content": "b"}, ".reasoning"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", [ChatCompletionRequest, TokenizeRequest])
def test_invalid_message_is_named(model: type[RequestModel], message: Any, place: str):
    with pytest.raises(FieldError) as caught:
        model.read({"messages": [USER, message]})
    assert caught.value.param == f"messages[1]{place}"


def test_input_objects_are_not_modified():
    body = {"messages": [{"role": "developer", "content": "x"}], "tools": [tool("f", strict=True)]}
    before = json.dumps(body)
    ChatCompletionRequest.read(body)
    assert json.dumps(body) == before


def test_template_options_match_tokenizer():
    request = chat(tools=[TOOL], chat_template="t", chat_template_kwargs={"x": 1})
    assert request.generation.template_options() == {
        "tools": [TOOL],
        "chat_template": "t",
        "add_generation_prompt": True,
        "x": 1,
    }
    assert chat().generation.template_options()["tools"] is None


def test_continued_message_has_no_generation_prompt():
    options = chat(continue_final_message=True).generation.template_options()
    assert (options["continue_final_message"], options["add_generation_prompt"]) == (True, False)
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refusal(ChatCompletionRequest, **both).param == "add_generation_prompt"


@pytest.mark.parametrize("name", ["tools", "messages", "tokenize", "add_generation_prompt"])
@pytest.mark.parametrize("model", [ChatCompletionRequest, ResponsesRequest, TokenizeRequest])
def test_template_variables_cannot_replace_fields(model: type[RequestModel], name: str):
    error = refusal(model, chat_template_kwargs={name: True})
    assert error.param == f"chat_template_kwargs.{name}"


def test_reasoning_effort_reaches_the_template():
    assert chat(reasoning_effort="low").generation.template_options()["reasoning_effort"] == "low"
    for request in (chat(reasoning_effort="none"), respond(reasoning={"effort": "none"})):
        options = request.generation.template_options()
        assert (options["reasoning_effort"], options["enable_thinking"]) == ("none", False)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    error = refusal(ChatCompletionRequest, reasoning_effort="none", **thinking)
    assert error.param == "reasoning_effort"
    error = refusal(ResponsesRequest, reasoning={"effort": "none"}, **thinking)
    assert error.param == "reasoning.effort"
    assert str(error).startswith("reasoning.effort")


def test_unread_template_field_is_named():
    request = chat(reasoning_effort="low", chat_template_kwargs={"a": 1, "b": 2})
    assert request.warnings() == []
    assert request.warnings({"a", "b", "reasoning_effort"}) == []
    names = [line.split(" has")[0] for line in request.warnings({"a"})]
    assert names == ["chat_template_kwargs.b", "reasoning_effort"]
    assert chat(reasoning_effort="none").warnings({"enable_thinking"}) == []
    (said_of_response,) = respond(chat_template_kwargs={"a": 1}).warnings(set())
    assert said_of_response.startswith("chat_template_kwargs.a")


def test_chat_echo_is_the_assistants_text():
    assistant = {"role": "assistant", "content": "Once"}
    assert chat(messages=[USER, assistant], echo=True).echo_text == "Once"
    assert chat(messages=[USER, assistant]).echo_text == ""
    assert chat(messages=[USER], echo=True).echo_text == ""


def flattened(choice: Any) -> Any:
    """Convert a tool_choice to the form of /v1/responses."""
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "function":
        return {"type": "function", **choice["function"]}
    inner = choice["allowed_tools"]
    tools = [flattened(entry) for entry in inner["tools"]]
    return {"type": "allowed_tools", "mode": inner["mode"], "tools": tools}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [tool(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, ToolChoice("auto"), ["add", "sub"]),
        ("auto", ToolChoice("auto"), ["add", "sub"]),
        ("none", ToolChoice("none"), []),
        ("required", ToolChoice("required"), ["add", "sub"]),
        (NAMED, ToolChoice("required", "add"), ["add", "sub"]),
        (allowed("auto", "sub"), ToolChoice("auto"), ["sub"]),
        (allowed("required", "add"), ToolChoice("required"), ["add"]),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice, names: list[str]):
    flat = [{"type": "function", "name": "add"}, {"type": "function", "name": "sub"}]
    for request in (
        chat(tools=[tool("add"), tool("sub")], tool_choice=choice),
        respond(tools=flat, tool_choice=flattened(choice)),
    ):
        assert request.generation.toolbox.choice == expected
        assert [tool["function"]["name"] for tool in request.generation.toolbox.tools] == names
        prompt = request.generation.template_options()["tools"] or []
        assert [entry["function"]["name"] for entry in prompt] == names


def test_empty_tools_allow_no_choice():
    for choice in (None, "none", "auto"):
        assert chat(tools=[], tool_choice=choice).generation.toolbox.choice == ToolChoice("none")
    for model in (ChatCompletionRequest, ResponsesRequest):
        assert refusal(model, tool_choice="required").param == "tool_choice"
    assert refusal(ChatCompletionRequest, tool_choice=NAMED).param == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("add", "tools"),
        ([1], "tools[0]"),
        ([{"type": "custom"}], "tools[0].type"),
        ([{"function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool("")], "tools[0].function.name"),
        ([tool("f", parameters=[])], "tools[0].function.parameters"),
        ([tool("f", description=1)], "tools[0].function.description"),
        ([tool("f", strict="yes")], "tools[0].function.strict"),
        ([tool("f", returns={})], "tools[0].function.returns"),
        ([tool("f"), tool("f")], "tools[1].function.name"),
    ],
)
def test_invalid_tool_is_named(tools: Any, param: str):
    assert refusal(ChatCompletionRequest, tools=tools).param == param


@pytest.mark.parametrize(
    "choice",
    ["any", 5, {}, {"type": "custom"}, tool("mul"), {"type": "function"},
     {"type": "allowed_tools"}, allowed("none", "add"), allowed("auto"), allowed("auto", "mul")],
)  # fmt: skip
def test_invalid_tool_choice_is_named(choice: Any):
    error = refusal(ChatCompletionRequest, tools=[TOOL], tool_choice=choice)
    assert (error.param or "").startswith("tool_choice")


def test_forced_call_excludes_constraints():
    forced = {"tools": [TOOL], "tool_choice": "required"}
    assert refusal(ChatCompletionRequest, **forced, guided_regex="a").param == "guided_regex"
    sent_along = chat(**forced, response_format={"type": "json_object"})
    assert sent_along.generation.structured_outputs is None
    auto = chat(tools=[TOOL], response_format={"type": "json_object"})
    assert auto.generation.structured_outputs == {"json_object": True}


def test_strict_applies_to_forced_calls_only():
    strict = tool("f", strict=True)
    (warning,) = chat(tools=[strict]).warnings()
    assert warning.startswith("tools[0].function.strict has no effect")
    assert chat(tools=[strict], tool_choice="required").warnings() == []
    assert chat(tools=[strict]).generation.template_options()["tools"] == [tool("f")]
    (warning,) = respond(tools=[{"type": "function", "name": "f", "strict": True}]).warnings()
    assert warning.startswith("tools[0].strict has no effect")
