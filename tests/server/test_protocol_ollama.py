"""Ollama's requests, converted to chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strobe.sampling_params import Speculation
from strobe.server.ollama.protocol.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from tests.server.support.request_bodies import SCHEMA, USER, refusal

TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


def chat(*messages: dict[str, Any], **fields: Any) -> OllamaChatRequest:
    return OllamaChatRequest.read(json.dumps({"messages": messages or [USER], **fields}))


def generate(prompt: str = "hello", **fields: Any) -> OllamaGenerateRequest:
    return OllamaGenerateRequest.read(json.dumps({"prompt": prompt, **fields}))


def sampling(request: OllamaRequest) -> dict[str, Any]:
    return request.generation.sampling.arguments({})


def test_messages_become_a_chat():
    call = {"function": {"name": "add", "arguments": {"a": 1}, "index": 0}}
    request = chat(
        {"role": "system", "content": "you add"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "thinking": "add", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_name": "add"},
        {"role": "assistant", "content": "It is"},
        tools=[TOOL],
    )
    read = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert request.generation.messages == [
        {"role": "system", "content": "you add"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "reasoning_content": "add", "tool_calls": [read]},
        {"role": "tool", "content": "2", "name": "add"},
        {"role": "assistant", "content": "It is"},
    ]
    (tool,) = request.generation.toolbox.tools
    assert tool["function"]["name"] == "add"
    assert request.generation.template_options()["continue_final_message"]
    assert request.warnings() == []


def test_prompt_and_system_become_a_chat():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    assert generate(system="s").generation.messages == messages
    assert generate(system="s").raw_prompt is None
    raw = generate("<user>hello", raw=True)
    assert (raw.raw_prompt, raw.generation.template.add_special_tokens) == ("<user>hello", True)


def test_options_become_sampling_parameters():
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "num_predict": 7,
        "stop": ["x"], "repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4,
        "speculation": False,
    }  # fmt: skip
    arguments = sampling(chat(options=options))
    assert arguments.pop("speculation") is False
    expected = {**options, "repetition_penalty": 1.2, "max_tokens": 7, "stop": ("x",)}
    for name in ("repeat_penalty", "num_predict", "speculation"):
        del expected[name]
    assert arguments == expected


@pytest.mark.parametrize("limit", [-2, -1, 0, -1.0])
def test_ollama_values_for_no_limit_and_no_seed(limit: float):
    arguments = sampling(chat(options={"num_predict": limit, "seed": -1}))
    assert arguments == {"max_tokens": None}


def test_format_constrains_the_answer():
    assert sampling(chat(format="json"))["structured_outputs"] == {"json_object": True}
    schema = sampling(generate(format=SCHEMA))["structured_outputs"]["json"]
    assert schema | {"additionalProperties": False} == SCHEMA | {"additionalProperties": False}
    assert "structured_outputs" not in sampling(chat(format=""))


def test_objects_of_a_format_hold_declared_properties_only():
    inner = {"type": "object", "properties": {"c": {"type": "integer"}}}
    base = {"type": "object", "properties": {"d": {}}}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/Inner"}},
            "free": {"type": "object"},
            "open": inner | {"additionalProperties": True},
            "both": {"allOf": [{"$ref": "#/$defs/Base"}, inner]},
            "undeclared": inner | {"required": ["e"]},
        },
        "$defs": {"Inner": inner, "Base": base},
    }
    expected = json.loads(json.dumps(schema))
    expected["additionalProperties"] = False
    expected["$defs"]["Inner"]["additionalProperties"] = False
    assert sampling(chat(format=schema))["structured_outputs"] == {"json": expected}


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"reasoning_effort": "low"}),
    ],
)
def test_think_reaches_the_chat_template(think: Any, variables: dict[str, Any]):
    assert chat(think=think).generation.template_variables == variables


def test_empty_prompt_only_loads():
    assert chat(messages=[]).is_load
    assert generate("").is_load
    assert not generate().is_load


def test_field_without_effect_is_a_warning():
    request = chat(keep_alive="5m", truncate=True, options={"num_gpu": 1, "num_ctx": 99})
    assert request.warnings() == [
        "keep_alive has no effect: the model stays loaded.",
        "truncate has no effect: a prompt that does not fit is an error.",
        "options.num_gpu has no effect: the server's options set it.",
    ]
    assert request.num_ctx == 99
    assert chat(think=True).warnings({"messages"}) == [
        "think has no effect: the chat template does not read it."
    ]


def test_unknown_fields_are_warnings_at_every_depth():
    function = {"name": "add", "arguments": {"a": 1}, "description": "Add numbers."}
    call = {"id": "call_1", "index": 0, "type": "function", "function": function}
    request = chat(
        {**USER, "timestamp": 5},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call_1"},
        tools=[{**TOOL, "items": {}, "function": {**TOOL["function"], "origin": "web"}}],
        options={"temprature": 1, "speculation": {"depth": 2}},
        session="s",
    )
    unknown = "has no effect: this server does not know it"
    assert request.warnings() == [
        f"session {unknown}.",
        f"options.temprature {unknown}; did you mean temperature?",
        f"options.speculation.depth {unknown}.",
        f"messages[0].timestamp {unknown}.",
        f"messages[1].tool_calls[0].index {unknown}.",
        f"messages[1].tool_calls[0].type {unknown}.",
        f"messages[1].tool_calls[0].function.description {unknown}.",
        f"messages[2].name {unknown}; did you mean tool_name?",
        f"tools[0].items {unknown}.",
        f"tools[0].function.origin {unknown}.",
    ]
    read = {"type": "function", "id": "call_1", "function": {"name": "add", "arguments": {"a": 1}}}
    assert request.generation.messages == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [read]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]
    expected = {"max_tokens": None, "speculation": Speculation()}
    assert sampling(request) == expected


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"options": {"temperature": 101}}, "options.temperature is 101, but must be from 0 to"),
        ({"options": {"num_predict": "a"}}, 'options.num_predict is "a", but must be a whole'),
        ({"options": {"num_ctx": 0}}, "options.num_ctx is 0, but must be a whole number above 0."),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty is 0, but must be above 0"),
        ({"options": {"mirostat": 2}}, "options.mirostat is 2, which is not supported: the samp"),
        ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n is 64, which is not support"),
        ({"options": 3}, "options is 3, but must be a JSON object."),
        ({"format": "xml"}, 'format is "xml", but must be "json" or a JSON schema, as an object'),
        ({"think": "deep"}, 'think is "deep", but must be true, false or one of low, medium,'),
        ({"top_logprobs": 3}, "top_logprobs is 3 without logprobs; set logprobs to true."),
        ({"messages": [{**USER, "images": ["aGk="]}]}, 'messages[0].images is ["aGk="], which'),
        ({"messages": [{**USER, "thinking": "x"}]}, "messages[0].thinking is set for the role u"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
         "messages[0].tool_calls[0].function is null, but must be a JSON object."),
        ({"messages": ["x"]}, 'messages[0] is "x", but must be a JSON object.'),
        ({"tools": [{}]}, 'tools[0].type is null, but must be "function"; other tools are not'),
    ],
)  # fmt: skip
def test_error_names_the_field_of_ollama(fields: dict[str, Any], sentence: str):
    error = refusal(OllamaChatRequest, **fields)
    assert str(error).startswith(sentence)
    assert error.param is not None


@pytest.mark.parametrize(
    "fields",
    [{"context": [1]}, {"suffix": "x"}, {"template": "x"}, {"images": ["aGk="]}, {"width": 8}],
)
def test_generate_rejects_what_the_server_lacks(fields: dict[str, Any]):
    assert refusal(OllamaGenerateRequest, **fields).code == "unsupported_parameter"


def test_system_together_with_raw_is_rejected():
    error = refusal(OllamaGenerateRequest, raw=True, system="s")
    assert str(error).startswith("system is set together with raw")
