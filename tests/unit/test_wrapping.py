"""Wrapping of text that streams to a terminal."""

from __future__ import annotations

import io
import random
import re

import pytest
from rich.console import Console

from strobe.terminal.wrapping import Wrapping


def screen(printed: str) -> list[str]:
    """Return the lines that a terminal shows; every character is one cell wide."""
    lines, column = [""], 0
    for code, char in re.findall(r"\x1b\[(\d*[DKm])|(.|\n)", printed):
        if code.endswith("D"):
            column -= int(code[:-1])
        elif code.endswith("K"):
            lines[-1] = lines[-1][:column]
        elif char == "\n":
            lines.append("")
            column = 0
        elif char:
            lines[-1] = lines[-1][:column] + char
            column += 1
    return lines


def terminal(width: int, *, is_terminal: bool = True) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=is_terminal, width=width, _environ={"TERM": "xterm"}
    )


def shown(text: str, width: int, column: int = 0, seed: int = 0) -> list[str]:
    """Return the screen after the text arrived in pieces."""
    wrapping, rng, printed = Wrapping(terminal(width), column), random.Random(seed), "." * column
    while text:
        size = rng.randint(1, 7)
        printed += wrapping.wrap(text[:size])
        text = text[size:]
    return screen(printed)


def test_words_move_to_the_next_line():
    text = "The quick brown fox jumps over the lazy dog"
    assert shown(text, 14) == ["The quick ", "brown fox ", "jumps over ", "the lazy dog"]
    assert shown("hello there", 14, column=8) == ["........hello", "there"]


@pytest.mark.parametrize("seed", range(20))
def test_words_stay_whole_for_any_chunking(seed: int):
    rng = random.Random(seed)
    words = ["x" * rng.randint(1, 18) for _ in range(60)]
    text = "".join(word + rng.choice(["", " ", "\n"]) * rng.randint(1, 2) for word in words)
    lines = shown(text, 20, column=rng.randint(0, 10), seed=seed)
    assert all(len(line) < 20 for line in lines)
    pieces = [word.lstrip(".") for line in lines for word in line.split()]
    shown_words = [word for word in pieces if word]
    assert "".join(shown_words) == "".join(text.split())
    if all(len(word) < 20 for word in text.split()):
        assert shown_words == text.split()


def test_long_words_are_cut_at_the_edge():
    assert shown("a " + "x" * 25, 11) == ["a ", "x" * 10, "x" * 10, "x" * 5]


def test_wide_characters_count_twice_and_break_anywhere():
    wrapping = Wrapping(terminal(8))
    assert wrapping.wrap("日本語日本") == "日本語\n日本"


def test_moved_word_keeps_its_styles():
    wrapping = Wrapping(terminal(8))
    wrapping.wrap("one two")
    assert wrapping.wrap("x", "<", ">") == "\033[3D\033[K\ntwo<x>"


def test_output_to_a_file_is_not_wrapped():
    text = "word " * 40
    assert Wrapping(terminal(10, is_terminal=False)).wrap(text) == text
