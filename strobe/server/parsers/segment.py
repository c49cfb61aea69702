"""The output of parsers: an answer's segments, in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

Kind = Literal["reasoning", "content", "call"]
Phase = Literal["thinking", "answer", "tool"]


class Segment(NamedTuple):
    """A piece of the reasoning, the content or a call's arguments.

    text: of a call, a piece of the arguments' JSON. start, end: the range of the raw text that it
    was read from, in characters. call: the call's index in the answer. name: the function's name,
    in a call's first segment only.
    """

    kind: Kind
    text: str
    start: int
    end: int
    call: int = 0
    name: str | None = None


class Parser(Protocol):
    """Splits one answer, whose raw text arrives in pieces of any size.

    The joined segments depend only on the whole text, never on where it was cut. Text is held back
    only while it may be the beginning of a marker.
    """

    @property
    def phase(self) -> Phase:
        """The phase of the last text."""
        ...

    def begin_at(self, position: int) -> None:
        """Give the position of the first text in the answer, 0 by default."""
        ...

    def push(self, text: str) -> list[Segment]:
        """Add text. Returns the output that is certain so far, in order."""
        ...

    def finish(self, *, cut: bool = False) -> list[Segment]:
        """Return the rest of the output after the answer's end, which may be anywhere. cut: whether
        the limit of tokens ended the answer; an unfinished call is then dropped."""
        ...


def text_of(segments: Iterable[Segment], kind: Kind) -> str:
    """Return the text of all segments of a kind."""
    return "".join([segment.text for segment in segments if segment.kind == kind])


class Plain:
    """Parser of an answer that is all content."""

    phase: Phase = "answer"

    def __init__(self) -> None:
        self._position = 0

    def begin_at(self, position: int) -> None:
        self._position = position

    def push(self, text: str) -> list[Segment]:
        if not text:
            return []
        start = self._position
        self._position += len(text)
        return [Segment(kind="content", text=text, start=start, end=self._position)]

    def finish(self, *, cut: bool = False) -> list[Segment]:
        return []
