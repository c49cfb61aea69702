"""Anthropic's requests, converted to chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strobe.server.anthropic.protocol.messages_request import CountTokensRequest, MessagesRequest
from tests.server.support.request_bodies import SCHEMA, USER, refusal

TOOL = {"name": "add", "description": "adds", "input_schema": SCHEMA}
CACHED = {"cache_control": {"type": "ephemeral"}}


def ask(messages: Any = (USER,), **fields: Any) -> MessagesRequest:
    body = {"messages": list(messages), "max_tokens": 9, **fields}
    return MessagesRequest.read(json.dumps(body))


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def test_messages_request_becomes_a_chat():
    messages = [
        {"role": "user", "content": [text("1+1?", **CACHED), text("quick")]},
        {"role": "user", "content": "please"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "add", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            text("I add.", citations=None),
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
            {"type": "tool_result", "tool_use_id": "c2", "content": [text("0")], "is_error": True},
            text("well?"),
        ]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "2", "signature": ""}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c3"}]},
    ]  # fmt: skip
    request = ask(messages, system=[text("you add"), text("well", **CACHED)])
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    bare = {"type": "function", "function": {"name": "add", "arguments": {}}}
    assert request.generation.messages == [
        {"role": "system", "content": "you add\nwell"},
        {"role": "user", "content": "1+1?\nquick\nplease"},
        {"role": "assistant", "content": "I add.", "reasoning_content": "add",
         "tool_calls": [{"id": "c1", **call}, {"id": "c2", **bare}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "0", "tool_call_id": "c2"},
        {"role": "user", "content": "well?"},
        {"role": "assistant", "content": "", "reasoning_content": "2"},
        {"role": "tool", "content": "", "tool_call_id": "c3"},
    ]  # fmt: skip
    named = [sentence.split()[0] for sentence in request.warnings()]
    assert named == [
        "messages[0].content[0].cache_control", "messages[2].content[1].data",
        "messages[3].content[1].is_error", "system[1].cache_control",
    ]  # fmt: skip


def test_text_after_a_call_is_its_own_message():
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    answer = {"role": "assistant", "content": [use, text("and now"), use]}
    _, first, second = ask([USER, answer]).generation.messages
    assert (first["content"], second["content"]) == (None, "and now")
    assert len(first["tool_calls"]) == len(second["tool_calls"]) == 1


def test_hidden_blocks_alone_are_rejected():
    answer = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    assert refusal(MessagesRequest, messages=[answer]).param == "messages"
    assert ask([answer], system="be brief").generation.messages == [
        {"role": "system", "content": "be brief"}
    ]


def test_sampling_equals_the_chats():
    request = ask(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["a", "b"], seed=3,
        metadata={"user_id": "u"}, service_tier="auto",
    )  # fmt: skip
    arguments = request.sampling.arguments({"min_p": 0.1})
    fields = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3,
             "stop": ("a", "b"), "min_p": 0.1}  # fmt: skip
    assert fields.items() <= arguments.items()
    assert request.warnings() == ["metadata has no effect: nothing is stored."]
    assert ask(stop="x").sampling.arguments({})["stop"] == ("x",)
    form = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    request = ask(output_config=form)
    assert request.generation.structured_outputs == {"json": SCHEMA}
    assert request.generation.template.effort == "low"


@pytest.mark.parametrize(
    ("choice", "mode", "name", "parallel"),
    [
        (None, "auto", None, None),
        ({"type": "auto"}, "auto", None, None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", None, False),
        ({"type": "tool", "name": "add"}, "required", "add", None),
        ({"type": "none"}, "none", None, None),
    ],
)
def test_tools_become_the_chats(choice: Any, mode: str, name: str | None, parallel: bool | None):
    request = ask(tools=[{**TOOL, "type": "custom", **CACHED}], tool_choice=choice)
    generation = request.generation
    chosen = generation.toolbox.choice
    assert (chosen.mode, chosen.name, generation.parallel_tool_calls) == (mode, name, parallel)
    function = {"name": "add", "description": "adds", "parameters": SCHEMA}
    expected_tools = [] if mode == "none" else [{"type": "function", "function": function}]
    assert list(generation.toolbox.tools) == expected_tools


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [(None, None), ("enabled", True), ("adaptive", True), ("disabled", False)],
)
def test_thinking_sets_a_template_variable(thinking: str | None, thinks: bool | None):
    field = None if thinking is None else {"type": thinking}
    generation = ask(thinking=field, chat_template_kwargs={"a": 1}).generation
    assert generation.template_variables.get("enable_thinking") is thinks
    assert generation.template_variables["a"] == 1


def test_ignored_thinking_and_effort_are_warnings():
    request = ask(thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert request.warnings(template_reads={"messages"}) == [
        "thinking.type has no effect: the chat template does not read it.",
        "output_config.effort has no effect: the chat template does not read it.",
    ]


def test_budget_limits_the_thinking():
    limited = ask(thinking={"type": "enabled", "budget_tokens": 1024.0, "display": "omitted"})
    assert not limited.warnings()
    assert not limited.shows_thinking
    assert limited.sampling.thinking_budget == 1024
    assert limited.sampling.names["thinking_token_budget"] == "thinking.budget_tokens"
    other = ask(thinking={"type": "enabled"}, thinking_token_budget=5)
    assert other.sampling.thinking_budget == 5
    assert other.sampling.names["thinking_token_budget"] == "thinking_token_budget"


@pytest.mark.parametrize("budget", [0, -1, 1.5, "9", True])
def test_invalid_thinking_budget(budget: Any):
    error = refusal(MessagesRequest, thinking={"type": "enabled", "budget_tokens": budget})
    assert error.param == "thinking.budget_tokens"


def test_two_thinking_budgets_conflict():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    error = refusal(MessagesRequest, thinking=thinking, thinking_token_budget=5)
    assert error.param == "thinking_token_budget"


@pytest.mark.parametrize("last", ["The answer is", [text("The answer is")]])
def test_answer_continues_last_assistant_message(last: Any):
    generation = ask([USER, {"role": "assistant", "content": last}]).generation
    assert generation.template.continue_final_message
    assert generation.messages[-1] == {"role": "assistant", "content": "The answer is"}
    assert not ask().generation.template.continue_final_message


def test_count_prompt_matches_message_prompt():
    body = {"messages": [USER], "system": "s", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = CountTokensRequest.read(body).generation
    message = MessagesRequest.read({**body, "max_tokens": 5}).generation
    assert counted.messages == message.messages
    assert counted.template_options() == message.template_options()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "one or more messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "user, assistant"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].type", '"image", which is not supported'),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         "messages[0].content[0].type", '"document", which is not supported'),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
         "messages[0].content[0].type", "has no place there"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c",
                                                          "name": "f", "input": "{}"}]}]},
         "messages[0].content[0].input", "an object"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c",
                                                     "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0].type", "the types there are text."),
        ({"system": [{"type": "image"}]}, "system[0].type", "not supported"),
        ({"max_tokens": 0}, "max_tokens", "from 1"),
        ({"max_tokens": None}, "max_tokens", "is missing"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type",
         "brings no tools of its own"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "a JSON schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name", "tools[0].name is"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "tools[1].name is"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
        ({"tool_choice": "auto"}, "tool_choice", "an object with a type"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "auto, any, tool, none"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "add"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "one of enabled"),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
         "thinking.type", "says otherwise"),
        ({"output_config": {"effort": "much"}}, "output_config.effort", "one of"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "xml"),
        ({"stop_sequences": ["x" * 1001]}, "stop_sequences", "stop_sequences holds a string"),
        ({"stop_sequences": ["x"], "stop": "y"}, "stop", "together with stop_sequences"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "use tools"),
        ({"temprature": 1}, "temprature", "did you mean temperature"),
    ],
)  # fmt: skip
def test_unsupported_field_is_rejected_by_name(fields: dict[str, Any], param: str, message: str):
    error = refusal(MessagesRequest, **fields)
    assert error.param == param
    assert message in str(error)
