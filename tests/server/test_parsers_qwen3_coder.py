"""Tool calls of Qwen3-Coder and Qwen3.5: parsing, arguments as JSON, streaming, and the grammar of
forced calls."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import make_parser
from strobe.server.parsers.segment import Parser
from tests.server.support.parser_runs import check_cuts, parse, places, prose, stream, values
from tests.server.support.tool_tokenizers import END, Vocabulary, allowed, vocabulary

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
            "any": {},
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
NOTHING = {"type": "string", "minLength": 2, "maxLength": 1}


def parser() -> Parser:
    return make_parser("qwen3_coder", None)


def typed() -> Parser:
    return make_parser("qwen3_coder", None, tools=[CITY, LIGHT, ANYTHING])


def wrapped(name: str, arguments: Mapping[str, Any]) -> str:
    """Render a call in the chat templates' format."""
    lines = [f"<function={name}>"]
    for key, value in arguments.items():
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
def test_template_output_is_parsed_back(
    text: str, expected_calls: list[dict[str, Any]], cuts: list[int]
):
    answer = "\n".join(
        [
            *([text] if text else []),
            *(wrapped("get_time", call_arguments) for call_arguments in expected_calls),
        ]
    )
    result = check_cuts(typed, answer, cuts)
    assert result.content == text
    assert [name for name, _ in result.calls] == ["get_time"] * len(expected_calls)
    for (_, arguments), call_arguments in zip(result.calls, expected_calls, strict=True):
        parsed = json.loads(arguments)
        assert parsed["city"] == call_arguments["city"]
        for key in call_arguments.keys() - {"city"}:  # a string that looks like a value is one
            assert parsed[key] == call_arguments[key] or isinstance(call_arguments[key], str)


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
        ("either", "null", None),
        ("either", "NULL", "NULL"),
        ("either", "nul", "nul"),
        ("either", "nullable", "nullable"),
        ("either", " None", " None"),
        ("either", "7", "7"),
        ("either", '{"a": 1}', '{"a": 1}'),
        ("any", "NaN", "NaN"),
        ("any", "None", None),
        ("any", "Rome", "Rome"),
        ("any", "[" * 200_000, "[" * 200_000),
        ("more", "[1", "[1"),
        ("more", '{"a": "</parameter></function>\\""}', {"a": '</parameter></function>"'}),
        ("more", '"</parameter> <parameter=', '"</parameter> <parameter='),
        ("unknown", "[1]", [1]),
    ],
)
def test_values_have_schema_types(key: str, text: str, value: Any):
    call = f"<tool_call>\n<function=get_time>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
    (parsed,) = (parse(typed(), [call]) if len(call) > 9999 else check_cuts(typed, call)).calls
    assert json.loads(parsed[1]) == {key: value}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string"]}, "5", "5"),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.0", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"type": ["string", "number"]}, "5", 5),
        ({"type": ["string", "number"]}, "true", "true"),
        ({"type": ["string", "boolean"]}, "True", True),
        ({"type": ["array", "null"]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "2"]}, "1", 1),
        ({"enum": [1, "2"]}, "true", "true"),
        ({"$ref": "#/$defs/Name"}, "5", "5"),
        ({"$ref": "#/properties/own/anyOf/0", "anyOf": [{"type": "string"}]}, "5", "5"),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"allOf": [{"type": ["string", "integer"]}, {"$ref": "#/$defs/Name"}]}, "5", "5"),
        ({"oneOf": [{"const": "5"}, {"type": "null"}]}, "5", "5"),
        ({"$ref": "#/$defs/none"}, "5", 5),
        ({"$ref": 5}, "5", 5),
        ({"type": "strnig"}, "5", 5),
        ({"anyOf": 5}, "5", 5),
        ([], "5", 5),
    ],
)
def test_value_type_follows_the_schema(schema: Any, text: str, value: Any):
    name = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}], "type": "string"}
    tool = Tool(
        "f", {"properties": {"own": schema}, "$defs": {"Name": name["anyOf"][0], "Loop": loop}}
    )
    call = f"<tool_call>\n<function=f>\n<parameter=own>\n{text}\n</parameter>\n</function>"
    (parsed,) = check_cuts(lambda: make_parser("qwen3_coder", None, tools=[tool]), call).calls
    assert json.loads(parsed[1]) == {"own": value}
    assert type(json.loads(parsed[1])["own"]) in (type(value), float)


@pytest.mark.parametrize("schema", [{"properties": []}, {"properties": None}, {"required": 5},
                                    {"$ref": "#"}, {"$ref": "#/no"}, {"type": 5}])  # fmt: skip
def test_tool_without_schema_accepts_any_type(schema: Any):
    call = CALL.replace("Rome", "7")
    parsed = check_cuts(
        lambda: make_parser("qwen3_coder", None, tools=[Tool("get_time", schema)]), call
    )
    assert parsed == ("", "", [("get_time", '{"city": 7}')])


@pytest.mark.parametrize(
    "value",
    [
        "<r>\n<parameter>1</parameter>\n</r>",
        "<r>\n<parameter>1</parameter> <!-- one -->\n</r>",
        "<parameter>1</parameter>",
        "end with </function> here",
        "</function>\n</parameter",
        "</function>\n</r>",
        "<parameter=city>\nOslo",
        "x\n<parameter=unknown>\n1",
        "x <parameter=zone>\n1",
        "a\r\nb\r\n",
        "</parameter> <!-- " + "x" * 300 + " -->",
    ],
)
def test_markup_inside_a_value_belongs_to_it(value: str):
    call_arguments = {"city": value, "zone": "utc"}
    ((_, arguments),) = check_cuts(typed, wrapped("get_time", call_arguments)).calls
    assert json.loads(arguments) == call_arguments


@pytest.mark.parametrize("tag", ["<parameter=zone>", "</function>", "</tool_call>", "<tool_call>"])
def test_unclosed_value_ends_at_next_tag(tag: str):
    text = f"<tool_call>\n<function=get_time>\n<parameter=city>\nRome\n</parameter>\n{tag}"
    assert check_cuts(typed, text).calls[0][1].startswith('{"city": "Rome"')
    text = text.replace("</parameter>\n", "")
    text += "\nutc\n</parameter>\n</function>\n</tool_call>" if "zone" in tag else ""
    ((_, arguments),) = check_cuts(typed, text).calls
    ends = {"<parameter=zone>": '", "zone": "utc"}', "</function>": '"}'}
    assert arguments == '{"city": "Rome' + ends.get(tag, "\\n" + tag)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot a function\n</tool_call>",
        "<tool_call>\n<function=two\nlines>\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=" + "x" * 300,
        CALL.replace("get_time", "another_tool"),
        CALL.replace("get_time", "another_tool").replace("Rome", f"{CALL}\n</r>"),
        f"{CALL.replace('get_time', 'another_tool')[:60]}",
        "Write <function=get_time>\n</function> to call.",
        "<function=name> to call.",
        "<tool_call>\n<func",
        "a <",
        " \n ",
    ],
)
def test_call_of_unknown_tool_is_unchanged_content(text: str):
    assert check_cuts(typed, text) == ("", text, [])


def test_strings_are_streamed_and_other_values_are_not():
    head = "<tool_call>\n<function=get_time>\n"
    pieces = [head, "<parameter=city>\n", "Ro", "me\n", "or", "\n</parameter>\n",
              "<parameter=hours>\n", "1", "2\n", "</parameter>\n", "<", "/function>"]  # fmt: skip
    deltas = ["".join(arguments for _, arguments in part.calls) for part in stream(typed, pieces)]
    assert deltas == [
        "",
        '{"city": "',
        "Ro",
        "me",
        "\\nor",
        "",
        '", "hours": ',
        "",
        "",
        "",
        "",
        "12}",
        "",
    ]
    pieces = [head, "<parameter=either>\n", "nul", "l and", " void", "\n</parameter>\n</function>"]
    deltas = ["".join(arguments for _, arguments in part.calls) for part in stream(typed, pieces)]
    assert deltas == ["", '{"either": ', "", '"null and', " void", '"}', ""]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", ""),
        ("\n<param", ""),
        ("\n<parameter=ci", ""),
        ("\n<parameter=city>", '{"city": "'),
        ("\n<parameter=city>\nRo", '{"city": "Ro'),
        ("\n<parameter=city>\nRome\n</para", '{"city": "Rome\\n</para'),
        ("\n<parameter=city>\nRome\n</parameter>\n", '{"city": "Rome"}'),
        ("\n<parameter=city>\nRome\n</parameter>\n</func", '{"city": "Rome"'),
        ("\n<parameter=city>\nRome\n</parameter>\n<!-- so", '{"city": "Rome"'),
        ("\n<parameter=city>\nRome\n<parameter=zo", '{"city": "Rome\\n<parameter=zo'),
        ("\n<parameter=hours>", '{"hours": '),
        ("\n<parameter=hours>\n1", '{"hours": 1'),
        ('\n<parameter=more>\n{"a": 1}\n</par', '{"more": {"a": 1}\n</par'),
        ("\n<parameter=either>\nnul", '{"either": "nul'),
        ("\n</function>\n</tool", "{}"),
    ],
)
def test_answer_ending_inside_a_call_keeps_partial_call(text: str, arguments: str):
    result = check_cuts(typed, f"<tool_call>\n<function=get_time>{text}")
    assert result == ("", "", [("get_time", arguments)])


def test_long_value_is_scanned_once():
    """Rescanning it for each character would take minutes."""
    value = json.dumps(["x"] * 30_000)
    text = f"<tool_call>\n<function=get_time>\n<parameter=more>\n{value}\n</parameter>\n</function>"
    ((_, arguments),) = parse(typed(), list(text)).calls
    assert json.loads(arguments) == {"more": ["x"] * 30_000}


@pytest.mark.parametrize("place", ["<function", "<parameter", "</function", "</tool_call", "!"])
def test_long_space_is_scanned_once(place: str):
    space = " " * 100_000
    text = f"Well.\n{CALL}!".replace(place, space + place)
    content = f"Well.{space}!" if place == "!" else "Well.!"
    assert parse(typed(), list(text)) == ("", content, [TIME])


# forced calls


@pytest.fixture(scope="module", params=[True, False], ids=["tagged", "untagged"])
def words(request: pytest.FixtureRequest) -> Vocabulary:
    return vocabulary(less=() if request.param else ("<tool_call>", "</tool_call>"))


def test_calls_allowed_by_schema_pass(words: Vocabulary):
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
        ((called, parsed),) = parse(typed(), [text]).calls
        assert (called, json.loads(parsed)) == (name, arguments)


def test_calls_violating_schema_are_blocked(words: Vocabulary):
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


@pytest.fixture(scope="module")
def tagged() -> Vocabulary:
    return vocabulary()


def held(words: Vocabulary, schema: Any, *calls_arguments: Mapping[str, Any]) -> list[bool]:
    """Whether the grammar of a forced call with that schema allows each of these arguments. Allowed
    ones must parse back to themselves."""
    tools = [Tool("f", schema)]
    matcher = words.matcher("qwen3_coder", tools)
    results = [words.accepts(matcher, wrapped("f", arguments)) for arguments in calls_arguments]
    for arguments, accepted in zip(calls_arguments, results, strict=True):
        parsed = parse(
            make_parser("qwen3_coder", None, tools=tools), [wrapped("f", arguments)]
        ).calls
        assert not accepted or [("f", arguments)] == [(n, json.loads(text)) for n, text in parsed]
    return results


@pytest.mark.parametrize(
    ("min_length", "max_length"),
    [(0, 1), (0, 40), (0, 200), (0, 1000), (50, 1000), (300, 600), (999, 1000), (1000, None)],
)
def test_string_lengths_are_enforced(tagged: Vocabulary, min_length: int, max_length: int | None):
    lengths = (
        {"minLength": min_length}
        if max_length is None
        else {"minLength": min_length, "maxLength": max_length}
    )
    schema = {"properties": {"a": {"type": "string", **lengths}}, "required": ["a"]}
    top = max_length or min_length + 100
    texts = [
        ("x" * n, ("Wörter, <b>\\n\\n<p>" * n)[:n])
        for n in {min_length, (min_length + top) // 2, top}
    ]
    assert all(held(tagged, schema, *({"a": text} for pair in texts for text in pair)))
    wrong = [{"a": "x" * (top + 1)}] * bool(max_length) + [{"a": "x" * (min_length - 1)}] * bool(
        min_length
    )
    assert not any(held(tagged, schema, *wrong))


def test_lengths_beyond_countable_maximum_are_unbounded(tagged: Vocabulary):
    schema = {"properties": {"a": {"type": "string", "minLength": 2000, "maxLength": 5000}}}
    short, good, long = ({"a": "x" * n} for n in (999, 1000, 6000))
    assert held(tagged, schema, short, good, long) == [False, True, True]


@pytest.mark.parametrize("lengths", [{}, {"maxLength": 500}])
def test_string_shorter_than_minimum_is_blocked(tagged: Vocabulary, lengths: Any):
    schema = {"properties": {"a": {"type": "string", **lengths}, "b": {"type": "string"}}}
    bad = [
        "1</parameter>2",
        "1</function>2",
        "1\n</parameter>\n2",
        "1\n<parameter=b>\n2",
        "<parameter=b>",
    ]
    assert not any(held(tagged, schema, *({"a": text} for text in bad)))
    good = ["<", "<<\n<", "a\n<p>\n</b"[: 6 if lengths else None], "1 <parameter=b>\n2", "\n\n"]
    assert all(held(tagged, schema, *({"a": text, "b": text} for text in good)))
    assert held(tagged, schema, {"a": "<svg>\n<path/>\n</svg>"}) == [not lengths]


@pytest.mark.parametrize(
    ("own", "good", "bad"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["x", '"x"', "5", None], []),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["b", ""]),
        ({"type": ["string", "null"], "minLength": 5}, ["abcde", None], ["abcd"]),
        ({"type": "string", "nullable": True, "maxLength": 3}, ["abc", None], ["abcd"]),
        ({"anyOf": [{"const": "abc"}, {"type": "string", "maxLength": 1}]}, ["abc", "a"], ["ab"]),
        ({"type": "string", "enum": ["a", 5]}, ["a"], ["5"]),
        ({"enum": ["a", "bcd"], "type": "string", "maxLength": 2}, ["a"], ["bcd"]),
        ({"allOf": [{"$ref": "#/$defs/S"}, {"minLength": 2}]}, ["ab", "abc"], ["a", "abcd"]),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/properties/z"}]}, [5, True], ["x"]),
        ({"$ref": "#/properties/z"}, [True], [5, "x"]),
        ({"type": "array", "items": {"$ref": "#/$defs/S"}}, [["abc"]], [["abcd"], [5]]),
        ({"type": "array", "items": {"$ref": "#"}}, [[{"z": True}]], [[{"z": 5}], [5]]),
        ({"type": "object"}, [{"a": "</parameter>"}, {"a": '"</parameter></function>'}], ["x", []]),
        ({"enum": ["</parameter>", 5]}, [5], ["x"]),
        ({}, ["x", 5, [1]], []),
        (True, ["x", 5, [1]], []),
    ],
)  # fmt: skip
def test_value_constraints_are_enforced(
    tagged: Vocabulary, own: Any, good: list[Any], bad: list[Any]
):
    document = {
        "type": "object",
        "properties": {"own": own, "z": {"type": "boolean"}},
        "$defs": {"S": {"type": "string", "maxLength": 3}},
    }
    assert all(held(tagged, document, *({"own": value} for value in good)))
    assert not any(held(tagged, document, *({"own": value} for value in bad)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"additionalProperties": False}, [{}], [{"a": "x"}]),
        ({"properties": {}, "additionalProperties": False}, [{}], [{"a": "x"}]),
        ({"properties": {}}, [{}, {"a": "x", "b": 5}], []),
        ({"additionalProperties": {"type": "integer"}}, [{}, {"a": 5}], [{"a": "x"}]),
        ({"required": ["a"]}, [{"a": "x"}, {"a": 5, "b": "x"}], [{}, {"b": "x"}]),
        (
            {"required": ["a"], "properties": {"b": {"type": "integer"}}},
            [{"b": 5, "a": "x"}, {"a": "x"}],
            [{"b": 5}, {"a": "x", "c": "x"}],
        ),
        (
            {"required": ["a"], "additionalProperties": {"type": "integer"}},
            [{"a": 5}],
            [{"a": "x"}, {}],
        ),
        (
            {"$ref": "#/$defs/F", "$defs": {"F": {"properties": {"a": {"type": "integer"}}}}},
            [{}, {"a": 5}],
            [{"a": "x"}, {"b": 5}],
        ),
        ({"properties": {"a": NOTHING}}, [{}], [{"a": "x"}]),
    ],
)  # fmt: skip
def test_argument_names_are_enforced(tagged: Vocabulary, schema: Any, good: Any, bad: Any):
    assert all(held(tagged, schema, *good))
    assert not any(held(tagged, schema, *bad))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"required": None}, "function 'f' has the required None; give a list"),
        ({"required": "k"}, "required 'k'"),
        ({"properties": ["k"]}, "function 'f' has the properties"),
        ({"properties": {"k": 5}}, "parameter 'k' of the function 'f' has the schema 5"),
        ({"properties": {"k": {"enum": 7}}}, "parameter 'k' of the function 'f' has the enum 7"),
        ({"properties": {"k": {"enum": "ab"}}}, "enum 'ab'"),
        ({"properties": {"k": {"type": "string", "maxLength": None}}}, "maxLength None"),
        ({"properties": {"k": {"type": "string", "maxLength": "5"}}}, "maxLength '5'"),
        ({"properties": {"k": {"type": "string", "maxLength": 5.0}}}, "maxLength 5.0"),
        ({"properties": {"k": {"type": "string", "minLength": -1}}}, "minLength -1"),
        ({"properties": {"k": {"type": "strnig"}}}, "type 'strnig'; give one of array"),
        ({"properties": {"k": {"anyOf": {}}}}, "anyOf {}; give a list"),
        ({"properties": {"k": {"items": {"$ref": "#/k"}}}}, "'f' has the .ref '#/k'"),
        ({"properties": {"k": {"$ref": "http://k"}}}, "'http://k'; give one that begins with #/"),
        ({"properties": {"k": {"$ref": "#/k"}}}, "'#/k'; give one to a schema in"),
        ({"properties": {"k": {"allOf": [{"anyOf": [{}] * 40}] * 2}}}, "more than 1000"),
        ({"properties": {"k": False}, "required": ["k"]}, "requires the parameter 'k' and allows"),
        ({"required": ["k"], "additionalProperties": False}, "requires the parameter 'k'"),
        ({"properties": {"k": NOTHING}, "required": ["k"]}, "allows no value"),
        ({"properties": {"k": {"enum": []}}, "required": ["k"]}, "allows no value"),
        ({"properties": {"k": {"enum": ["a</parameter>"]}}}, "'k' of the function 'f' is 'a</para"),
        ({"properties": {"a>b": {}}}, "name of a parameter of the function 'f' is 'a>b'"),
        ({"properties": {"a\nb": {}}}, "name of a parameter"),
        ({"properties": {" a": {}}}, "name of a parameter"),
        ({"properties": {"a" * 202: {}}}, "name of a parameter"),
        ({"anyOf": [{"required": ["k"]}]}, "function 'f' has anyOf"),
        ({"$ref": "#"}, "has .ref, which cannot be enforced"),
        ({"$ref": "#/k"}, "function 'f' has the .ref '#/k'"),
        ({"$ref": "#/$defs/k", "$defs": {"k": {"type": "string"}}}, "have the type 'string'"),
    ],
)  # fmt: skip
def test_unsupported_schema_is_rejected(tagged: Vocabulary, schema: Any, message: str):
    with pytest.raises(ValueError, match=message):
        tagged.matcher("qwen3_coder", [Tool("f", schema)])


@pytest.mark.parametrize("name", ["a>b", "a\nb", " a", "a" * 202, "<a", ""])
def test_unparsable_function_name_is_rejected(tagged: Vocabulary, name: str):
    with pytest.raises(ValueError, match="name of a function is"):
        tagged.matcher("qwen3_coder", [Tool(name)])


@pytest.mark.parametrize("name", ['say "hi"', "back\\slash", "näme", "[5]", "%json", "a" * 201])
def test_unknown_names_are_text(tagged: Vocabulary, name: str):
    tool = Tool(name, {"properties": {name: {"type": "integer"}}})
    text = wrapped(name, {name: 5})
    assert tagged.accepts(tagged.matcher("qwen3_coder", [tool]), text)
    ((called, arguments),) = check_cuts(
        lambda: make_parser("qwen3_coder", None, tools=[tool]), text
    ).calls
    assert (called, json.loads(arguments)) == (name, {name: 5})


WALKED = Tool(
    "walk",
    {
        "properties": {
            "text": {"type": "string"},
            "short": {"type": ["string", "null"], "minLength": 2, "maxLength": 6},
            "long": {"type": "string", "maxLength": 40},
            "number": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "word": {"enum": ["a", "b", None]},
            "object": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["text", "short", "long"],
    },
)


def test_accepted_text_parses_to_the_schema(tagged: Vocabulary):
    """Random answers, biased towards markup."""
    free = Tool("free", {"required": ["key"], "additionalProperties": {"type": "integer"}})
    fresh = tagged.matcher("qwen3_coder", [WALKED, free], parallel=True)
    choose, end = random.Random(0), tagged.added[END]
    traps = [
        "\n</parameter>\n",
        "<parameter=long>",
        "\n<parameter=number>\n",
        "</function>",
        '{"a": "</',
    ]
    scripts = [tagged.fast.encode(trap, add_special_tokens=False).ids for trap in traps]
    for _ in range(60):
        matcher, ids, script = fresh.deep_copy(), [], []
        while not matcher.is_stopped() and (not matcher.is_accepting() or choose.random() < 0.3):
            may = allowed(matcher)
            script = script or (list(choose.choice(scripts)) if choose.random() < 0.2 else [])
            if not script or not may[script[0]]:
                script = [
                    choose.choice([int(token) for token in np.flatnonzero(may) if token != end])
                ]
            ids.append(script.pop(0))
            assert matcher.consume_token(ids[-1])
        text = tagged.fast.decode(ids, skip_special_tokens=False)
        parsed = parse(make_parser("qwen3_coder", None, tools=[WALKED, free]), [text])
        assert parsed.content == "", text
        assert len(parsed.calls) == text.count("<tool_call>\n<function=") > 0
        for name, arguments in parsed.calls:
            read = json.loads(arguments)
            if name == "free":
                assert "key" in read
                assert all(type(value) is int for value in read.values()), text
                continue
            assert (
                {"text", "short", "long"} <= read.keys() <= WALKED.parameters["properties"].keys()
            )
            assert isinstance(read["text"], str)
            assert read["short"] is None or 2 <= len(read["short"]) <= 6, text
            assert len(read["long"]) <= 40
            assert type(read.get("number")) in (int, type(None))
            assert read.get("word") in ("a", "b", None)
            assert all(isinstance(value, str) for value in read.get("object", {}).values()), text
