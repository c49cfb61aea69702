"""Runs parsers over texts cut in every way, for the tests of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from strobe.server.parsers.segment import Parser, Segment, text_of

Make = Callable[[], Parser]


class Result(NamedTuple):
    """A parser's joined output. calls: (name, arguments) in order."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def join(segments: Iterable[Segment]) -> list[Segment]:
    """Join consecutive segments of one kind, or of one call, as a client does."""
    joined: list[Segment] = []
    end = 0
    for segment in segments:
        assert end <= segment.start <= segment.end, "the segments are in the order of the text"
        end = segment.end
        last = joined[-1] if joined else None
        if last is not None and (last.kind, last.call) == (segment.kind, segment.call):
            assert segment.name is None, "only a call's first segment names it"
            assert segment.text, "a later segment brings something"
            joined[-1] = last._replace(text=last.text + segment.text, end=segment.end)
        else:
            assert (segment.kind == "call") == bool(segment.name), "a call's first segment names it"
            joined.append(segment)
    return joined


def segments_of(parser: Parser, pieces: Sequence[str], *, cut: bool = False) -> list[Segment]:
    """Return the joined segments of a text in pieces."""
    segments = [segment for piece in pieces for segment in parser.push(piece)]
    segments += parser.finish(cut=cut)
    text = "".join(pieces)
    for segment in segments:
        # A parser may add a line break between two messages, which is not in the text.
        same = text[segment.start : segment.end] in (segment.text, segment.text.removeprefix("\n"))
        assert segment.kind == "call" or same
    return join(segments)


def parse(parser: Parser, pieces: Sequence[str], *, cut: bool = False) -> Result:
    return result_of(segments_of(parser, pieces, cut=cut))


def result_of(segments: Sequence[Segment]) -> Result:
    calls = [segment for segment in segments if segment.kind == "call"]
    assert [call.call for call in calls] == list(range(len(calls)))
    return Result(
        text_of(segments, "reasoning"),
        text_of(segments, "content"),
        [(call.name or "", call.text) for call in calls],
    )


def cut(text: str, places: Iterable[int]) -> list[str]:
    """Cut a text into pieces that begin at these positions."""
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(ends)]


def check_cuts(make: Make, text: str, places: Sequence[int] = ()) -> Result:
    """Parse a text and check that the result, with the ranges of its segments, is the same whole,
    cut, and character by character."""
    return result_of(check_segments(make, text, places))


def check_segments(make: Make, text: str, places: Sequence[int] = ()) -> list[Segment]:
    """Return the same as joined segments."""
    whole = segments_of(make(), [text])
    assert segments_of(make(), list(text)) == whole
    assert segments_of(make(), cut(text, places)) == whole
    assert segments_of(make(), ["", *cut(text, places), ""]) == whole
    return whole


def stream(make: Make, pieces: Sequence[str]) -> list[Result]:
    """Return the output for each piece, and last the output of `finish`."""
    parser = make()
    parts = [parser.push(piece) for piece in pieces]
    return [
        Result(
            text_of(part, "reasoning"),
            text_of(part, "content"),
            [(segment.name or "", segment.text) for segment in part if segment.kind == "call"],
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
