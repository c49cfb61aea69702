"""Grammars of forced tool calls, in llguidance and with the tokenizer of the demo models."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import make_parser
from tests.server.support.parser_runs import dumps, parse
from tests.server.support.tool_tokenizers import (
    CALL_END,
    END,
    HARMONY,
    Vocabulary,
    allowed,
    render_calls,
    vocabulary,
)

FORMATS = ("hermes", "llama3", "gpt_oss")

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
LIGHT = Tool(
    "get_weather_and_light",
    {
        "properties": {"room": {"$ref": "#/$defs/Room"}, "on": {"type": "boolean"}},
        "required": ["room", "on"],
        "additionalProperties": False,
        "$defs": {"Room": {"enum": ["hall", "attic"]}},
    },
)
ANYTHING = Tool("anything", None)
ROME = ("get_weather", {"city": 'Rom "é"', "unit": "celsius"})
HALL = ("get_weather_and_light", {"room": "hall", "on": True})


@pytest.fixture(scope="module")
def tagged() -> Vocabulary:
    return vocabulary()


@pytest.fixture(scope="module")
def untagged() -> Vocabulary:
    """A tokenizer in which tool call tags are plain text."""
    return vocabulary(less=("<tool_call>", "</tool_call>"))


@pytest.fixture(scope="module")
def harmony() -> Vocabulary:
    return vocabulary(*HARMONY, "<|python_tag|>", ends=(END, CALL_END))


@pytest.fixture(params=["hermes", "hermes untagged", "llama3", "gpt_oss"])
def case(
    request: pytest.FixtureRequest, tagged: Vocabulary, untagged: Vocabulary, harmony: Vocabulary
) -> tuple[str, Vocabulary]:
    """A format with a matching tokenizer."""
    return {
        "hermes": ("hermes", tagged),
        "hermes untagged": ("hermes", untagged),
        "llama3": ("llama3", tagged),
        "gpt_oss": ("gpt_oss", harmony),
    }[request.param]


Case = tuple[str, Vocabulary]


def test_call_of_any_tool_is_allowed(case: Case):
    name, words = case
    matcher = words.matcher(name, [WEATHER, LIGHT, ANYTHING])
    for call in (ROME, HALL, ("anything", {}), ("anything", {"a": [1, {"b": None}], "": "ü"})):
        text = render_calls(name, call)
        assert words.accepts(matcher, text), text
        assert parse(make_parser(name, None), [text]).calls == [(call[0], dumps(call[1]))]


@pytest.mark.parametrize(
    "call",
    [
        ("get_time", {}),
        ("get_weather", {}),
        ("get_weather", {"city": "Rome"}),
        ("get_weather", {"city": "Rome", "unit": "kelvin"}),
        ("get_weather", {"city": "Rome", "unit": "celsius", "days": 10}),
        ("get_weather", {"city": "Rome", "unit": "celsius", "sky": 1}),
        ("get_weather", {"city": 5, "unit": "celsius"}),
        ("get_weather", {"city": "Rome is too long", "unit": "celsius"}),
        ("get_weather_and_light", {"room": "cellar", "on": True}),
        ("get_weather_and_light", ["hall"]),
        ("anything", []),
        ("anything", "text"),
    ],
)
def test_schema_violation_is_blocked(case: Case, call: tuple[str, Any]):
    name, words = case
    matcher = words.matcher(name, [WEATHER, LIGHT, ANYTHING])
    assert not words.accepts(matcher, render_calls(name, call))


def test_plain_text_is_blocked(case: Case):
    name, words = case
    matcher = words.matcher(name, [WEATHER, LIGHT])
    text = render_calls(name, ROME)
    for wrong in (
        "",
        "Hi",
        f"Hi {text}",
        f"{text} Hi",
        text[:-9],
        text.replace(": ", ":"),
        text * 2,
    ):
        assert not words.accepts(matcher, wrong), wrong


def test_named_choice_allows_only_that_tool(case: Case):
    name, words = case
    matcher = words.matcher(name, [LIGHT])
    assert words.accepts(matcher, render_calls(name, HALL))
    assert not words.accepts(matcher, render_calls(name, ROME))


def test_parallel_calls_pass_when_allowed(tagged: Vocabulary):
    for name in ("hermes", "llama3"):
        for calls in ((ROME, HALL), (HALL, HALL, ROME)):
            text = render_calls(name, *calls)
            assert tagged.accepts(tagged.matcher(name, [WEATHER, LIGHT], parallel=True), text)
            assert not tagged.accepts(tagged.matcher(name, [WEATHER, LIGHT]), text)
            parsed = parse(make_parser(name, None), [text]).calls
            assert parsed == [(tool, dumps(arguments)) for tool, arguments in calls]
        matcher = tagged.matcher(name, [WEATHER, LIGHT], parallel=True)
        assert tagged.accepts(matcher, render_calls(name, ROME))
        assert not tagged.accepts(matcher, "")


def test_parallel_gpt_oss_calls_need_call_not_to_be_an_end_token():
    words = vocabulary(*HARMONY)
    text = render_calls("gpt_oss", ROME, HALL)
    assert words.accepts(words.matcher("gpt_oss", [WEATHER, LIGHT], parallel=True), text)
    assert not words.accepts(words.matcher("gpt_oss", [WEATHER, LIGHT]), text)


def test_token_tag_is_matched_as_token_only(tagged: Vocabulary, untagged: Vocabulary):
    first = np.flatnonzero(allowed(tagged.matcher("hermes", [WEATHER])))
    assert first.tolist() == [tagged.added["<tool_call>"]]
    letters = untagged.fast.encode("<tool_call>", add_special_tokens=False).ids
    assert len(letters) > 1
    assert not tagged.matcher("hermes", [WEATHER]).consume_tokens(letters)
    assert untagged.matcher("hermes", [WEATHER]).consume_tokens(letters)


def test_llama_tag_may_precede_a_single_call(tagged: Vocabulary, harmony: Vocabulary):
    text = render_calls("llama3", ROME)
    assert harmony.accepts(harmony.matcher("llama3", [WEATHER]), f"<|python_tag|>{text}")
    assert harmony.accepts(harmony.matcher("llama3", [WEATHER]), text)
    assert not tagged.accepts(tagged.matcher("llama3", [WEATHER]), f"<|python_tag|>{text}")


def test_gpt_oss_call_may_follow_thinking_or_name_recipient_first(harmony: Vocabulary):
    matcher = harmony.matcher("gpt_oss", [WEATHER])
    thought = "<|channel|>analysis<|message|>Hm <b>\n\n{ok}<|end|><|start|>assistant"
    by_template = (
        f" to=functions.{ROME[0]}<|channel|>commentary json<|message|>{dumps(ROME[1])}<|call|>"
    )
    for text in (thought + render_calls("gpt_oss", ROME), thought * 2 + by_template, by_template):
        assert harmony.accepts(matcher, text), text
        assert parse(make_parser("gpt_oss", "gpt_oss"), [text]).calls == [(ROME[0], dumps(ROME[1]))]
    assert not harmony.accepts(matcher, f"{thought}<|channel|>final<|message|>Hi")


@given(
    arguments=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=6),
        st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=9)
        | st.integers()
        | st.floats(-1e6, 1e6).map(lambda value: round(value, 3))
        | st.lists(st.booleans() | st.none(), max_size=2),
        max_size=3,
    )
)
@settings(max_examples=25)
def test_open_schema_allows_any_arguments(tagged: Vocabulary, arguments: dict[str, Any]):
    for name in ("hermes", "llama3"):
        text = render_calls(name, ("anything", arguments))
        assert tagged.accepts(tagged.matcher(name, [ANYTHING]), text), text


def test_accepted_text_is_calls_with_valid_arguments(case: Case):
    name, words = case
    fresh = words.matcher(name, [WEATHER, LIGHT], parallel=True)
    end, tokens = words.added[END], set(words.added.values())
    choose = random.Random(0)
    for _ in range(12):
        matcher = fresh.deep_copy()
        ids: list[int] = []
        while not matcher.is_stopped() and (not matcher.is_accepting() or choose.random() < 0.3):
            # The end token is allowed wherever the answer may end.
            free = [int(token) for token in np.flatnonzero(allowed(matcher)) if token != end]
            markers = [token for token in free if token in tokens]
            ids.append(choose.choice(markers if markers and choose.random() < 0.5 else free))
            assert matcher.consume_token(ids[-1])
        text = words.fast.decode(ids, skip_special_tokens=False)
        result = parse(make_parser(name, "gpt_oss" if name == "gpt_oss" else None), list(text))
        assert result.calls, text
        assert result.content == ""
        for tool, arguments in result.calls:
            read = json.loads(arguments)
            if tool == WEATHER.name:
                assert {"city", "unit"} <= set(read) <= {"city", "unit", "days"}
                assert read["unit"] in ("celsius", "fahrenheit")
                assert len(read["city"]) <= 8
            else:
                assert tool == LIGHT.name
                assert read["room"] in ("hall", "attic")
                assert isinstance(read["on"], bool)


@pytest.mark.parametrize(
    "tool", ['say "hi"', "back\\slash", "näme", "two\nlines", "<[5]>", "%json"]
)
def test_function_name_is_literal_text(tagged: Vocabulary, tool: str):
    for name in ("hermes", "llama3"):
        key = "arguments" if name == "hermes" else "parameters"
        text = f'{{"name": {dumps(tool)}, "{key}": {{}}}}'
        text = f"<tool_call>\n{text}\n</tool_call>" if name == "hermes" else text
        assert tagged.accepts(tagged.matcher(name, [Tool(tool)]), text)
        assert parse(make_parser(name, None), [text]).calls == [(tool, "{}")]


def test_schema_controls_json_whitespace(tagged: Vocabulary):
    own = Tool("f", {"type": "object", "x-guidance": {"key_separator": ":"}})
    matcher = tagged.matcher("llama3", [own])
    assert tagged.accepts(matcher, '{"name": "f", "parameters": {"a":1, "b":2}}')
    assert not tagged.accepts(matcher, '{"name": "f", "parameters": {"a": 1}}')


@pytest.mark.parametrize("name", FORMATS)
def test_non_object_parameters_are_rejected(name: str, harmony: Vocabulary):
    for kind in ("string", ["array", "null"]):
        with pytest.raises(ValueError, match="parameters of the function 'f'"):
            harmony.matcher(name, [Tool("f", {"type": kind})])
    nullable = harmony.matcher(name, [Tool("f", {"type": ["object", "null"]})])
    assert harmony.accepts(nullable, render_calls(name, ("f", {})))
    assert not harmony.accepts(nullable, render_calls(name, ("f", None)))


def test_gpt_oss_rejects_unsupported_names_and_tokenizers(tagged: Vocabulary, harmony: Vocabulary):
    with pytest.raises(ValueError, match=re.escape("has no token <|start|>")):
        tagged.matcher("gpt_oss", [WEATHER])
    with pytest.raises(ValueError, match="'two words' cannot be used"):
        harmony.matcher("gpt_oss", [Tool("two words")])
