"""Whether a model's text gives the expected answer."""

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
    """What follows the thinking part."""
    return text.rsplit(THINK_END, 1)[-1].strip()


def boxed(text: str) -> str | None:
    """What the last box holds, its braces balanced; None without one."""
    found = None
    for match in _BOX.finditer(text):
        if match[1] is not None:
            found = match[1]
            continue
        depth, at = 1, match.end()
        while at < len(text) and depth:
            depth += (text[at] == "{") - (text[at] == "}")
            at += 2 if text[at] == "\\" else 1
        found = text[match.end() : at - 1] if depth == 0 else found
    return found


def last_number(text: str) -> Decimal | None:
    """The last number, with or without commas and a dollar sign."""
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    digits = Decimal(found[-1][1].replace(",", ""))
    return -digits if found[-1][0].startswith("-") else digits


def said(text: str) -> str | None:
    """What the last `answer is ...` or `Answer: ...` says, to the end of its sentence or line."""
    found = _SAYS.findall(text)
    return found[-1].strip().strip("*").strip() if found else None


def number(text: str, *, expected: str) -> bool:
    """GSM8K: the number in the box, behind ####, behind `answer is`, or the last one."""
    wanted = last_number(expected.rsplit("####", 1)[-1])
    text = spoken(text)
    box = boxed(text)
    if box is not None and wanted is not None and latex.same(box, str(wanted)):
        return True
    marked = text.rsplit("####", 1)[1] if "####" in text else None
    for place in (latex.plain(box) if box is not None else None, marked, said(text), text):
        if place is not None and (found := last_number(place)) is not None:
            return found == wanted
    return False


def few_shot_number(text: str, *, expected: str) -> bool:
    """GSM8K after worked examples: the number behind ####, or the last one."""
    marked = text.split("####", 1)
    found = re.search(_NUMBER, marked[1]) if len(marked) > 1 else None
    given = last_number(found[0]) if found is not None else last_number(text)
    return given is not None and given == last_number(expected.rsplit("####", 1)[-1])


def mathematics(text: str, *, expected: str) -> bool:
    """MATH: what the box holds; without one, what the text calls its answer, or the last one."""
    text = spoken(text)
    formulas = [next(part for part in found if part) for found in _MATH.findall(text)]
    for place in (boxed(text), said(text), formulas[-1] if formulas else None):
        if place is not None:
            return latex.same(place, expected)
    found = last_number(text)
    return found is not None and latex.same(str(found), expected)


def answer(text: str, *, expected: str) -> bool:
    """A user's own data: the box, what the text calls the answer, or the whole text; where a number
    is expected, the last one there."""
    text, wanted = spoken(text), expected.strip()
    place = boxed(text)
    if place is None:
        place = said(text)
    if place is None:
        place = text
    if " ".join(place.split()).rstrip(".").casefold() == " ".join(wanted.split()).casefold():
        return True
    if latex.same(place, wanted):
        return True
    if _NUMBER.fullmatch(wanted) is None:
        return False
    return last_number(place) == last_number(wanted)
