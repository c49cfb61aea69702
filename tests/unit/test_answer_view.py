"""Answers on a terminal: text while they stream, Markdown when a block has ended."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from strobe.cli.answer_view import AnswerView
from strobe.server.parsers.formats import REASONING_FORMATS

WIDTH, HEIGHT = 40, 12
PROMPT = "strobe> "


class Screen:
    """The lines of a terminal after all that was written to it."""

    def __init__(self, written: str):
        self.lines, self.row, self.column = [""], 0, 0
        for escape, key, char in re.findall(r"\033\[([\d;]*)([A-Za-z])|([\s\S])", written):
            if key:
                self._move(int(escape or 1) if escape.isdecimal() or not escape else 0, key)
            elif char == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif char == "\r":
                self.column = 0
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
                self.column += 1
                assert self.column < WIDTH or char == " ", "the terminal would break the line"

    def _move(self, count: int, key: str) -> None:
        if key == "A":
            self.row -= count
            assert self.row >= 0
        elif key == "C":
            self.column += count
        elif key == "D":
            self.column -= count
        elif key in "JK":
            self.lines[self.row] = self.lines[self.row][: self.column]
            if key == "J":
                del self.lines[self.row + 1 :]

    @property
    def text(self) -> list[str]:
        return [line.rstrip() for line in self.lines]


def show(text: str, size: int, *, thinks: bool = False, height: int = HEIGHT) -> Screen:
    """Show an answer after the prompt, in pieces of `size` characters."""
    console = Console(
        force_terminal=True, file=io.StringIO(), width=WIDTH, height=height, _environ={"TERM": "x"}
    )
    view = AnswerView(console, REASONING_FORMATS["qwen3"] if thinks else None, len(PROMPT))
    view.begin("")
    for start in range(0, len(text), size):
        view.push(text[start : start + size])
    view.end()
    assert view.content.strip() == text.rpartition("</think>")[2].strip()
    return Screen(PROMPT + console.file.getvalue())


SIZES = pytest.mark.parametrize("size", [1, 3, 7, 1000])


@SIZES
def test_plain_text_stays_where_it_is(size: int):
    text = "Rows of text that are longer than one line of the screen.\n\nA second paragraph."
    assert show(text, size).text == [
        "strobe> Rows of text that are longer", "than one line of the screen.", "",
        "A second paragraph.",
    ]  # fmt: skip


@SIZES
def test_blocks_of_markdown_replace_their_text(size: int):
    text = "First *one*.\n\n* a\n* b `x<y>`\n\n  c\n\nPlain.\n\n1. one\n\n2. **two**\n"
    lines = show(text, size).text
    assert lines[:2] == ["strobe>", "First one."]
    assert "Plain." in lines
    assert not any("*" in line or "`" in line for line in lines)
    assert [line.strip() for line in lines if line.strip()] == [
        "strobe>", "First one.", "• a", "• b x<y>", "c", "Plain.", "1 one", "2 two",
    ]  # fmt: skip


@SIZES
def test_no_word_of_html_and_code_is_lost(size: int):
    code, table = "```python\nfor x in y:\n\n    print(x)\n```", "| a | b |\n|---|---|\n| 1 | 2 |"
    lines = show(f"Use <b>bold</b>:\n\n{code}\n\n{table}", size).text
    shown = " ".join(" ".join(lines).split())
    assert "<b>bold</b>" in shown
    assert "for x in y: print(x)" in shown
    assert "```" not in shown
    assert "|" not in shown
    assert [word for word in ("a", "b", "1", "2") if word in shown.split()] == ["a", "b", "1", "2"]


@SIZES
def test_thinking_stays_above_the_answer(size: int):
    lines = show("<think>\nI *think*.\n</think>\n\n**Yes.**", size, thinks=True).text
    assert lines[0] == "strobe> I *think*."
    assert [line for line in lines[1:] if line] == ["Yes."]


@SIZES
def test_block_taller_than_the_screen_stays_text(size: int):
    text = "* a\n* b\n* c\n* d\n* e\n\n**Done.**"
    lines = show(text, size, height=5).text
    assert lines[:5] == ["strobe> * a", "* b", "* c", "* d", "* e"]
    assert lines[-2:] == ["Done.", ""]
