"""Tool calls of Qwen3-Coder and Qwen3.5: what is a call, its arguments as JSON, when they come out,
and the grammar of forced calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from guided import Vocabulary, vocabulary
from hypothesis import given
from hypothesis import strategies as st
from parsing import check_cuts, parse, places, prose, stream, texts, values

from strobe.server.parsers import Parser, Tool, make_parser

CALL = """<tool_call>
<function=get_time>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>"""
TIME = ("get_time", '{"city": "Rome"}')
CITY = Tool(
    "get_time",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "zone": {"type": "string", "enum": ["utc", "local"]},
            "hours": {"type": "integer", "minimum": 1, "maximum": 9},
            "exact": {"type": "boolean"},
            "more": {"type": "object"},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "code": {"type": "string", "minLength": 2, "maxLength": 4},
            "page": {"type": "string", "maxLength": 100_000},
            "never": False,
        },
        "required": ["city"],
    },
)
LIGHT = Tool("light", {"properties": {"room": {"$ref": "#/$defs/R"}}, "required": ["room"],
                       "$defs": {"R": {"type": "array", "items": {"enum": ["hall"]}}}})  # fmt: skip
ANYTHING = Tool("anything", None)


def parser() -> Parser:
    return make_parser("qwen3_coder", None)


def typed() -> Parser:
    return make_parser("qwen3_coder", None, tools=[CITY, LIGHT, ANYTHING])


def wrapped(name: str, given: Mapping[str, Any]) -> str:
    """A call as the chat templates write it."""
    lines = [f"<function={name}>"]
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={key}>", text, "</parameter>"]
    return "\n".join(("<tool_call>", *lines, "</function>", "</tool_call>"))


@given(
    prose,
    st.lists(
        st.fixed_dictionaries(
            {"city": st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)},
            optional={
                "hours": st.integers(),
                "exact": st.booleans(),
                "more": values,
                "own": values,
            },
        ),
        max_size=3,
    ),
    places,
)
def test_what_the_template_writes_is_read_back(
    text: str, made: list[dict[str, Any]], cuts: list[int]
):
    answer = "\n".join([*([text] if text else []), *(wrapped("get_time", one) for one in made)])
    result = check_cuts(typed, answer, cuts)
    assert result.content == text
    assert [name for name, _ in result.calls] == ["get_time"] * len(made)
    for (_, arguments), one in zip(result.calls, made, strict=True):
        found = json.loads(arguments)
        assert found["city"] == one["city"]
        for key in one.keys() - {"city"}:  # a string that looks like a value is one
            assert found[key] == one[key] or isinstance(one[key], str)


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"{CALL}\n\n",
        f"\n\n{CALL}",
        CALL.replace("\n", ""),
        CALL.replace("<tool_call>\n", ""),
        CALL.removesuffix("\n</tool_call>"),
        CALL.removesuffix("</function>\n</tool_call>"),
        CALL.replace("</function>\n", ""),
        CALL.replace("</parameter>\n", ""),
    ],
)
def test_variants_of_one_call_are_that_call(text: str):
    assert check_cuts(parser, text) == ("", "", [TIME])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "7", "7"),
        ("city", "null", "null"),
        ("city", "", ""),
        ("city", " a\n\n", " a\n\n"),
        ("city", 'say "<b>"\n</param', 'say "<b>"\n</param'),
        ("zone", "utc", "utc"),
        ("hours", "7", 7),
        ("hours", "seven", "seven"),
        ("exact", "True", True),
        ("exact", "false", False),
        ("more", '{"a": [1, "b"]}', {"a": [1, "b"]}),
        ("either", "None", None),
        ("either", "Rome", "Rome"),
        ("either", "NaN", "NaN"),
        ("unknown", "[1]", [1]),
    ],
)
def test_values_are_of_the_types_of_the_schema(key: str, text: str, value: Any):
    call = f"<tool_call>\n<function=get_time>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
    (found,) = check_cuts(typed, call).calls
    assert json.loads(found[1]) == {key: value}


def test_a_call_without_arguments_has_an_empty_object():
    text = "<tool_call>\n<function=anything>\n</function>\n</tool_call>"
    assert check_cuts(typed, text) == ("", "", [("anything", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot a function\n</tool_call>",
        "<tool_call>\n<function=two\nlines>\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=" + "x" * 300,
        CALL.replace("get_time", "another_tool"),
        "Write <function=name> to call.",
        "<tool_call>\n<func",
        "a <",
        " \n ",
    ],
)
def test_what_calls_no_tool_that_was_offered_is_content_unchanged(text: str):
    assert check_cuts(typed, text) == ("", text, [])


def test_text_between_and_behind_calls_is_content():
    text = f"One.\n{CALL}\nTwo.\n{CALL} Three."
    assert check_cuts(parser, text) == ("", "One.\nTwo. Three.", [TIME, TIME])


def test_a_string_comes_out_as_it_arrives_and_other_values_at_their_end():
    head = "<tool_call>\n<function=get_time>\n"
    pieces = [head, "<parameter=city>\n", "Ro", "me\n", "or", "\n</parameter>\n",
              "<parameter=hours>\n", "1", "2\n", "</parameter>\n", "</function>"]  # fmt: skip
    given = ["".join(arguments for _, arguments in part.calls) for part in stream(typed, pieces)]
    assert given == [
        "",
        '{"city": "',
        "Ro",
        "me",
        "\\nor",
        '"',
        ', "hours": ',
        "",
        "",
        "12",
        "}",
        "",
    ]


def test_an_answer_that_ends_inside_a_call_gives_what_there_is():
    text = CALL[: CALL.index("me\n") + 2]
    assert check_cuts(typed, text).calls == [("get_time", '{"city": "Rome')]


@given(texts([CALL, "<tool_call>\n", "<function=f>", "<parameter=a>\n", "\n</parameter>",
              "</function>", "</tool_call>", "text\n"]), places)  # fmt: skip
def test_any_text_is_parsed_alike_however_it_is_cut(text: str, cuts: list[int]):
    check_cuts(parser, text, cuts)
    check_cuts(typed, text, cuts)


def test_a_long_value_is_read_once():
    """Were it read again with each character, this would take minutes."""
    value = json.dumps(["x"] * 30_000)
    text = f"<tool_call>\n<function=get_time>\n<parameter=more>\n{value}\n</parameter>\n</function>"
    ((_, arguments),) = parse(typed(), list(text)).calls
    assert json.loads(arguments) == {"more": ["x"] * 30_000}


# forced calls


@pytest.fixture(scope="module", params=[True, False], ids=["tagged", "untagged"])
def words(request: pytest.FixtureRequest) -> Vocabulary:
    return vocabulary(less=() if request.param else ("<tool_call>", "</tool_call>"))


def test_calls_that_the_schemas_allow_come_through(words: Vocabulary):
    matcher = words.matcher("qwen3_coder", [CITY, LIGHT, ANYTHING])
    for name, arguments in (
        ("get_time", {"city": "Rome\n<b>"}),
        ("get_time", {"city": "", "zone": "utc", "hours": 9, "exact": True}),
        ("get_time", {"city": "x", "more": {}, "either": None}),
        ("get_time", {"city": "x", "code": "ab\nd"}),
        ("light", {"room": ["hall", "hall"]}),
        ("anything", {}),
        ("anything", {"a": "b", "c": "d e"}),
    ):
        text = wrapped(name, arguments)
        assert words.accepts(matcher, text), text
        ((called, given),) = parse(typed(), [text]).calls
        assert (called, json.loads(given)) == (name, arguments)


def test_calls_that_the_schemas_do_not_allow_are_held_back(words: Vocabulary):
    matcher = words.matcher("qwen3_coder", [CITY, LIGHT])
    for name, arguments in (
        ("another", {"city": "Rome"}),
        ("get_time", {}),
        ("get_time", {"city": "Rome", "zone": "mars"}),
        ("get_time", {"city": "Rome", "hours": 10}),
        ("get_time", {"city": "Rome", "other": "x"}),
        ("get_time", {"city": "a</parameter>b"}),
        ("get_time", {"city": "x", "code": "a"}),
        ("get_time", {"city": "x", "code": "abcde"}),
        ("get_time", {"city": "x", "never": 1}),
        ("light", {"room": ["cellar"]}),
    ):
        assert not words.accepts(matcher, wrapped(name, arguments)), (name, arguments)
    assert not words.accepts(matcher, CALL + "\n" + CALL)
    assert not words.accepts(matcher, "Hi\n" + CALL)
    both = words.matcher("qwen3_coder", [CITY], parallel=True)
    assert words.accepts(both, CALL + "\n" + CALL)
