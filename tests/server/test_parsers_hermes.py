"""Hermes and Qwen tool calls: calls, content, and streaming."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import make_parser
from strobe.server.parsers.segment import Parser
from tests.server.support.parser_runs import (
    arguments,
    calls,
    check_cuts,
    dumps,
    names,
    parse,
    places,
    prose,
    stream,
)

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = ("get_time", '{"city": "Rome"}')


def parser() -> Parser:
    return make_parser("hermes", None)


def forced() -> Parser:
    return make_parser("hermes", None, forced=True)


def wrapped(name: str, arguments: Any) -> str:
    """Render a call in the format of Qwen's chat template."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>'


@given(prose, calls, places)
def test_template_output_is_parsed_back(text: str, expected_calls: Any, cuts: list[int]):
    answer = "\n".join([*([text] if text else []), *(wrapped(*call) for call in expected_calls)])
    result = check_cuts(parser, answer, cuts)
    assert result.content == text
    assert result.calls == [(name, dumps(value)) for name, value in expected_calls]


def test_arguments_may_precede_name():
    text = '<tool_call>\n{"arguments": {"a": "}{\\"", "b": [1]}, "name": "f"}\n</tool_call>'
    assert check_cuts(parser, text) == ("", "", [("f", '{"a": "}{\\"", "b": [1]}')])


def test_arguments_are_the_models_raw_text():
    raw = '{ "b":1,"a" :"\\u00e9",  "a": 1e2 }'
    text = f'<tool_call>{{"name": "f", "arguments": {raw}}}</tool_call>'
    assert check_cuts(parser, text).calls == [("f", raw)]


def test_name_is_decoded_from_json():
    text = CALL.replace("get_time", 'caf\\u00e9 \\"x\\"')
    assert check_cuts(parser, text).calls == [('café "x"', TIME[1])]


def test_call_inside_broken_call_is_parsed():
    assert check_cuts(parser, f"<tool_call>\n{CALL}") == ("", "<tool_call>", [TIME])
    assert check_cuts(parser, f'<tool_call>\n{{"name": \n{CALL} end') == (
        "",
        '<tool_call>\n{"name": end',
        [TIME],
    )


def test_text_around_calls_is_content():
    text = f"One.\n{CALL}\nTwo.\n{CALL} Three."
    assert check_cuts(parser, text) == ("", "One.\nTwo. Three.", [TIME, TIME])


def test_text_after_unclosed_call_is_content():
    unclosed = CALL.removesuffix("\n</tool_call>")
    assert check_cuts(parser, f"{unclosed}\nDone.") == ("", "\nDone.", [TIME])
    assert check_cuts(parser, f"{unclosed}\n{CALL}") == ("", "", [TIME, TIME])


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1',
        '{"a": "1}',
        '{"a": [1}}',
        '{"a": 1]',
        "{a: tru}",
        '{"a": 1,}',
        '{"a": [1,]}',
        "{'a': 'x'}",
        '{"a": "\\d"}',
        '{"a": "x\\\ny"}',
        '{"a": "say "hi" now"}',
        '{"a": "5" pipe"}',
        '{"a": "echo "}"}',
        '{"a": "echo "} done"}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": 01}',
        '{"a": "x"} oops',
    ],
)
def test_call_with_wrong_json_is_content(arguments: str):
    broken = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    if arguments == '{"a": 1':
        broken = broken.replace("1}", "1")
    assert check_cuts(parser, broken) == ("", broken, [])
    assert check_cuts(parser, f"{broken}\n{CALL}") == ("", broken, [TIME])
    assert check_cuts(parser, f"{CALL}\n{broken}") == ("", f"\n{broken}", [TIME])


@pytest.mark.parametrize("control", ["\n", "\t", "\r\n", "\x01"])
def test_raw_control_character_in_a_string_is_accepted(control: str):
    raw = f'{{"path": "a{control}b\\n",\n\t"k{control}": [1]}}'
    call = f'<tool_call>\n{{"name": "f", "arguments": {raw}}}\n</tool_call>'
    ((name, arguments),) = check_cuts(parser, call).calls
    assert name == "f"
    assert json.loads(arguments) == {"path": f"a{control}b\n", f"k{control}": [1]}


@pytest.mark.parametrize(
    ("text", "expected_calls"),
    [
        ('{"name": "f"}', [("f", "{}")]),
        ('{"name": "f", "id": "1"}', [("f", "{}")]),
        ('{"name": "f", "arguments": null}', [("f", "{}")]),
        ('{"arguments": null, "name": "f"}', [("f", "{}")]),
        ('{"name": "f", "arguments": ""}', [("f", "{}")]),
        ('{"name": "f", "parameters": null}', [("f", "{}")]),
        ('{"name": "f", "arguments": "{\\"city\\": \\"X\\"}"}', [("f", '{"city": "X"}')]),
        ('{"arguments": "{\\"a\\": 1}", "name": "f"}', [("f", '{"a": 1}')]),
        ('{"name": "f", "arguments": {"a": 1},}', [("f", '{"a": 1}')]),
        ('{"name": "f"}\n{"name": "g", "arguments": {"a": 1}}', [("f", "{}"), ("g", '{"a": 1}')]),
        ('{"name": "f"}, {"name": "g"}', [("f", "{}"), ("g", "{}")]),
        ('[{"name": "f"}]', [("f", "{}")]),
        ('[\n{"name": "f"},\n {"name": "g"}\n]', [("f", "{}"), ("g", "{}")]),
        (
            '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
            [("f", '{"a": 1}')],
        ),
        ('{"function": {"name": "f"}, "type": "function"}', [("f", "{}")]),
        (
            '{"id": "1", "type": "function", '
            '"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}',
            [("f", '{"a": 1}')],
        ),
    ],
)
def test_other_forms_of_a_call_are_calls(text: str, expected_calls: list[tuple[str, str]]):
    for tagged in (f"<tool_call>\n{text}\n</tool_call>", f"<tool_call>{text}</tool_call>"):
        assert check_cuts(parser, tagged) == ("", "", expected_calls)
        assert check_cuts(parser, f"{tagged}\n{CALL}\nSo.").calls == [*expected_calls, TIME]


def test_end_tag_inside_an_argument_string_is_text():
    value = {"a": "one two", "text": "write </tool_call> and <tool_call>"}
    text = wrapped("f", value)
    assert check_cuts(parser, text).calls == [("f", dumps(value))]
    torn = check_cuts(parser, text.replace("one two", "one\ntwo"))
    assert torn.calls == [("f", dumps(value).replace("one two", "one\\ntwo"))]


@given(names, arguments, st.integers(1, 200), places)
def test_forced_call_streams_partial_arguments(name: str, value: Any, length: int, cuts: list[int]):
    text = wrapped(name, value)
    begin = text.index('"arguments": ') + len('"arguments": ')
    end = begin + min(length, len(dumps(value)))
    assert check_cuts(forced, text[:end], cuts) == ("", "", [(name, text[begin:end])])


@pytest.mark.parametrize("length", range(len("<tool_call>"), len(CALL) - len("}\n</tool_call>")))
def test_unfinished_call_is_content_and_dropped_if_cut(length: int):
    half = CALL[:length]
    assert check_cuts(parser, half) == ("", half, [])
    assert check_cuts(parser, f"{CALL}\n{half}") == ("", f"\n{half}", [TIME])
    assert parse(parser(), [half], cut=True) == ("", "", [])
    assert parse(parser(), list(f"So.\n{CALL}\n{half}"), cut=True) == ("", "So.", [TIME])


def test_cut_forced_call_leaves_no_text():
    def whole() -> Parser:
        return make_parser("hermes", None, forced=True, whole_calls=True)

    for length in range(len(CALL) - len("}\n</tool_call>")):
        assert parse(whole(), [CALL[:length]], cut=True) == ("", "", [])
    assert check_cuts(whole, CALL) == ("", "", [TIME])


@pytest.mark.parametrize("raw", ['{"a": "x\\', '{"a": 1\n</tool_c', '{"a": "x\ny</', '{"a": 1 <'])
def test_held_back_text_is_flushed_at_end(raw: str):
    text = f'<tool_call>\n{{"name": "f", "arguments": {raw}'
    assert check_cuts(parser, text) == ("", text, [])
    assert check_cuts(forced, text) == ("", "", [("f", raw)])


def test_text_is_streamed_unless_it_may_start_a_call():
    pieces = ["Hel", "lo ", "wor", "ld <", "b> <to", "ol", "_cal", "l!"]
    contents = [part.content for part in stream(parser, pieces)]
    assert contents == ["Hel", "lo", " wor", "ld", " <b>", "", "", " <tool_call!", ""]


def test_name_and_arguments_of_a_forced_call_are_streamed():
    pieces = [
        "<tool_call>\n",
        '{"name": "f"',
        ', "arguments": ',
        '{"a": ',
        '"x',
        "y",
        '"}',
        "}\n",
        "<",
    ]
    calls = [part.calls for part in stream(forced, pieces)]
    assert calls == [
        [], [], [], [("f", '{"a": ')], [("", '"x')], [("", "y")], [("", '"}')], [], [], []
    ]  # fmt: skip


def test_call_that_is_not_forced_arrives_at_its_end():
    pieces = ["<tool_call>", '{"name": "f", "arguments": {', '"a": 1', "}}", "\n", "</tool_call>"]
    calls = [part.calls for part in stream(parser, pieces)]
    assert calls == [[], [], [], [], [("f", '{"a": 1}')], [], []]


def test_phase_is_tool_between_the_tags():
    call_parser = parser()
    phases: list[tuple[str, str]] = []
    for piece in ("Hi\n", "<tool_call>", '\n{"name": "f", "arguments": {', "}}", "\n</tool_call>"):
        call_parser.push(piece)
        phases.append((piece[:4], call_parser.phase))
    assert [phase for _, phase in phases] == ["answer", "tool", "tool", "tool", "answer"]


@pytest.mark.parametrize(
    "text",
    [
        wrapped("other", {"text": CALL, "more": [CALL]}),
        wrapped("other", {"text": CALL}).removesuffix("}\n</tool_call>"),
        f'<tool_call>\n{{"arguments": {dumps({"text": CALL})}, "name": "other"}}\n</tool_call>',
        f"Look:\n{wrapped('other', {})}\n\n{wrapped('other', [])} so.",
        wrapped("other", {"text": CALL})[:70],
    ],
)
def test_call_of_unknown_tool_is_content(text: str):
    def offered() -> Parser:
        return make_parser("hermes", None, tools=[Tool("get_time")])

    assert check_cuts(offered, text) == ("", text, [])
    if text.endswith("</tool_call>"):
        assert check_cuts(offered, f"{text}\n{CALL}\n{text}") == ("", f"{text}\n{text}", [TIME])


def test_arguments_of_unknown_tool_are_streamed():
    pieces = ["<tool_call>\n", '{"name": "f"', ', "arguments": ', '{"a": ', '"x', '"}', "}\n", "a"]
    results = stream(lambda: make_parser("hermes", None, tools=[Tool("g")]), pieces)
    head = "".join(pieces[:4])
    assert [part.content for part in results] == ["", "", "", head, '"x', '"}', "}", "\na", ""]


def test_any_function_is_a_call_without_a_tool_list():
    parsed = check_cuts(parser, wrapped("never_given", {"x": [None]})).calls
    assert [(name, json.loads(raw)) for name, raw in parsed] == [("never_given", {"x": [None]})]
