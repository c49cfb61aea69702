"""Every format's texts with their segments in order, each with the range that it was read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import make_parser
from strobe.server.parsers.segment import Parser, Segment
from tests.server.support.parser_runs import (
    check_cuts,
    check_segments,
    cut,
    join,
    parse,
    places,
    segments_of,
    texts,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": {}}}\n</tool_call>'
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
    text = f"<think>\n{thought}\n</think>\n\n" + f"\n{CALL}\n".join(parts)
    parser = make_parser("hermes", "qwen3")
    for segment in segments_of(parser, cut(text, cuts)):
        assert text[segment.start : segment.end] == segment.text
        inside = segment.start < text.index("</think>")
        assert inside == (segment.kind == "reasoning")


HERMES = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>'
LLAMA3 = '{"name": "get_time", "parameters": {"city": "Rome"}}'
GEMMA4 = '<|tool_call>call:get_time{city:<|"|>Rome<|"|>}<tool_call|>'
QWEN3_CODER = """<tool_call>
<function=get_time>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>"""
GPT_OSS = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
TURN = "<|start|>assistant"
PYTHON_TAG = "<|python_tag|>"
QUOTE = '<|"|>'

CALL_VARIANTS = {
    "hermes": [
        HERMES,
        f"{HERMES}\n\n",
        f"\n\n{HERMES}",
        HERMES.removesuffix("\n</tool_call>"),
        HERMES.removesuffix("}\n</tool_call>"),
        HERMES.removesuffix("l_call>"),
        HERMES.replace("}\n<", "\n<"),
        HERMES.replace("}\n<", "}}\n<"),
        HERMES.replace("\n", ""),
        HERMES.replace("\n", " \r\n\t "),
        HERMES.replace('"arguments"', '"parameters"'),
        HERMES.replace('{"name"', '{ "type" : "function", "id":"7", "name"'),
        HERMES.replace('"}}', '"}, "type": "function"}'),
    ],
    "llama3": [
        LLAMA3,
        f" \n{LLAMA3}\n",
        f"{PYTHON_TAG}{LLAMA3}",
        f"{PYTHON_TAG}\n{LLAMA3};",
        LLAMA3.removesuffix("}"),
        LLAMA3.replace("parameters", "arguments"),
        LLAMA3.replace('{"name"', '{"type": "function", "name"'),
        '{"parameters": {"city": "Rome"}, "name": "get_time"}',
    ],
    "gemma4": [
        GEMMA4,
        f"\n{GEMMA4}\n",
        GEMMA4.removesuffix("<tool_call|>"),
        GEMMA4.replace("{", "{ ").replace("}", " }").replace(":<", ": <"),
        GEMMA4.replace("city", f"{QUOTE}city{QUOTE}"),
        GEMMA4.replace("city", '"city"').replace(QUOTE, '"'),
        GEMMA4.replace(QUOTE, ""),
    ],
    "qwen3_coder": [
        QWEN3_CODER,
        f"{QWEN3_CODER}\n\n",
        f"\n\n{QWEN3_CODER}",
        QWEN3_CODER.replace("\n", ""),
        QWEN3_CODER.replace("<tool_call>\n", ""),
        QWEN3_CODER.removesuffix("\n</tool_call>"),
        QWEN3_CODER.removesuffix("</function>\n</tool_call>"),
        QWEN3_CODER.replace("</function>\n", ""),
        QWEN3_CODER.replace("</parameter>\n", ""),
        QWEN3_CODER.replace("\n", "\r\n"),
        QWEN3_CODER.replace("</parameter>\n", "</parameter>\n</parameter>\n"),
        QWEN3_CODER.replace("</parameter>\n", "</parameter>\n<!-- that is all -->\n"),
        QWEN3_CODER.replace("<parameter", "<!-- where? -->\n<parameter"),
        QWEN3_CODER.replace("</function>", "<parameter=city>\nOslo\n</parameter>\n</function>"),
    ],
    "gpt_oss": [
        GPT_OSS,
        GPT_OSS.removesuffix("<|call|>"),
        GPT_OSS.replace(" <|constrain|>json", ""),
        GPT_OSS.replace(" <|constrain|>", " "),
        GPT_OSS.replace("<|call|>", "<|end|>"),
        GPT_OSS.replace("functions.", ""),
        GPT_OSS.replace("commentary", "analysis"),
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        f" to=functions.f{GPT_OSS.replace(' to=functions.f', '')}",
        f"{TURN}{GPT_OSS}",
        f"\n{GPT_OSS}\n",
    ],
}
"""Texts that are one and the same call."""

NO_CALLS = {
    "hermes": [
        "<tool_call>\nnot JSON\n</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": "[]"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "Rome"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": nothing}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "name": "g", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f\n", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "\\x", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}, "parameters": {}, "name": "f"}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}, "name": ""}\n</tool_call>',
        '<tool_call>\n{"nome": "f", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "get_ti',
        '<tool_call>\n{"name": "<tool_call>',
        '<tool_call>\n{"name": "f", "arg',
        "Write <tool_call> to call.\n",
        "</tool_call>",
        "1 < 2 <tool",
        " \n ",
        "",
    ],
    "llama3": [
        '{"city": "Rome"}',
        '{"name": "Ann", "age": 31}',
        '{"name": "Ann"}',
        '{"name": ["a"]}',
        '{"type": "object", "properties": {}}',
        ' {"a": 1}; {"name": "f", "parameters": {}}',
        f"{PYTHON_TAG}print(1)",
        "{",
        "{}",
        '[{"name": "f", "parameters": {}}]',
        f"Use {LLAMA3}",
        '{"name": "get_ti',
        "<|python",
        "; x",
        f"; {LLAMA3}",
        " ",
        "",
    ],
    "gemma4": [
        "<|tool_call>",
        "<|tool_call>call:",
        "<|tool_call>call:f",
        "<|tool_call>[1]",
        "<|to",
    ],
}
"""Texts that are content as they are, although they resemble calls."""


def rows(table: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    return [(form, text) for form, texts in table.items() for text in texts]


def call_parser(form: str) -> Parser:
    return make_parser(form, form if form == "gpt_oss" else None)


@pytest.mark.parametrize(("form", "text"), rows(CALL_VARIANTS))
def test_call_variants_parse_alike(form: str, text: str):
    call = ("f", '{"a": 1}') if form == "gpt_oss" else ("get_time", '{"city": "Rome"}')
    assert check_cuts(lambda: call_parser(form), text) == ("", "", [call])


@pytest.mark.parametrize(("form", "text"), rows(NO_CALLS))
def test_non_call_is_unchanged_content(form: str, text: str):
    segments = check_segments(lambda: call_parser(form), text)
    assert segments == ([Segment("content", text, 0, len(text))] if text else [])


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
ANSWER = "<|channel|>final<|message|>Yes.<|return|>"
WRITTEN = GPT_OSS.removesuffix("<|call|>")
EMPTY = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
F = ("f", '{"a": 1}')
TIME = ("get_time", '{"city": "Rome"}')


def maker(calls: str | None, thinking: str | None, **options: Any) -> Callable[[], Parser]:
    return lambda: make_parser(calls, thinking, **options)


MAKERS = {
    "qwen3": maker(None, "qwen3"),
    "qwen3, begun in the prompt": maker(None, "qwen3", thinking_open=True),
    "hermes, qwen3": maker("hermes", "qwen3"),
    "gpt_oss": maker("openai", "openai_gptoss"),
    "gpt_oss, begun in the prompt": maker("gpt_oss", "gpt_oss", thinking_open=True),
    "gpt_oss, without tools": maker("gpt_oss", "gpt_oss", tools=None),
    "gpt_oss, without calls": maker(None, "gpt_oss"),
    "gemma4": maker("gemma4", "gemma4"),
    "qwen3_coder": maker("qwen3_coder", None),
}

# Parsers, and texts with their reasoning, content and calls.
OUTPUTS: Mapping[str, list[tuple[Any, ...]]] = {
    "qwen3": [
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think></think>Yes.", "", "Yes."),
        ("\n <think>a\n\nb</think> \nYes.\n", "a\n\nb", " \nYes.\n"),
        ("<think>\n a <b> </thin </think>", " a <b> </thin ", ""),
        ("<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
        ("<think>\nnever ends\n", "never ends\n", ""),
        ("<think>\nnever ends</thi", "never ends</thi", ""),
        ("<think>\n", "", ""),
        ("No thinking.", "", "No thinking."),
        ("\n\nNo <think>thinking</think>", "", "\n\nNo <think>thinking</think>"),
        ("no</think>", "", "no</think>"),
        ("<thin", "", "<thin"),
        (" ", "", " "),
        ("", "", ""),
    ],
    "qwen3, begun in the prompt": [
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("\nHm.</think>Yes.", "Hm.", "Yes."),
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("Hm.", "Hm.", ""),
        ("<thi", "<thi", ""),
        ("</think>\n\n", "", ""),
        ("", "", ""),
    ],
    "hermes, qwen3": [
        (f"<think>\n{EMPTY}\n</think>\n\n{EMPTY}", EMPTY, "", ("f", "{}")),
        (f"{EMPTY}\n", "", "", ("f", "{}")),
        ("<think>\na\n</think>\n\n<tool", "a", "<tool"),
        ("<thin", "", "<thin"),
    ],
    "gpt_oss": [
        (f"{THOUGHT}{TURN}{ANSWER}", "Hm.", "Yes."),
        (f"{THOUGHT}{ANSWER}", "Hm.", "Yes."),
        (f"{THOUGHT.removesuffix('<|end|>')}{TURN}{ANSWER}", "Hm.", "Yes."),
        (f"{THOUGHT}\n{TURN}{ANSWER}", "Hm.", "Yes."),
        (ANSWER.replace("final", "final <|constrain|>json"), "", "Yes."),
        ("<|channel|>final<|message|> a <|b|>\n\n", "", " a <|b|>\n\n"),
        (f"{THOUGHT}{TURN}{THOUGHT}", "Hm.\nHm.", ""),
        ("<|channel|>commentary<|message|>So:<|end|>" + TURN + ANSWER, "", "So:\nYes."),
        ("<|message|>Yes.", "", "Yes."),
        ("Plain text.", "", "Plain text."),
        (f"{THOUGHT}Yes.", "Hm.", "Yes."),
        (f"<|channel|>ana{TURN}{ANSWER}", "", "<|channel|>ana\nYes."),
        ("<", "", "<"),
        (" \n", "", " \n"),
        ("", "", ""),
        (f"{THOUGHT}<|sta", "Hm.", ""),
        (f"{THOUGHT}{TURN}", "Hm.", ""),
        (f"{THOUGHT}{TURN}<|channel|>", "Hm.", ""),
        (f"{THOUGHT}{TURN}<|channel|>fin", "Hm.", ""),
        (f"{THOUGHT}{TURN}<|channel|>final<|mess", "Hm.", ""),
        (f"{THOUGHT}{TURN}<|channel|>commentary to=functions.g", "Hm.", ""),
        (f"{THOUGHT}{TURN} to=functions.g<|channel|>comm", "Hm.", ""),
        (f"{THOUGHT}{TURN}<|channel|>commentary to=functions.g <|constrain|>js", "Hm.", ""),
        (
            f"{GPT_OSS}{TURN}<|channel|>commentary<|message|>Now.<|end|>{TURN}{GPT_OSS}",
            "", "Now.", F, F,
        ),
        (
            f"{GPT_OSS}<|start|>functions.f to=assistant<|channel|>commentary<|message|>2<|end|>",
            "", "2", F,
        ),
        (GPT_OSS.replace("1}", '"b\nc"}'), "", "", ("f", '{"a": "b\\nc"}')),
    ],
    "gpt_oss, begun in the prompt": [(f"Hm.<|end|>{TURN}{ANSWER}", "Hm.", "Yes.")],
    "gpt_oss, without tools": [(f"{THOUGHT}{TURN}{GPT_OSS}", "Hm.", f"{TURN}{WRITTEN}")],
    "gpt_oss, without calls": [(f"{THOUGHT}{TURN}{GPT_OSS}", "Hm.", f"{TURN}{WRITTEN}")],
    "gemma4": [
        (f"<|channel>thought\nHm.\n<channel|>Now. {GEMMA4}", "Hm.", "Now.", TIME),
        (f"<|channel>thought\n<channel|>{GEMMA4}", "", "", TIME),
        (f"<|channel>thought\n{GEMMA4}<channel|>x", GEMMA4, "x"),
    ],
    "qwen3_coder": [
        (f"One.\n{QWEN3_CODER}\nTwo.\n{QWEN3_CODER} Three.", "", "One.\nTwo. Three.", TIME, TIME),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "", "", ("f", "{}")),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("maker", "row"), [(maker, row) for maker, table in OUTPUTS.items() for row in table]
)
def test_text_is_parsed(maker: str, row: tuple[Any, ...]):
    text, reasoning, content, *calls = row
    assert check_cuts(MAKERS[maker], text) == (reasoning, content, calls)


FRAGMENTS = {
    "hermes": (
        HERMES,
        "<tool_call>",
        "</tool_call>",
        "\n",
        "}",
        '{"name": "f", "arguments": {"a": [1, "x\\"}"]}}',
        '{"name": ',
        '"f"',
        '"arguments": {',
        '"parameters": {"b": "y',
        ", ",
        "text",
    ),
    "llama3": (
        LLAMA3,
        PYTHON_TAG,
        "; ",
        '{"name": "f", ',
        '"parameters": {',
        '"a": "',
        '"}',
        "}",
        "\n",
        "text",
    ),
}
"""Parts of calls, of which any sequence is one text however it is cut."""

_TEXT = {"type": "string"}
_PROPERTIES = {
    "city": _TEXT,
    "either": {"anyOf": [_TEXT, {"type": "null"}]},
    "a": {"type": "array"},
}
TYPED = [Tool("get_time", {"type": "object", "properties": _PROPERTIES}), Tool("anything")]
MIXED: Mapping[str, tuple[tuple[str, ...], Sequence[Callable[[], Parser]]]] = {
    "qwen3": (
        ("<think>", "</think>", "\n", "\n\n", "thought ", "<tool_call>", EMPTY, " ", QWEN3_CODER,
         "<function=f>", "</function>"),
        [maker(form, "qwen3", thinking_open=opened)
         for form in (None, "hermes", "qwen3_coder") for opened in (False, True)],
    ),
    "gpt_oss": (
        (THOUGHT, ANSWER, GPT_OSS, TURN, "<|channel|>", "<|message|>", "<|end|>", "<|call|>",
         "<|start|>", "<|constrain|>json", "analysis", "commentary", " to=functions.f", "final",
         "\n", "text", " "),
        [maker("gpt_oss", "gpt_oss", tools=tools, thinking_open=opened)
         for tools in (None, ()) for opened in (False, True)],
    ),
    "gemma4": (
        (GEMMA4, QUOTE, "<|tool_call>call:f{", "<tool_call|>", "a:", ",", "[", "{", "}", "]",
         "text", '"', "true", "<|channel>thought\n", "<channel|>"),
        [maker("gemma4", "gemma4"), maker("gemma4", None, tools=TYPED)],
    ),
    "qwen3_coder": (
        (QWEN3_CODER, "<tool_call>\n", "<function=f>", "<function=get_time>\n", "<parameter=a>\n",
         "\n<parameter=city>\n", "<parameter=either>\r\n", "\n</parameter>", "</parameter>",
         "</function>", "</tool_call>", "text\n", "null", '{"a": "', "<!-- b -->"),
        [maker("qwen3_coder", None), maker("qwen3_coder", None, tools=TYPED)],
    ),
}  # fmt: skip
"""Parts of answers, and the parsers that read them."""


@pytest.mark.parametrize("form", MIXED)
@given(st.data(), places)
def test_segments_do_not_depend_on_chunking(form: str, data: st.DataObject, cuts: list[int]):
    fragments, makers = MIXED[form]
    text = data.draw(texts(fragments))
    for make in makers:
        check_cuts(make, text, cuts)


@given(texts(MIXED["qwen3"][0]), st.booleans())
def test_thinking_loses_markers_only(text: str, opened: bool):
    parsed = parse(make_parser(None, "qwen3", thinking_open=opened), [text])
    output = (parsed.reasoning + parsed.content).replace("\n", "")
    assert len(text.replace("\n", "").lstrip()) - len(output) <= len("<think></think>")


@pytest.mark.parametrize("form", FRAGMENTS)
@given(st.data(), places)
def test_result_does_not_depend_on_chunking(form: str, data: st.DataObject, cuts: list[int]):
    text = data.draw(texts(FRAGMENTS[form]))
    result = check_cuts(lambda: make_parser(form, None), text, cuts)
    if not result.calls:
        assert result.content == text


@pytest.mark.parametrize("form", FRAGMENTS)
@given(st.data(), places)
def test_all_is_content_when_tools_are_off(form: str, data: st.DataObject, cuts: list[int]):
    text = data.draw(texts(FRAGMENTS[form]))
    assert check_cuts(lambda: make_parser(form, None, tools=None), text, cuts) == ("", text, [])
