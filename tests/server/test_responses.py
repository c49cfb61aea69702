"""/v1/responses of a real server as the `openai` client sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.support.server_process import Served

SUM = "With 44 coins Tom buys 3 cups. Each cup costs 11 coins. How many coins are left?"
TURTLE = (
    "Take this text and write a JSON object with the keys animal, name and age. "
    "The white turtle of Noah is called Bamin and is 12 years old."
)
WEATHER = "What is the weather in Athens in celsius?"
SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["turtle", "dog"]},
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
    },
    "required": ["animal", "name", "age"],
    "additionalProperties": False,
}
LOGPROBS = "message.output_text.logprobs"
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


def tool(name: str) -> dict[str, Any]:
    fields = {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "kelvin"]}}
    return {
        "type": "function",
        "name": name,
        "description": "Use this to know the weather in a city.",
        "strict": None,
        "parameters": {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        },
    }


class Turtle(BaseModel):
    animal: str
    name: str
    age: int


class Asker:
    """The client with the default fields of these tests."""

    def __init__(self, client: openai.OpenAI):
        self.client = client

    def fields(self, more: Mapping[str, Any]) -> dict[str, Any]:
        extra = {**PLAIN, **more.get("extra_body", {})}
        common = {"model": "strobe-demo", "temperature": 0, "max_output_tokens": 48}
        return {**common, **more, "extra_body": extra}

    def __call__(self, value: Any, /, **more: Any) -> Any:
        return self.client.responses.create(input=value, **self.fields(more))


@pytest.fixture(scope="module")
def ask(server: Served) -> Asker:
    return Asker(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0))


def plain(response: Any) -> list[tuple[Any, ...]]:
    """The answer without ids."""
    drop = {"id", "call_id"}
    return [tuple((k, v) for k, v in item.to_dict().items() if k not in drop)
            for item in response.output]  # fmt: skip


def test_text_input_returns_a_message(ask: Asker):
    response = ask(SUM, instructions="Answer the question of the user.", metadata={"a": "b"})
    assert (response.status, response.incomplete_details, response.error) == (
        "completed", None, None
    )  # fmt: skip
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.output_text.endswith("Answer: 11")
    assert response.metadata == {"a": "b"}
    assert (response.temperature, response.top_p) == (
        0,
        0.95,
    )  # the request's, and the model's default
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.output_tokens_details.reasoning_tokens, usage.output_tokens > 10) == (0, True)


def test_reasoning_is_an_item_and_accepted_as_input(ask: Asker):
    thinks = {"max_output_tokens": 128, "extra_body": {"chat_template_kwargs": {}}}
    first = ask(WEATHER, tools=[tool("get_weather")], **thinks)
    reasoning, call = first.output
    assert (reasoning.type, reasoning.summary) == ("reasoning", [])
    assert "Athens" in reasoning.content[0].text
    assert "<" not in reasoning.content[0].text
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    assert json.loads(call.arguments) == {"city": "Athens", "unit": "celsius"}
    items = [
        {"role": "user", "content": WEATHER},
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 31}'},
    ]
    second = ask(items, tools=[tool("get_weather")])
    assert [item.type for item in second.output] == ["message"]
    assert "31" in second.output_text


@pytest.mark.parametrize("speculation", [True, False])
def test_stream_ends_with_the_same_response(ask: Asker, speculation: bool):
    fields = {"include": [LOGPROBS], "top_logprobs": 2, "extra_body": {"speculation": speculation}}
    ask(SUM, **fields)  # so that both hit the prefix cache: other batch shapes round differently
    whole = ask(SUM, **fields)
    with ask(SUM, stream=True, **fields) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert events[0].response.id == last.id
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert plain(last) == plain(whole)
    assert last.usage.output_tokens == whole.usage.output_tokens
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    logprobs = whole.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == whole.output_text
    assert {len(entry.top_logprobs) for entry in logprobs} == {2}
    assert last.speculation["used"] is speculation
    assert not hasattr(whole, "speculation")


def test_client_stream_helper_reads_the_events(ask: Asker):
    fields = ask.fields({"input": WEATHER, "tools": [tool("get_weather")]})
    with ask.client.responses.stream(**fields) as stream:
        snapshot = ""
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                snapshot = event.snapshot
        response = stream.get_final_response()
    (call,) = response.output
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", snapshot)
    assert json.loads(call.arguments) == {"city": "Athens", "unit": "celsius"}
    fields = ask.fields({"input": TURTLE, "text_format": Turtle})
    parsed = ask.client.responses.parse(**fields).output_parsed
    assert parsed is not None
    assert (parsed.animal, parsed.age) == ("turtle", 12)


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "schema": (TURTLE, {"text": {"format": {"type": "json_schema", "name": "t",
                                            "schema": SCHEMA}}}),
    "required": (SUM, {"tools": [tool("f"), tool("g")], "tool_choice": "required"}),
    "named": (SUM, {"tools": [tool("f"), tool("g")],
                    "tool_choice": {"type": "function", "name": "g"}}),
    "seeded": (SUM, {"temperature": 1.5, "top_p": 1.0, "extra_body": {"seed": 5, "top_k": 0}}),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_speculation_changes_no_answer(ask: Asker, name: str):
    text, fields = FEATURES[name]
    answers: list[Any] = []
    for speculation in (True, False):
        extra = {**fields.get("extra_body", {}), "speculation": speculation}
        request = {**fields, "extra_body": {**extra, "include_speculation": True}}
        answers.append(ask(text, max_output_tokens=64, **request))
    assert plain(answers[0]) == plain(answers[1])
    assert [answer.speculation["used"] for answer in answers] == [True, False]
    response = answers[0]
    if name == "schema":
        value = json.loads(response.output_text)
        assert value.keys() == set(SCHEMA["required"])
        assert value["animal"] in ("turtle", "dog")
        assert response.text.format.schema_ == SCHEMA
    elif name != "seeded":
        call = response.output[0]
        assert call.name in (("f", "g") if name == "required" else ("g",))
        assert json.loads(call.arguments)["unit"] in ("celsius", "kelvin")


def test_answer_cut_by_limit_is_incomplete(ask: Asker):
    response = ask(SUM, max_output_tokens=3)
    assert (response.status, response.usage.output_tokens) == ("incomplete", 3)
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    with ask(SUM, max_output_tokens=3, stream=True) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert plain(last.response) == plain(response)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}},
         "text.format"),
        ({"max_output_tokens": 2048}, "max_output_tokens"),
    ],
)  # fmt: skip
def test_unsupported_field_is_rejected_by_name(ask: Asker, fields: dict[str, Any], param: str):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(SUM, stream=stream, **fields)
        assert caught.value.param == param
        assert isinstance(caught.value.body, dict)
        assert param.split("[")[0] in caught.value.body["message"]


def test_field_without_effect_is_reported(ask: Asker):
    response = ask(SUM, max_output_tokens=1, user="me", store=True, reasoning={"summary": "auto"})
    named = {sentence.split()[0] for sentence in response.warnings}
    assert named == {"user", "reasoning.summary"}


def test_response_is_stored_continued_and_deleted(ask: Asker):
    first = ask(WEATHER, tools=[tool("get_weather")], tool_choice="required")
    assert first.store is True
    stored = ask.client.responses.retrieve(first.id)
    assert stored.to_dict() == first.to_dict()
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 31}'}
    tools = [tool("get_weather")]
    second = ask([result], previous_response_id=first.id, tools=tools)
    whole = ask([{"role": "user", "content": WEATHER}, call.to_dict(), result], tools=tools)
    assert plain(second) == plain(whole)
    assert second.usage.input_tokens == whole.usage.input_tokens
    items = ask.client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    ask.client.responses.delete(first.id)
    for gone in (ask.client.responses.retrieve, ask.client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="may have expired"):
            gone(first.id)
    with pytest.raises(openai.NotFoundError, match="may have expired"):
        ask("x", previous_response_id=first.id)
    assert ask.client.responses.retrieve(second.id).id == second.id
