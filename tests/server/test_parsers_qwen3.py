"""Thinking in `<think>` tags, alone and before tool calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import REASONING_FORMATS, make_parser
from strobe.server.parsers.segment import Parser
from tests.server.support.parser_runs import check_cuts, places, stream

lines = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=30)


def parser() -> Parser:
    return make_parser(None, "qwen3")


def inside() -> Parser:
    return make_parser(None, "qwen3", thinking_open=True)


@given(lines, lines, places)
def test_template_output_is_parsed_back(thought: str, answer: str, cuts: list[int]):
    thought, answer = thought.strip("\n"), answer.lstrip("\n")
    written = f"{thought}\n</think>\n\n{answer}"
    assert check_cuts(parser, f"<think>\n{written}", cuts) == (thought, answer, [])
    assert check_cuts(inside, written, cuts) == (thought, answer, [])


def test_text_is_streamed_unless_it_may_end_thinking():
    pieces = ["<thi", "nk>\nI", " see\n", "\nmore", " </", "b> </think", ">\n", "\nA", " \n"]
    parts = stream(parser, pieces)
    assert [part.reasoning for part in parts] == [
        "",
        "I",
        " see",
        "\n\nmore",
        " ",
        "</b> ",
        *[""] * 4,
    ]
    assert [part.content for part in parts] == [*[""] * 7, "A", " \n", ""]


def test_phase_follows_the_text():
    chain = make_parser("hermes", "qwen3")
    phases: list[str] = []
    for piece in ("<think>", "a", "</think>", "\n\nHi\n", "<tool_call>", "</tool_call>"):
        chain.push(piece)
        phases.append(chain.phase)
    assert phases == ["thinking", "thinking", "answer", "answer", "tool", "answer"]
    assert inside().phase == "thinking"


TAGGED = """<tool_call>
<function=read_file>
<parameter=path>
/etc/hosts
</parameter>
</function>
</tool_call>"""
READ = ("read_file", '{"path": "/etc/hosts"}')
WRITTEN = {
    "qwen3_coder": TAGGED,
    "hermes": f'<tool_call>\n{{"name": "{READ[0]}", "arguments": {READ[1]}}}\n</tool_call>',
    "mistral": f"[TOOL_CALLS]{READ[0]}[ARGS]{READ[1]}",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{READ[0]}<｜tool▁sep｜>{READ[1]}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "llama3": f'<|python_tag|>{{"name": "{READ[0]}", "parameters": {READ[1]}}}',
    "gemma4": '<|tool_call>call:read_file{path:<|"|>/etc/hosts<|"|>}<tool_call|>',
}


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("end", ["", "\n", "</think>", "\n</think>\n\n", "\n</think>\n "])
@pytest.mark.parametrize("opened", [False, True])
def test_call_at_the_end_of_the_reasoning_is_a_call(form: str, end: str, opened: bool):
    def both() -> Parser:
        return make_parser(form, "qwen3", tools=[Tool("read_file")], thinking_open=opened)

    text = ("" if opened else "<think>\n") + f"I read it.\n{WRITTEN[form]}{end}"
    assert check_cuts(both, text) == ("I read it.", "", [READ])


@pytest.mark.parametrize(
    ("thought", "rest", "expected_calls"),
    [
        (f"I read it.\n\n{TAGGED}\n{TAGGED}\n", "I read it.", [READ, READ]),
        (TAGGED, "", [READ]),
        (TAGGED.removesuffix("\n</tool_call>"), "", [READ]),
        (f"So <tool_call> it is.\n{TAGGED}", "So <tool_call> it is.", [READ]),
        (f"First {TAGGED} no.\n{TAGGED}", f"First {TAGGED} no.", [READ]),
        (f"<tool_call>\n{TAGGED}", "<tool_call>", [READ]),
        (f"Hm.\n{TAGGED.removeprefix('<tool_call>')}", "Hm.", [READ]),
        (TAGGED.replace("read_file", "other"), TAGGED.replace("read_file", "other"), []),
        ("I use <tool_call>", "I use <tool_call>", []),
        (f"{TAGGED} Now I wait.", f"{TAGGED} Now I wait.", []),
        (TAGGED[:40], TAGGED[:40], []),
    ],
)
def test_only_calls_at_the_end_of_the_reasoning_are_calls(
    thought: str, rest: str, expected_calls: list[tuple[str, str]]
):
    def both() -> Parser:
        return make_parser("qwen3_coder", "qwen3", tools=[Tool("read_file")])

    assert check_cuts(both, f"<think>\n{thought}") == (rest, "", expected_calls)


@pytest.mark.parametrize(
    "thought",
    [
        "I could write <tool_call> and </tool_call>.",
        "<tool_call>",
        f"For example\n{TAGGED}",
        f"{TAGGED}\nor so",
        TAGGED[:40],
    ],
)
def test_tags_mentioned_in_reasoning_are_reasoning(thought: str):
    def both() -> Parser:
        return make_parser("qwen3_coder", "qwen3", tools=[Tool("read_file")])

    text = f"<think>\n{thought}\n</think>\n\n"
    assert check_cuts(both, f"{text}Done.") == (thought, "Done.", [])
    assert check_cuts(both, f"{text}{TAGGED}") == (thought, "", [READ])


def test_reasoning_after_a_mentioned_tag_is_streamed():
    pieces = ["<think>\nI", " use\n", "<tool_", "call>", " for", " it", "\n", TAGGED[:30]]
    parts = stream(lambda: make_parser("qwen3_coder", "qwen3"), pieces)
    reasoning = [part.reasoning for part in parts]
    assert reasoning == [
        "I",
        " use",
        "",
        "",
        "\n<tool_call> for",
        " it",
        "",
        "",
        "\n" + TAGGED[:30],
    ]


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ],
)
def test_prompt_ending_in_opening_tag_opens_thinking(prompt: str, opened: bool):
    assert REASONING_FORMATS["qwen3"].opened_by(prompt) is opened
