"""Segments of an answer in order, and the range of the text that each was read from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strobe.server.parsers import Segment, make_parser
from tests.server.support.parser_runs import check_segments, cut, join, places, segments_of

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": {}}}\n</tool_call>'
HARMONY = "<|channel|>commentary to=functions.f<|message|>"
THINK = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
GEMMA = "<|tool_call>call:f"
CODER = "<tool_call>\n<function=f>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"

# Formats, and the segments (kind, text, raw text that it was read from); the raw texts and what
# lies between them in a row are the answer. A string alone is not part of any segment.
ANSWERS = {
    "text around calls": (
        ("hermes", "qwen3"),
        "<think>\n", ("reasoning", "Hm."), "\n</think>\n\n", ("content", "First."),
        '\n<tool_call>\n{"name": "f", "arguments": ', ("call", '{"a": {}}'),
        "}\n</tool_call>", ("content", "\nThen {}."),
        '\n<tool_call>\n{"name": "f", "arguments": ', ("call", '{"a": {}}'),
        "}\n</tool_call>",
    ),
    "the same text in reasoning and content": (
        ("hermes", "qwen3"), "<think>\n", ("reasoning", "A"), "\n\n</think>\n\n", ("content", "A"),
    ),
    "a cut marker": (
        ("hermes", "qwen3"),
        "<think>", ("reasoning", "<tool_"), "\n</think>\n", ("content", "<tool_"),
    ),
    "calls at the end of the reasoning": (
        ("hermes", "qwen3"),
        "<think>\n", ("reasoning", "Hm."), '\n<tool_call>{"name": "f", "arguments": ',
        ("call", "{}"), "}</tool_call>\n</think>\n",
    ),
    "arguments before the name": (
        ("hermes", None),
        '<tool_call>\n{"arguments": ', ("call", '{"a": 1}'), ', "name": "f"}\n</tool_call>',
    ),
    "arguments in a string": (
        ("hermes", None),
        '<tool_call>\n{"name": "f", "arguments": ', ("call", '{"a": 1}', '"{\\"a\\": 1}"'),
        "}\n</tool_call>",
    ),
    "a raw line break in arguments": (
        ("hermes", None),
        '<tool_call>{"name": "f", "arguments": ', ("call", '{"a": "\\n"}', '{"a": "\n"}'),
        "}</tool_call>",
    ),
    "missing arguments": (
        ("hermes", None), '<tool_call>{"name": "f"', ("call", "{}", ""), "}</tool_call>",
    ),
    "no arguments but null": (
        ("llama3", None), '{"name": "f", "parameters": ', ("call", "{}", "null"), "}",
    ),
    "two calls of one list": (
        ("mistral", None),
        '[TOOL_CALLS][{"name": "f", "arguments": ', ("call", '{"a": 1}'),
        '}, {"name": "f", "arguments": ', ("call", '{"a": 1}'), "}]",
    ),
    "a named call": (
        ("deepseek_v31", None), DEEPSEEK, ("call", '{"a": 1}'), "<｜tool▁call▁end｜>",
    ),
    "values in tags": (
        ("qwen3_coder", None),
        CODER,
        (
            "call", '{"a": 1, "b": "x"}',
            "\n<parameter=a>\n1\n</parameter>\n<parameter=b>x</parameter>\n</function>",
        ),
        "\n</tool_call>",
    ),
    "no values in tags": (
        ("qwen3_coder", None), CODER, ("call", "{}", "\n</function>"), "\n</tool_call>",
    ),
    "values of Gemma 4": (
        ("gemma4", None),
        GEMMA,
        ("call", '{"a": 1, "b": ["x\\"y", null]}', '{a:1,b:[<|"|>x"y<|"|>,null]}'),
        "<tool_call|>", ("content", "{a:1}"),
    ),
    "a truncated value of Gemma 4": (
        ("gemma4", None), GEMMA, ("call", '{"a": "x<|', '{a:<|"|>x<|'),
    ),
    "the same text in two channels": (
        ("gpt_oss", "gpt_oss"),
        THINK, ("reasoning", "a"), f"<|end|>{FINAL}", ("content", "a"), "<|return|>",
    ),
    "a line break between messages": (
        ("gpt_oss", "gpt_oss"), FINAL, ("content", "a"), f"<|end|>{FINAL}", ("content", "\nb", "b"),
    ),
    "a cut marker of a channel": (
        ("gpt_oss", "gpt_oss"), FINAL, ("content", "<|chan"), "<|end|>",
    ),
    "blank arguments in a channel": (
        ("gpt_oss", "gpt_oss"), HARMONY, ("call", "{}", " "), "<|call|>",
    ),
    "a raw line break in a channel": (
        ("gpt_oss", "gpt_oss"), HARMONY, ("call", '{"a": "\\n"}', '{"a": "\n"}'), "<|call|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_segments_have_the_range_of_their_text(name: str):
    formats, *parts = ANSWERS[name]
    text = ""
    expected: list[Segment] = []
    for part in parts:
        kind, shown, raw = ("", "", part) if isinstance(part, str) else (*part, part[1])[:3]
        start = len(text)
        text += raw
        if kind == "call":
            index = sum(segment.kind == "call" for segment in expected)
            expected.append(Segment(kind, shown, start, len(text), index, "f"))
        elif kind:
            expected.append(Segment(kind, shown, start, len(text)))
    assert check_segments(lambda: make_parser(*formats), text) == join(expected)


pieces_of_text = st.text(st.sampled_from("ab{}>\n é"), min_size=1, max_size=12)


@given(pieces_of_text, st.lists(pieces_of_text, max_size=3), places)
def test_segment_position_matches_raw_text(thought: str, parts: list[str], cuts: list[int]):
    text = f"<think>\n{thought}\n</think>\n\n" + f"\n{HERMES}\n".join(parts)
    parser = make_parser("hermes", "qwen3")
    for segment in segments_of(parser, cut(text, cuts)):
        assert text[segment.start : segment.end] == segment.text
        inside = segment.start < text.index("</think>")
        assert inside == (segment.kind == "reasoning")
