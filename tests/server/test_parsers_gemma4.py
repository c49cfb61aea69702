"""Gemma 4: tool calls, their grammar, and thinking."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import REASONING_FORMATS, make_parser
from strobe.server.parsers.segment import Parser
from tests.server.support.parser_runs import check_cuts, names, parse, places, prose, stream
from tests.server.support.tool_tokenizers import (
    GEMMA4,
    Vocabulary,
    gemma4,
    render_calls,
    vocabulary,
)

Q = '<|"|>'
CALL = f"<|tool_call>call:get_time{{city:{Q}Rome{Q}}}<tool_call|>"
TIME = ("get_time", '{"city": "Rome"}')
TOOL = Tool(
    "get_time",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["utc", None, 7, ["a", {"b": True}]]},
            "way": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tree": {"$ref": "#/$defs/Tree"},
            "list": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["city"],
        "$defs": {
            "Tree": {
                "type": "object",
                "properties": {
                    "leaf": {"type": "boolean"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
                },
                "required": ["leaf"],
            }
        },
    },
)
ANYTHING = Tool("anything", None)
plain = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=9)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


def parser() -> Parser:
    return make_parser("gemma4", None)


def typed() -> Parser:
    return make_parser("gemma4", None, tools=[TOOL, ANYTHING])


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return vocabulary(*GEMMA4)


@given(
    prose,
    st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3),
    places,
)
def test_template_output_is_parsed_back(text: str, expected_calls: Any, cuts: list[int]):
    result = check_cuts(parser, text + render_calls("gemma4", *expected_calls), cuts)
    assert result.content == text
    assert [(name, json.loads(read)) for name, read in result.calls] == expected_calls


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (f"city:{Q}7{Q}", {"city": "7"}),
        ("city:7", {"city": "7"}),
        (f"days:{Q}7{Q}", {"days": 7}),
        ("days:7", {"days": 7}),
        (f"days:{Q}seven{Q}", {"days": "seven"}),
        ("way:None", {"way": None}),
        (f"way:{Q}null{Q}", {"way": "null"}),
        ("tree:{leaf:True,kids:[]}", {"tree": {"leaf": True, "kids": []}}),
        (f'city:{Q}a "b" \\ {{}},\n<tool_call|>{Q}', {"city": 'a "b" \\ {},\n<tool_call|>'}),
        ('city:"a \\"b\\" ,}"', {"city": 'a "b" ,}'}),
        ("more:1.50", {"more": 1.5}),
        ("", {}),
    ],
)
def test_values_have_schema_types(value: str, read: Any):
    text = f"<|tool_call>call:get_time{{{value}}}<tool_call|>"
    result = check_cuts(typed, text)
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == [
        ("get_time", read)
    ]
    assert result.content == ""


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("data_refs:['ds_1'],s:'x'", {"data_refs": ["ds_1"], "s": "x"}),
        ("a:'',b:[ 'x' , 'y' ]", {"a": "", "b": ["x", "y"]}),
        ("a:'it's, so {b}, \"c\"' }", {"a": 'it\'s, so {b}, "c"'}),
        ("a:'it\\'s \\\"so\\\"\\n'", {"a": 'it\'s "so"\n'}),
        ("a:'\\d'", {"a": "\\d"}),
        ("'a':{'b c':'1'}", {"a": {"b c": "1"}}),
        ("days:'7',city:'7'", {"days": 7, "city": "7"}),
        ("a:'tis,b:1", {"a": "'tis", "b": 1}),
    ],
)
def test_strings_may_be_in_single_quotes(value: str, read: Any):
    text = f"<|tool_call>call:get_time{{{value}}}<tool_call|>"
    for parsed in (check_cuts(typed, text), check_cuts(typed, text + CALL)):
        assert parsed.content == ""
        assert json.loads(parsed.calls[0][1]) == read


@pytest.mark.parametrize("cut", range(1, len("{city:") + len(Q) + len("Rome") + len(Q) + 1))
def test_truncated_call_stays_open(cut: int):
    text = CALL[: CALL.index("{") + cut]
    for _, arguments in check_cuts(parser, text).calls:
        with pytest.raises(ValueError, match=r"Expecting|Unterminated|delimiter"):
            json.loads(arguments)


def test_broken_call_ends_at_closer_and_next_is_parsed():
    text = f"<|tool_call>call:f{{a:[1,b<tool_call|>{CALL}"
    result = check_cuts(parser, text)
    assert result.content == ""
    assert [name for name, _ in result.calls] == ["f", "get_time"]
    assert result.calls[1] == TIME


def test_call_of_unknown_tool_is_content():
    def offered() -> Parser:
        return make_parser("gemma4", None, tools=[Tool("get_time")])

    unknown = f"<|tool_call>call:other{{a:{Q}{CALL}{Q}}}<tool_call|>"
    assert check_cuts(offered, unknown).content.startswith(f"<|tool_call>call:other{{a:{Q}")
    plain = CALL.replace("get_time", "other")
    assert check_cuts(offered, f"{plain}{CALL}") == ("", plain, [TIME])


def test_string_is_streamed():
    pieces = ["<|tool_call>call:f{a", f":{Q}x", 'y"', '<|"', "|>,b:1", "2}", "<tool_call|>"]
    assert [part.calls for part in stream(parser, pieces)] == [
        [("f", "{")], [("", '"a": "x')], [("", 'y\\"')], [], [("", '", "b": ')], [("", "12}")],
        [], [],
    ]  # fmt: skip


def test_prompt_may_open_thinking():
    form = REASONING_FORMATS["gemma4"]
    assert form.opened_by("<|turn>model\n<|channel>thought\n")
    assert not form.opened_by("<|turn>model\n<|channel>thought\n<channel|>")


GOOD = [
    {"city": "Rome"},
    {"city": 'a"{},'},
    {"city": "", "days": 9, "unit": "utc", "way": None},
    {"city": "x", "unit": ["a", {"b": True}], "list": [1, 2.5]},
    {"city": "x", "tree": {"leaf": True, "kids": [{"leaf": False}]}},
]
BAD = [
    {},
    {"city": 7},
    {"city": "too long"},
    {"city": "x", "days": 10},
    {"city": "x", "unit": "cet"},
    {"city": "x", "way": 1},
    {"city": "x", "list": []},
    {"city": "x", "list": [1, 2, 3]},
    {"city": "x", "tree": {"kids": []}},
    {"city": "x", "other": 1},
]


@pytest.mark.parametrize("good", GOOD)
def test_forced_call_matching_schema_passes(words: Vocabulary, good: Any):
    text = render_calls("gemma4", ("get_time", good))
    matcher = words.matcher("gemma4", [TOOL, ANYTHING])
    assert words.accepts(matcher, text)
    assert json.loads(parse(typed(), [text]).calls[0][1]) == good
    assert not words.accepts(matcher, text * 2)
    assert words.accepts(words.matcher("gemma4", [TOOL], parallel=True), text * 2)


@pytest.mark.parametrize("bad", BAD)
def test_schema_violation_is_blocked(words: Vocabulary, bad: Any):
    matcher = words.matcher("gemma4", [TOOL])
    assert not words.accepts(matcher, render_calls("gemma4", ("get_time", bad)))


def test_open_schema_allows_any_arguments(words: Vocabulary):
    matcher = words.matcher("gemma4", [ANYTHING])
    for arguments in ({}, {"a": [1, {"b": None}], "c": "ü"}, {"a": {}, "b": [], "c": -1.5}):
        assert words.accepts(matcher, render_calls("gemma4", ("anything", arguments))), gemma4(
            arguments
        )
    assert not words.accepts(matcher, "Hi")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array"}, "parameters of the function 'f'"),
        ({"anyOf": [{}]}, "has anyOf"),
        ({"properties": {"a": {"allOf": [{}]}}}, "has allOf"),
        ({"properties": {"a,b": {}}}, "parameter 'a,b'"),
        ({"properties": {"a": {"enum": [Q]}}}, re.escape(f"value with {Q}")),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}}, "the \\$ref '#/\\$defs/a'"),
        ({"properties": {"a": {"type": "text"}}}, "the type 'text'"),
    ],
)
def test_unsupported_schema_is_rejected(words: Vocabulary, schema: Any, message: str):
    with pytest.raises(ValueError, match=message):
        words.matcher("gemma4", [Tool("f", schema)])


def test_unsupported_names_and_tokenizers_are_rejected(words: Vocabulary):
    with pytest.raises(ValueError, match="'two words' cannot be used"):
        words.matcher("gemma4", [Tool("two words")])
    with pytest.raises(ValueError, match=re.escape("no token <|tool_call>")):
        vocabulary().matcher("gemma4", [ANYTHING])
