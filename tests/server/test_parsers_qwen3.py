"""Thinking in `<think>` tags, alone and before tool calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsing import check_cuts, parse, places, stream, texts

from strobe.server.parsers import REASONING_FORMATS, Parsed, Parser, make_parser
from strobe.server.parsers.chain import Chain, Plain

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
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


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
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
)
def test_answer_beginning_outside_thinking(text: str, reasoning: str, content: str):
    assert check_cuts(parser, text) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("\nHm.</think>Yes.", "Hm.", "Yes."),
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("Hm.", "Hm.", ""),
        ("<thi", "<thi", ""),
        ("</think>\n\n", "", ""),
        ("", "", ""),
    ],
)
def test_answer_beginning_inside_thinking(text: str, reasoning: str, content: str):
    assert check_cuts(inside, text) == (reasoning, content, [])


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


def test_calls_are_parsed_only_after_thinking():
    def both() -> Parser:
        return make_parser("hermes", "qwen3")

    text = f"<think>\n{CALL}\n</think>\n\n{CALL}"
    assert check_cuts(both, text) == (CALL, "", [("f", "{}")])
    assert check_cuts(both, f"{CALL}\n") == ("", "", [("f", "{}")])
    assert check_cuts(both, "<think>\na\n</think>\n\n<tool") == ("a", "<tool", [])
    assert check_cuts(both, "<thin") == ("", "<thin", [])


def test_calls_held_back_in_thinking_are_parsed_at_end():
    class Late(Plain):
        def __init__(self) -> None:
            self.held = ""

        def push(self, text: str) -> Parsed:
            self.held += text
            return Parsed()

        def finish(self) -> Parsed:
            return Parsed(content=self.held)

    text = f"One. {CALL} Two."
    chain = Chain(Late(), make_parser("hermes", None))
    assert parse(chain, [text]) == ("", "One. Two.", [("f", "{}")])


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


FRAGMENTS = ("<think>", "</think>", "\n", "\n\n", "thought ", "<tool_call>", CALL, " ")


@given(texts(FRAGMENTS), st.booleans(), places)
def test_result_does_not_depend_on_chunking(text: str, opened: bool, cuts: list[int]):
    check_cuts(lambda: make_parser("hermes", "qwen3", thinking_open=opened), text, cuts)
    result = check_cuts(inside if opened else parser, text, cuts)
    output = (result.reasoning + result.content).replace("\n", "")
    framing = len("<think></think>")
    assert len(text.replace("\n", "").lstrip()) - len(output) <= framing
