"""Chat templates behind the endpoints: tools and system messages that a template has no place
for."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from strobe.server.parsers.formats import TOOL_FORMATS
from strobe.server.server_settings import ServerConfig
from strobe.server.serving import Formats, log_tool_form
from strobe.text.chat_template import ONE_SYSTEM_MESSAGE
from tests.server.support.scripted_server import Script, post, tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_SYSTEM_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.role + ':' + m.content }};{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = {"city": "Bern"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}

Body = dict[str, Any]


def chat_calls(arguments: Any) -> list[Body]:
    function = {"name": "get_weather", "arguments": arguments}
    return [{"id": "call_1", "type": "function", "function": function}]


WITH_TOOL: dict[str, Body] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": chat_calls(json.dumps(ARGUMENTS)),
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
        "tools": [TOOL],
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "Weather?"},
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "get_weather",
                "arguments": json.dumps(ARGUMENTS),
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
    },
    "/v1/messages": {
        "max_tokens": 64,
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": ARGUMENTS}
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}],
            },
        ],
        "tools": [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}],
    },
    "/api/chat": {
        "stream": False,
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "get_weather", "arguments": ARGUMENTS}}],
            },
            {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
        ],
        "tools": [TOOL],
    },
}
"""Requests with a tool, an earlier call and its result, by endpoint."""


@pytest.mark.parametrize("path", WITH_TOOL)
def test_tools_work_on_a_template_without_them(path: str):
    script = Script(CALL)
    answer = post(path, script, template=CHATML, **WITH_TOOL[path])
    assert answer.status == 200, answer.body
    (prompt,) = script.prompts
    system, user, call, result, _ = prompt.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\n")
    assert '"get_weather"' in system
    assert user == "<|im_start|>user\nWeather?"
    assert call == "<|im_start|>assistant\n" + CALL
    assert result == "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>"
    assert "get_weather" in answer.body.decode(), "the answer's call is read"
    assert "<tool_call>" not in answer.body.decode()
    assert "warnings" not in json.loads(answer.body)


def test_tool_choice_forces_a_call_without_tools_in_the_template():
    script = Script(CALL)
    body = WITH_TOOL["/v1/chat/completions"] | {"tool_choice": "required"}
    answer = post("/v1/chat/completions", script, template=CHATML, **body)
    (choice,) = json.loads(answer.body)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    (params,) = script.received
    assert params.structured_outputs is not None, "the grammar holds the call"


def test_tokenize_renders_the_prompt_of_a_chat():
    script, body = Script("x"), WITH_TOOL["/v1/chat/completions"]
    post("/v1/chat/completions", script, template=CHATML, **body)
    answer = json.loads(post("/tokenize", Script("x"), template=CHATML, **body).body)
    assert tokenizer().decode(answer["tokens"], skip_special_tokens=False) == script.prompts[0]


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
LATE = {"role": "system", "content": "Use French."}
LAST = {"role": "user", "content": "Bye"}
WITH_LATE_SYSTEM: dict[str, Body] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "Be brief."}, *TURNS, LATE, LAST]
    },
    "/v1/responses": {
        "instructions": "Be brief.",
        "input": [*TURNS, {"role": "developer", "content": "Use French."}, LAST],
    },
    "/v1/messages": {"max_tokens": 8, "system": "Be brief.", "messages": [*TURNS, LATE, LAST]},
    "/api/chat": {
        "stream": False,
        "messages": [{"role": "system", "content": "Be brief."}, *TURNS, LATE, LAST],
    },
}
"""Conversations with a second system message that is late, by endpoint."""


@pytest.mark.parametrize("path", WITH_LATE_SYSTEM)
def test_late_system_messages_are_joined_with_a_warning(path: str):
    script = Script("Salut")
    answer = post(path, script, template=FIRST_SYSTEM_ONLY, **WITH_LATE_SYSTEM[path])
    assert answer.status == 200, answer.body
    assert script.prompts == ["system:Be brief.\n\nUse French.;user:Hi;assistant:Yes?;user:Bye;"]
    assert json.loads(answer.body)["warnings"] == [ONE_SYSTEM_MESSAGE]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_counted_prompts_have_the_same_warning(path: str):
    source = "/v1/messages" if "count" in path else "/v1/chat/completions"
    body = {name: value for name, value in WITH_LATE_SYSTEM[source].items() if name != "max_tokens"}
    answer = post(path, Script("x"), template=FIRST_SYSTEM_ONLY, **body)
    assert json.loads(answer.body)["warnings"] == [ONE_SYSTEM_MESSAGE]


@pytest.mark.parametrize("path", WITH_LATE_SYSTEM)
def test_templates_that_read_parts_show_the_text(path: str):
    script = Script("Salut")
    answer = post(path, script, template=PARTS, **WITH_LATE_SYSTEM[path])
    assert answer.status == 200, answer.body
    (prompt,) = script.prompts
    assert prompt.startswith("system:Be brief.;user:Hi;assistant:Yes?;system:Use French.;user:Bye;")


@pytest.mark.parametrize(
    ("template", "parser", "sentence"),
    [
        (CHATML, "auto", "so the system message describes a request's tools to the model; its calls"
         " are read as hermes"),
        (CHATML, "none", "its calls are text, as tool_call_parser is none"),
        (None, "auto", "shows tools to the model; its calls are read as hermes"),
    ],
)  # fmt: skip
def test_log_says_how_tools_reach_the_model(
    template: str | None, parser: str, sentence: str, caplog: pytest.LogCaptureFixture
):
    capabilities = tokenizer().capabilities(template)
    settings = ServerConfig(tool_call_parser=parser)
    formats = Formats.of(settings, template or tokenizer().hf.chat_template, capabilities)
    with caplog.at_level(logging.INFO):
        log_tool_form(settings, formats, capabilities)
    assert sentence in caplog.text


def test_known_calls_keep_their_format_without_tools_in_the_template():
    template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% for tool in m['tool_calls']"
        " or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "{{ tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] }}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>{% endfor %}{% endfor %}"
    )
    capabilities = tokenizer().capabilities(template)
    formats = Formats.of(ServerConfig(), template, capabilities)
    assert formats.tools is TOOL_FORMATS["deepseek_v3"]
    assert capabilities.call_example is not None
    assert capabilities.call_example.startswith("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"add_generation_prompt": False}, "Once upon a time"),
        ({"continue_final_message": True}, "Once upon a time"),
        ({}, " there was"),
        ({"add_generation_prompt": False, "echo": False}, " there was"),
    ],
)
def test_echo_begins_with_the_message_that_the_prompt_ends_with(options: Body, text: str):
    messages = [{"role": "user", "content": "Once upon a time"}]
    body = {"messages": messages, "echo": True} | options
    answer = post("/v1/chat/completions", Script(" there was"), **body)
    (choice,) = json.loads(answer.body)["choices"]
    assert choice["message"]["content"].startswith(text)
    assert choice["message"]["content"].endswith(" there was")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": None, "content": None, "name": None},
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": None}]},
        {"role": "user", "content": "x", "name": None, "weight": None},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_null_fields_of_messages_are_absent(path: str, message: Body):
    messages = [{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "Bye"}]
    assert post(path, Script("x"), messages=messages).status == 200
