"""gpt-oss answers: channels split into thinking, content and calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import REASONING_FORMATS, make_parser
from strobe.server.parsers.segment import Parser, Segment
from tests.server.support.parser_runs import (
    arguments,
    check_cuts,
    dumps,
    names,
    parse,
    places,
    stream,
)

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|channel|>final<|message|>Yes.<|return|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
TURN = "<|start|>assistant"
F = ("f", '{"a": 1}')


def parser() -> Parser:
    return make_parser("openai", "openai_gptoss")


prose = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=30)


@given(prose, prose, names, arguments, places)
def test_model_output_is_parsed_back(
    thought: str, answer: str, name: str, value: Any, cuts: list[int]
):
    text = (
        f"<|channel|>analysis<|message|>{thought}<|end|>"
        f"{TURN}<|channel|>commentary<|message|>{answer}<|end|>"
        f"{TURN}<|channel|>commentary to=functions.{name} <|constrain|>json"
        f"<|message|>{dumps(value)}<|call|>"
    )
    assert check_cuts(parser, text, cuts) == (thought, answer, [(name, dumps(value))])


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>final Hello there",
        "<|channel|>final\nHello",
        "<|channel|>" + "long " * 200,
        "to=be or not",
    ],
)
def test_malformed_header_is_content(text: str):
    assert check_cuts(parser, text) == ("", text, [])
    assert check_cuts(parser, f"{text}<|end|>{TURN}{THOUGHT}") == ("Hm.", text, [])


def test_header_without_end_is_not_held_back():
    channels = parser()
    assert channels.push("<|channel|>" + "long " * 80) == []
    text = "<|channel|>" + "long " * 160
    assert channels.push("long " * 80) == [Segment("content", text, 0, len(text))]


def test_header_limit_does_not_depend_on_chunking():
    for length in range(490, 506):
        for end in ("<|message|>x", "<|end|>x", f"{TURN}x", "<|me"):
            check_cuts(parser, "<|channel|>" + "a" * length + end)


def test_prompt_may_open_thinking():
    assert REASONING_FORMATS["gpt_oss"].opened_by(f"{TURN}<|channel|>analysis<|message|>")
    assert not REASONING_FORMATS["gpt_oss"].opened_by(TURN)
    assert make_parser("gpt_oss", "gpt_oss", thinking_open=True).phase == "thinking"


@pytest.mark.parametrize("body", ["", " ", "\n"])
def test_call_with_blank_body_has_no_arguments(body: str):
    call = CALL.replace('{"a": 1}', body)
    assert check_cuts(parser, call) == ("", "", [("f", "{}")])
    assert check_cuts(parser, call.removesuffix("<|call|>")) == ("", "", [("f", "{}")])
    assert check_cuts(parser, f"{call}{TURN}{CALL}") == ("", "", [("f", "{}"), F])
    assert parse(parser(), [call.removesuffix("<|call|>")], cut=True) == ("", "", [])


@pytest.mark.parametrize("body", ['{"a": 1,}', "{'a': 1}", '{"a": 1', "[1]", "print(1)", "null"])
def test_call_with_wrong_json_is_content(body: str):
    call = CALL.replace('{"a": 1}', body)
    written = call.removesuffix("<|call|>")
    assert check_cuts(parser, f"{THOUGHT}{TURN}{call}") == ("Hm.", TURN + written, [])
    assert check_cuts(parser, f"{call}{TURN}{CALL}") == ("", written, [F])
    assert parse(parser(), [f"{CALL}{TURN}{written}"], cut=True).content == ""


def test_text_is_streamed_and_name_of_a_forced_call_comes_with_header():
    pieces = ["<|channel|>", "analysis", "<|message|>", "H", "m <", "<|end|>", TURN]
    pieces += [
        "<|channel|>commentary to=",
        "functions.f",
        "<|message|>",
        '{"a"',
        ": 1}",
        "<|call|>",
    ]
    parts = stream(lambda: make_parser("gpt_oss", "gpt_oss", forced=True), pieces)
    assert [part.reasoning for part in parts[:6]] == ["", "", "", "H", "m ", "<"]
    assert [part.calls for part in parts[7:]] == [
        [], [], [("f", "")], [("", '{"a"')], [("", ": 1}")], [], []
    ]  # fmt: skip


def test_phase_follows_the_messages():
    channels = parser()
    phases: list[str] = []
    for piece in (THOUGHT[:-7], f"<|end|>{TURN}", CALL[:-8], "<|call|>", f"{TURN}{FINAL}"):
        channels.push(piece)
        phases.append(channels.phase)
    assert phases == ["thinking", "thinking", "tool", "tool", "answer"]


def test_call_of_unknown_tool_is_content():
    def offered() -> Parser:
        return make_parser("gpt_oss", "gpt_oss", tools=[Tool("f")])

    unknown = CALL.replace("functions.f", "functions.other").replace(
        '{"a": 1}', '{"a": "to=functions.f"}'
    )
    assert check_cuts(offered, unknown) == ("", unknown.removesuffix("<|call|>"), [])
    result = check_cuts(offered, f"{THOUGHT}{TURN}{unknown}{TURN}{CALL}")
    assert result == ("Hm.", TURN + unknown.removesuffix("<|call|>"), [F])
