"""Tools from the request to the answer, over a client of no engine: the model's text is made up."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from asgi import Answer, call
from engineless import START, Said, event, serving

from strobe.config import DEMO_MODELS
from strobe.server.app import make_app
from strobe.server.engine_process.client import Generation
from strobe.server.parsers import TOOL_FORMATS
from strobe.server.serving import Formats
from strobe.server.settings import ServerConfig
from strobe.text.tokenizer import Tokenizer

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


def answer(tokenizer: Tokenizer, form: str | None, text: str, **fields: Any) -> dict[str, Any]:
    """What /v1/chat/completions makes of a model's answer."""
    served = serving(tokenizer)
    served.formats = Formats(None if form is None else TOOL_FORMATS[form], None)

    def engine(generation: Generation) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        generation.take([event(ids, start=START, finish_reason="stop")])

    assert isinstance(served.client, Said)
    served.client.at_submit = engine
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], **fields}
    headers = [("Content-Type", "application/json")]
    found: Answer = call(
        make_app(served), "/v1/chat/completions", headers=headers, body=[json.dumps(body).encode()]
    )
    assert found.status == 200, found.body
    return json.loads(found.body)


def hermes(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Rome"}}}}\n</tool_call>'


def tags(name: str) -> str:
    inner = f"<function={name}>\n<parameter=city>\nRome\n</parameter>\n</function>"
    return f"<tool_call>\n{inner}\n</tool_call>"


@pytest.mark.parametrize(("form", "write"), [("hermes", hermes), ("qwen3_coder", tags)])
def test_a_call_of_a_tool_that_was_offered_is_one_and_of_another_is_text(
    tokenizer: Tokenizer, form: str, write: Any
):
    (choice,) = answer(tokenizer, form, f"Well.\n{write('get_weather')}")["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "get_weather"
    assert json.loads(made["function"]["arguments"]) == {"city": "Rome"}
    text = write("weather_lookup")
    (choice,) = answer(tokenizer, form, text)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text
    assert not choice["message"].get("tool_calls")


def test_tools_of_a_model_whose_form_is_not_known_come_with_a_warning(tokenizer: Tokenizer):
    body = answer(tokenizer, None, tags("get_weather"))
    assert body["choices"][0]["message"]["content"] == tags("get_weather")
    (said,) = body["warnings"]
    assert "its form of calls is not known" in said
    assert "warnings" not in answer(tokenizer, "hermes", "Hi")
    assert "warnings" not in answer(tokenizer, None, "Hi", tool_choice="none")


@pytest.mark.parametrize(
    ("parser", "template", "warned"),
    [
        ("auto", "{% for tool in tools %}{{ tool }}{% endfor %}", True),
        ("none", "{% for tool in tools %}{{ tool }}{% endfor %}", False),
        ("hermes", "{% for tool in tools %}{{ tool }}{% endfor %}", False),
        ("auto", "{{ messages }}", False),
        ("auto", None, False),
    ],
)
def test_a_template_with_tools_in_no_known_form_is_warned_of(
    parser: str, template: str | None, warned: bool, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        Formats.of(ServerConfig(tool_call_parser=parser), template)
    assert ("name it with tool_call_parser" in caplog.text) == warned
