"""Graders: whether a model's text gives the expected answer."""

from __future__ import annotations

import re
from decimal import Decimal

from strobe.tools.eval import latex

THINK_END = "</think>"
_NUMBER = re.compile(r"(?<![\w.])(?<!\d[-,])-?\$?(\d[\d,]*(?:\.\d+)?|\.\d+)(?![\w])")
_SAYS = re.compile(
    r"(?:final answer|answer)\s*(?:is|:|=)+\s*:?\s*(.+?)(?:\.\s|$)", re.IGNORECASE | re.MULTILINE
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(\w))")
_MATH = re.compile(r"\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def spoken(text: str) -> str:
    """Return the text after the thinking part."""
    return text.rsplit(THINK_END, 1)[-1].strip()


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{}, with balanced braces; None without one."""
    answer = None
    for match in _BOX.finditer(text):
        if match[1] is not None:
            answer = match[1]
            continue
        depth = 1
        end = match.end()
        while end < len(text) and depth:
            depth += (text[end] == "{") - (text[end] == "}")
            end += 2 if text[end] == "\\" else 1
        answer = text[match.end() : end - 1] if depth == 0 else answer
    return answer


def last_number(text: str) -> Decimal | None:
    """Return the last number, which may have commas and a dollar sign."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    digits = Decimal(numbers[-1][1].replace(",", ""))
    return -digits if numbers[-1][0].startswith("-") else digits


def stated_answer(text: str) -> str | None:
    """Return the rest of the sentence or line after the last `answer is` or `Answer:`."""
    statements = _SAYS.findall(text)
    return statements[-1].strip().strip("*").strip() if statements else None


def number(text: str, *, expected: str) -> bool:
    """Grade GSM8K: the number in the box, after ####, after `answer is`, or the last one."""
    target = last_number(expected.rsplit("####", 1)[-1])
    text = spoken(text)
    box = boxed(text)
    if box is not None and target is not None and latex.same(box, str(target)):
        return True
    marked = text.rsplit("####", 1)[1] if "####" in text else None
    for place in (latex.plain(box) if box is not None else None, marked, stated_answer(text), text):
        if place is not None and (value := last_number(place)) is not None:
            return value == target
    return False


def few_shot_number(text: str, *, expected: str) -> bool:
    """Grade GSM8K after worked examples: the number after ####, or the last one."""
    marked = text.split("####", 1)
    match = re.search(_NUMBER, marked[1]) if len(marked) > 1 else None
    value = last_number(match[0]) if match is not None else last_number(text)
    return value is not None and value == last_number(expected.rsplit("####", 1)[-1])


def mathematics(text: str, *, expected: str) -> bool:
    """Grade MATH: the box; without one, the stated answer, the last formula or the last number."""
    text = spoken(text)
    formulas = [next(part for part in value if part) for value in _MATH.findall(text)]
    for place in (boxed(text), stated_answer(text), formulas[-1] if formulas else None):
        if place is not None:
            return latex.same(place, expected)
    value = last_number(text)
    return value is not None and latex.same(str(value), expected)


def answer(text: str, *, expected: str) -> bool:
    """Grade a user's own data: the box, the stated answer, or the whole text; if a number is
    expected, the last one there."""
    text = spoken(text)
    target = expected.strip()
    place = boxed(text)
    if place is None:
        place = stated_answer(text)
    if place is None:
        place = text
    if " ".join(place.split()).rstrip(".").casefold() == " ".join(target.split()).casefold():
        return True
    if latex.same(place, target):
        return True
    if _NUMBER.fullmatch(target) is None:
        return False
    return last_number(place) == last_number(target)
