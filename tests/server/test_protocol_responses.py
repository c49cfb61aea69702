"""Requests of /v1/responses, converted to chats, and of the token endpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strobe.server.openai.protocol.responses_request import ResponsesRequest
from strobe.server.openai.protocol.token_requests import DetokenizeRequest, TokenizeRequest
from strobe.server.schema.field_errors import FieldError
from tests.server.support.request_bodies import SCHEMA, TOOL, USER, refusal, respond


def test_responses_request_becomes_a_chat():
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "reasoning", "id": "r1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "add"}]},
        {"type": "function_call", "id": "f1", "call_id": "c1", "name": "add",
         "arguments": '{"a": 1, "b": 1}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "0"}]},
        {"type": "reasoning", "id": "r2", "summary": [{"type": "summary_text", "text": "done"}]},
        {"type": "message", "role": "assistant", "id": "m1", "status": "completed",
         "content": [{"type": "output_text", "text": "2", "annotations": [], "logprobs": []}]},
        {"role": "user", "content": "thanks"},
        {"type": "reasoning", "id": "r3", "summary": [], "encrypted_content": None},
    ]  # fmt: skip
    request = respond(items, instructions="you add")
    assert request.warnings() == []
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    bare = {"type": "function", "function": {"name": "add", "arguments": {}}}
    assert request.generation.messages == [
        {"role": "system", "content": "you add"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "reasoning_content": "add",
         "tool_calls": [{"id": "c1", **call}, {"id": "c2", **bare}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "0", "tool_call_id": "c2"},
        {"role": "assistant", "content": "2", "reasoning_content": "done"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": ""},
    ]  # fmt: skip


def test_text_and_calls_are_one_message():
    items = [
        USER,
        {"role": "assistant", "content": "I add."},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
        {"role": "assistant", "content": "2"},
        {"role": "assistant", "content": "again"},
    ]
    messages = respond(items).generation.messages
    assert [m["content"] for m in messages] == ["hello", "I add.", "2", "2", "again"]
    assert messages[1]["tool_calls"][0]["id"] == "c"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ([], "input"),
        (5, "input"),
        ([5], "input[0]"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"type": []}], "input[0].type"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user"}], "input[0].content"),
        ([{"type": "function_call", "name": "f"}], "input[0].call_id"),
        ([{"type": "function_call", "call_id": "c"}], "input[0].name"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
        ([{"type": "reasoning", "content": [5]}], "input[0].content[0]"),
        ([{"type": "reasoning", "content": 5}], "input[0].content"),
        ([{"type": "message", "role": "user", "content": "x", "weight": 1}], "input[0].weight"),
        ([{"type": "function_call", "call_id": "c", "name": "f", "namespace": "n"}],
         "input[0].namespace"),
    ],
)  # fmt: skip
def test_invalid_item_is_named(value: Any, param: str):
    assert refusal(ResponsesRequest, input=value).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        ({"text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "ignore_eos"),
        ({"text": "json"}, "text"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"effort": []}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"tools": [{"type": ""}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"tools": [TOOL]}, "tools[0].function"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]},
         "tools[0].defer_loading"),
        ({"store": True, "background": True}, "background"),
    ],
)  # fmt: skip
def test_unsupported_response_field_is_named(fields: dict[str, Any], param: str):
    assert refusal(ResponsesRequest, **fields).param == param


def test_text_format_equals_chat_response_format():
    text_format = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    request = respond(text={"format": text_format, "verbosity": "medium"})
    assert request.sampling.arguments({})["structured_outputs"] == {"json": SCHEMA}
    assert request.shown_format == text_format
    assert respond().shown_format == {"type": "text"}
    assert respond(text={}).shown_format == {"type": "text"}


def test_response_reports_unsupported_features():
    warnings = respond(reasoning={"summary": "auto"}, max_tool_calls=3).warnings()
    assert {line.split(" has")[0] for line in warnings} == {
        "reasoning.summary",
        "max_tool_calls",
    }


def test_fields_of_hosted_services_are_warnings():
    warnings = respond(
        client_metadata={"x": "y"},
        prompt={"id": "p"},
        service_tier="flex",
        user="u",
        prompt_cache_key="k",
        max_tool_calls=3,
        background=False,
    ).warnings()
    assert sorted(line.split(" has no effect: ")[0] for line in warnings) == [
        "client_metadata",
        "max_tool_calls",
        "prompt",
        "prompt_cache_key",
        "service_tier",
        "user",
    ]


def test_tools_that_are_no_functions_are_skipped_with_a_warning():
    function = {"type": "function", "name": "add", "parameters": SCHEMA}
    allowed = [{"type": "mcp", "server_label": "files"}, {"type": "function", "name": "add"}]
    request = respond(
        tools=[
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            function,
            {"type": "web_search", "external_web_access": True},
            {"type": "namespace", "name": "mail", "tools": [{**function, "name": "send"}]},
            {"type": "local_shell"},
            {"type": "image_generation", "output_format": "png"},
            {"type": "tool_search"},
        ],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": allowed},
    )
    (tool,) = request.generation.toolbox.tools
    assert tool["function"]["name"] == "add"
    assert request.warnings() == [
        f"{path} has no effect: tools of the type {json.dumps(kind)} are not supported, only "
        "functions."
        for path, kind in [
            ('tools[0] ("apply_patch")', "custom"),
            ("tools[2]", "web_search"),
            ('tools[3] ("mail")', "namespace"),
            ("tools[4]", "local_shell"),
            ("tools[5]", "image_generation"),
            ("tools[6]", "tool_search"),
            ('tool_choice.tools[0] ("files")', "mcp"),
        ]
    ]
    only_hosted = respond(tools=[{"type": "local_shell"}], tool_choice="auto")
    assert only_hosted.generation.toolbox.tools == ()


HOSTED_ITEMS = (
    "custom_tool_call", "custom_tool_call_output", "web_search_call", "local_shell_call",
    "local_shell_call_output", "image_generation_call", "tool_search_call", "tool_search_output",
    "mcp_list_tools",
)  # fmt: skip


@pytest.mark.parametrize("kind", HOSTED_ITEMS)
def test_items_of_other_tools_are_skipped_with_a_warning(kind: str):
    hosted = {"type": kind, "call_id": "c", "input": "*** Begin Patch", "output": "Done"}
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    reasoning = {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]}
    request = respond([USER, reasoning, hosted, call])
    assert request.warnings() == [
        f'input[2] has no effect: items of the type "{kind}" are not shown to the model.'
    ]
    user, answer = request.generation.messages
    assert (user, answer["reasoning_content"]) == (USER, "hm")
    assert len(answer["tool_calls"]) == 1


def test_warnings_are_not_repeated():
    warnings = respond(min_tokens=2, guided_choice=["a"]).warnings()
    assert warnings == ["min_tokens has no effect where guided_choice is at its end."]


def test_tokenize_takes_a_prompt_or_messages():
    assert TokenizeRequest.read({"prompt": "x"}).adds_special_tokens
    assert not TokenizeRequest.read({"messages": [USER]}).adds_special_tokens
    for_messages = TokenizeRequest.read({"messages": [USER], "add_special_tokens": True})
    assert for_messages.adds_special_tokens
    request = TokenizeRequest.read({"messages": [USER], "tools": [TOOL]})
    generation = request.generation
    assert (generation.messages, generation.template_options()["tools"]) == ([USER], [TOOL])
    assert refusal(TokenizeRequest, messages=[USER]).param == "messages"
    assert refusal(TokenizeRequest, tools=[TOOL]).param == "tools"
    with pytest.raises(FieldError, match="prompt is missing"):
        TokenizeRequest.read(b"{}")


def test_detokenize_takes_token_ids():
    assert DetokenizeRequest.read({"tokens": [0, 5]}).tokens == (0, 5)
    assert refusal(DetokenizeRequest, tokens=[-1]).param == "tokens[0]"
    assert refusal(DetokenizeRequest, tokens="x").param == "tokens"


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_message_item_without_content_is_refused(role: str):
    error = refusal(ResponsesRequest, input=[USER, {"role": role}])
    assert (error.param, error.code) == ("input[1].content", "missing_required_parameter")
