"""Runs parsers over texts cut in every way, for the tests of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from strobe.server.parsers import Parsed, Parser

Make = Callable[[], Parser]


class Result(NamedTuple):
    """A parser's joined output. calls: (name, arguments) in order."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def joined(parts: Iterable[Parsed]) -> Result:
    """Join deltas as a client does. They must be in order."""
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        reasoning += part.reasoning
        content += part.content
        for delta in part.calls:
            if delta.index == len(calls):
                assert delta.name, "a call's first delta names it"
                calls.append((delta.name, delta.arguments))
            else:
                assert delta.index == len(calls) - 1
                assert delta.name is None
                assert delta.arguments, "a later delta brings something"
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + delta.arguments)
    return Result(reasoning, content, calls)


def parse(parser: Parser, pieces: Sequence[str], *, cut: bool = False) -> Result:
    parts = [parser.push(piece) for piece in pieces]
    return joined([*parts, parser.finish(cut=cut)])


def cut(text: str, places: Iterable[int]) -> list[str]:
    """Cut a text into pieces that begin at these positions."""
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(ends)]


def check_cuts(make: Make, text: str, places: Sequence[int] = ()) -> Result:
    """Parse a text and check that the result is the same whole, cut, and character by character."""
    whole = parse(make(), [text])
    assert parse(make(), list(text)) == whole
    assert parse(make(), cut(text, places)) == whole
    assert parse(make(), ["", *cut(text, places), ""]) == whole
    return whole


def stream(make: Make, pieces: Sequence[str]) -> list[Result]:
    """Return the output for each piece, and last the output of `finish`."""
    parser = make()
    parts = [parser.push(piece) for piece in pieces]
    return [
        Result(
            part.reasoning,
            part.content,
            [(delta.name or "", delta.arguments) for delta in part.calls],
        )
        for part in (*parts, parser.finish())
    ]


def dumps(value: Any) -> str:
    """JSON in the format of chat templates."""
    return json.dumps(value, ensure_ascii=False)


names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,12}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=6), values, max_size=3)
calls = st.lists(st.tuples(names, arguments), max_size=3)
places = st.lists(st.integers(0, 10_000), max_size=12)
prose = st.text(st.characters(codec="utf-8", exclude_characters="<{"), max_size=30).map(str.strip)


def texts(fragments: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts of a format's fragments in any order, some of them truncated."""
    whole = st.sampled_from(fragments)
    short = st.tuples(whole, st.integers(0, 40)).map(lambda pair: pair[0][: pair[1]])
    noise = st.text(st.sampled_from('<>|/{}[]",:\\ \nabtk='), max_size=6)
    return st.lists(whole | short | noise, max_size=10).map("".join)
