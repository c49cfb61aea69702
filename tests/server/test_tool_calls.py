"""Tool calls from the request to the response, with a scripted engine."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from strobe.config import DEMO_MODELS
from strobe.sampling.grammar_compiler import grammar_source
from strobe.sampling_params import SamplingParams
from strobe.server.app import make_app
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import TOOL_FORMATS
from strobe.server.schema.field_errors import FieldError
from strobe.server.server_settings import ServerConfig
from strobe.server.serving import Formats, log_tool_form
from strobe.text.tokenizer import Tokenizer
from tests.server.support.asgi_client import Answer, call
from tests.server.support.engineless_server import START, RecordingClient, event, serving
from tests.server.support.tool_tokenizers import allowed, vocabulary

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODELS / "target")


Engine = Callable[[SamplingParams], list[int]]


def says(tokenizer: Tokenizer, text: str) -> Engine:
    return lambda _: tokenizer.encode(text, add_special_tokens=False)


def post(tokenizer: Tokenizer, form: str | None, engine: Engine, path: str, **body: Any) -> Answer:
    """Post to a server with this tool call format and engine."""
    served = serving(tokenizer)
    served.formats = Formats(None if form is None else TOOL_FORMATS[form], None)
    client = served.client
    assert isinstance(client, RecordingClient)
    client.at_submit = lambda generation: generation.add_events(
        [event(engine(client.sent[-1].params), start=START, finish_reason="stop")]
    )
    headers = [("Content-Type", "application/json")]
    return call(make_app(served), path, headers=headers, body=[json.dumps(body).encode()])


def answer(
    tokenizer: Tokenizer, form: str | None, text: str | Engine, **fields: Any
) -> dict[str, Any]:
    """Return the response of /v1/chat/completions to a model's answer."""
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], **fields}
    engine = says(tokenizer, text) if isinstance(text, str) else text
    response = post(tokenizer, form, engine, "/v1/chat/completions", **body)
    assert response.status == 200, response.body
    return json.loads(response.body)


def hermes(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Rome"}}}}\n</tool_call>'


def tags(name: str) -> str:
    inner = f"<function={name}>\n<parameter=city>\nRome\n</parameter>\n</function>"
    return f"<tool_call>\n{inner}\n</tool_call>"


@pytest.mark.parametrize(("form", "write"), [("hermes", hermes), ("qwen3_coder", tags)])
def test_call_of_known_tool_is_parsed_and_of_unknown_tool_is_text(
    tokenizer: Tokenizer, form: str, write: Any
):
    (choice,) = answer(tokenizer, form, f"Well.\n{write('get_weather')}")["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    text = write("weather_lookup")
    (choice,) = answer(tokenizer, form, text)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text
    assert not choice["message"].get("tool_calls")


def test_tools_with_unknown_format_warn(tokenizer: Tokenizer):
    body = answer(tokenizer, None, tags("get_weather"))
    assert body["choices"][0]["message"]["content"] == tags("get_weather")
    (warning,) = body["warnings"]
    assert "its form of calls is not known" in warning
    assert "warnings" not in answer(tokenizer, "hermes", "Hi")
    assert "warnings" not in answer(tokenizer, None, "Hi", tool_choice="none")


def test_v1_responses_warns_of_unknown_format(tokenizer: Tokenizer):
    tool = {"type": "function", **TOOL["function"]}
    for form, strict in ((None, False), ("hermes", False), (None, True)):
        body = {"input": "hi", "tools": [{**tool, "strict": strict}]}
        response = post(tokenizer, form, says(tokenizer, "Hi"), "/v1/responses", **body)
        warnings = json.loads(response.body).get("warnings", [])
        assert ["its form of calls is not known" in warning for warning in warnings] == (
            [False, True] if strict else [True] if form is None else []
        )


def test_truncated_call_is_text(tokenizer: Tokenizer):
    head = "<tool_call>\n<function=get_weather>\n"
    for text in ("", "<parameter=city>\nRo", "<parameter=city>\nRome\n</parameter>\n</fun"):
        (choice,) = answer(tokenizer, "qwen3_coder", head + text)["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == head + text
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_deeply_nested_arguments_are_answered(tokenizer: Tokenizer, form: str):
    deep = "[" * 100_000 + "]" * 100_000
    text = hermes("get_weather").replace('"Rome"', deep)
    if form == "qwen3_coder":
        text = tags("get_weather").replace("city", "other").replace("Rome", deep)
    (choice,) = answer(tokenizer, form, text)["choices"]
    if form == "hermes":  # no client can read such an object
        assert choice["message"]["content"] == text
    else:
        assert deep in choice["message"]["tool_calls"][0]["function"]["arguments"]


def deep_schema(levels: int) -> Any:
    return {"anyOf": [deep_schema(levels - 1)]} if levels else {"type": "string"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"required": "city"},
        {"properties": ["k"]},
        {"properties": {"k": 5}},
        {"properties": {"k": {"enum": 7}}},
        {"properties": {"k": {"type": "string", "maxLength": "5"}}},
        {"properties": {"k": {"$ref": "#/k"}}},
        {"properties": {"a>b": {}}},
        {"anyOf": [{"required": ["k"]}]},
    ],
)
def test_unsupported_schema_is_rejected_only_for_forced_calls(
    tokenizer: Tokenizer, parameters: Any
):
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    engine, path = says(tokenizer, tags("get_weather")), "/v1/chat/completions"
    response = post(tokenizer, "qwen3_coder", engine, path, **body, tool_choice="required")
    error = json.loads(response.body)["error"]
    assert (response.status, error["param"]) == (400, "tools")
    assert "'get_weather'" in error["message"]
    (choice,) = answer(tokenizer, "qwen3_coder", tags("get_weather"), tools=[tool])["choices"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "city": "Rome"
    }


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_forced_call_drops_unenforced_keywords_with_a_warning(tokenizer: Tokenizer, form: str):
    city = {"type": "string", "format": "place", "minLength": None, "not": None}
    cities = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    parameters = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "properties": {"city": city, "cities": cities},
        "additionalProperties": None,
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    text = hermes("get_weather") if form == "hermes" else tags("get_weather")
    body = answer(tokenizer, form, text, tools=[tool], tool_choice="required")
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    start = "The schema of the function 'get_weather' has the keyword "
    assert body["warnings"] == [
        f"{start}{name}, which is not enforced." for name in ("format", "uniqueItems")
    ]
    assert "warnings" not in answer(tokenizer, form, text, tools=[tool])


def test_deep_schema_is_a_client_error(tokenizer: Tokenizer):
    parameters = {"properties": {"city": deep_schema(80)}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    choice = answer(
        tokenizer, "qwen3_coder", tags("get_weather"), tools=[tool], tool_choice="required"
    )
    assert choice["choices"][0]["finish_reason"] == "tool_calls"


def test_named_forced_call_follows_schema(tokenizer: Tokenizer):
    """The scripted engine generates random text that the request's grammar allows."""
    words, choose = vocabulary(), random.Random(0)

    def engine(params: SamplingParams) -> list[int]:
        assert params.structured_outputs is not None
        matcher, ids = (
            LLMatcher(words.guide, grammar_source(params.structured_outputs)),
            list[int](),
        )
        while not matcher.is_accepting():
            ids.append(choose.choice([int(token) for token in np.flatnonzero(allowed(matcher))]))
            assert matcher.consume_token(ids[-1])
        return ids

    properties = {
        "city": {"type": "string", "minLength": 1, "maxLength": 60},
        "days": {"type": ["integer", "null"]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city", "days"]}
    tools = [TOOL, {"type": "function", "function": {"name": "plan", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": "plan"}}
    for _ in range(5):
        body = answer(tokenizer, "qwen3_coder", engine, tools=tools, tool_choice=named)
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"]["content"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "plan"
        arguments = json.loads(call["function"]["arguments"])
        assert arguments.keys() == {"city", "days"}
        assert 1 <= len(arguments["city"]) <= 60
        assert type(arguments["days"]) in (int, type(None))


@pytest.mark.parametrize(
    ("extra", "accepted"),
    [
        ({}, False),
        ({"additionalProperties": True}, True),
        ({"additionalProperties": {"type": "integer"}}, True),
        ({"required": ["days"]}, True),
    ],
)
def test_forced_call_has_the_declared_arguments_alone(
    tokenizer: Tokenizer, extra: dict[str, Any], accepted: bool
):
    masks: list[LLMatcher] = []
    words = vocabulary()
    text = hermes("get_weather").replace('"Rome"', '"Rome", "days": 3')

    def engine(params: SamplingParams) -> list[int]:
        assert params.structured_outputs is not None
        masks.append(LLMatcher(words.guide, grammar_source(params.structured_outputs)))
        return tokenizer.encode(text, add_special_tokens=False)

    properties = {"city": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, **extra}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    answer(tokenizer, "hermes", engine, tools=[tool], tool_choice="required")
    assert words.accepts(masks[0], text) == accepted


@pytest.mark.parametrize(
    ("parser", "template", "warned"),
    [
        ("auto", "{% for tool in tools %}{{ tool }}{% endfor %}", True),
        ("none", "{% for tool in tools %}{{ tool }}{% endfor %}", False),
        ("hermes", "{% for tool in tools %}{{ tool }}{% endfor %}", False),
        ("auto", "{{ messages }}", False),
    ],
)
def test_template_with_unknown_tool_format_warns(
    parser: str, template: str, warned: bool, caplog: pytest.LogCaptureFixture
):
    capabilities = Tokenizer(DEMO_MODELS / "target").capabilities(template)
    settings = ServerConfig(tool_call_parser=parser)
    with caplog.at_level(logging.WARNING):
        formats = Formats.of(settings, template, capabilities)
        log_tool_form(settings, formats, capabilities)
    assert ("name it with tool_call_parser" in caplog.text) == warned


@pytest.mark.parametrize("error", [TypeError("'>' not supported"), KeyError("type")])
def test_unreadable_schema_is_a_client_error(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any, **__: Any) -> str:
        raise error

    served = serving(Tokenizer(DEMO_MODELS / "target"))
    served.formats = Formats(TOOL_FORMATS["hermes"], None)
    monkeypatch.setattr(type(TOOL_FORMATS["hermes"]), "grammar", fails)
    with pytest.raises(FieldError, match="tools has a schema in which a keyword's value") as caught:
        served.call_grammar([Tool("f")], parallel=True)
    assert caught.value.param == "tools"
