"""Llama 3 tool calls: answers that are JSON calls, and similar text that is content."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import make_parser
from strobe.server.parsers.segment import Parser
from tests.server.support.parser_runs import calls, check_cuts, dumps, parse, places, stream

CALL = '{"name": "get_time", "parameters": {"city": "Rome"}}'
TIME = ("get_time", '{"city": "Rome"}')
TAG = "<|python_tag|>"


def parser() -> Parser:
    return make_parser("llama3_json", None)


@given(calls, places)
def test_template_output_is_parsed_back(expected_calls: Any, cuts: list[int]):
    answer = "; ".join(
        f'{{"name": "{name}", "parameters": {dumps(value)}}}' for name, value in expected_calls
    )
    result = check_cuts(parser, answer, cuts)
    assert result == ("", "", [(name, dumps(value)) for name, value in expected_calls])


@pytest.mark.parametrize("joint", ["; ", ";", "\n", " ;\n", f"; {TAG}", TAG])
def test_consecutive_calls_are_parsed(joint: str):
    assert check_cuts(parser, joint.join([CALL, CALL, CALL])) == ("", "", [TIME] * 3)


def test_non_call_json_is_recognized_by_first_key():
    pieces = ['{"', "na", 'ture": ', '"green"', "}"]
    assert [part.content for part in stream(parser, pieces)] == [
        "",
        "",
        '{"nature":',
        ' "green"',
        "}",
        "",
    ]
    pieces = ['{"c', 'ity": "Ro', 'me"}']
    assert [part.content for part in stream(parser, pieces)] == ['{"c', 'ity": "Ro', 'me"}', ""]


def test_call_after_text_needs_the_tag():
    assert check_cuts(parser, f"Wait. {TAG}{CALL}") == ("", "Wait.", [TIME])
    assert check_cuts(parser, f"Wait. {CALL}") == ("", f"Wait. {CALL}", [])


def test_text_after_call_is_content():
    assert check_cuts(parser, f"{CALL}; so be it") == ("", "; so be it", [TIME])
    assert check_cuts(parser, f'{CALL}; {{"x": 1}}') == ("", '; {"x": 1}', [TIME])


@pytest.mark.parametrize("form", ['"parameters": null', '"arguments": null', '"parameters": ""'])
def test_arguments_may_be_null(form: str):
    assert check_cuts(parser, f'{{"name": "f", {form}}}') == ("", "", [("f", "{}")])


def test_call_with_wrong_json_is_content():
    for arguments in ("{'a': 1}", '{"a": 1,}', '{"a": "say "hi""}', '{"a": "echo "}"}', '{"a": 1'):
        text = f'{{"name": "f", "parameters": {arguments}}}'
        assert check_cuts(parser, text[: -2 if arguments == '{"a": 1' else None]).calls == []
        if arguments != '{"a": 1':
            assert check_cuts(parser, text) == ("", text, [])


def test_cut_json_answer_stays_content():
    for text in ('{"name": "An', '{"name": "Ann", "a', "{"):
        assert parse(parser(), [text], cut=True) == ("", text, [])
    assert parse(parser(), [CALL[:40]], cut=True) == ("", "", [])


def test_arguments_of_a_forced_call_are_streamed():
    pieces = ['{"name": "f", "par', 'ameters": {"a"', ": tr", "ue", "}}"]
    forced = stream(lambda: make_parser("llama3", None, forced=True), pieces)
    assert [part.calls for part in forced] == [
        [], [("f", '{"a"')], [("", ": tr")], [("", "ue")], [("", "}")], []
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", [CALL.replace("get_time", "other"), f"{TAG}{CALL}".replace("get_time", "other")]
)
def test_call_of_unknown_tool_is_content(text: str):
    def offered() -> Parser:
        return make_parser("llama3", None, tools=[Tool("get_time")])

    for whole in (text, text.replace('"Rome"', dumps(f"{TAG}{CALL}")), f"{text}; {text}"):
        assert check_cuts(offered, whole) == ("", whole, [])
    assert check_cuts(offered, f"{CALL}; {text}") == ("", f"; {text}", [TIME])
    assert check_cuts(offered, f"{text}\n{TAG}{CALL}") == ("", text, [TIME])
