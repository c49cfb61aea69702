"""The incremental reader that all parsers share: text that arrives in pieces, and its position."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from strobe.server.parsers.segment import Kind, Segment


class Buffer:
    """The part of an answer that is no output yet.

    text: not read yet, position: of its beginning in the answer, in characters. Directly in front
    of it is the text that has been read and is kept, because it is not yet known what it is.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self._kept: list[str] = []

    @property
    def kept(self) -> str:
        """The text that has been read, without dropped and removed parts."""
        return "".join(self._kept)

    def read(self, count: int) -> None:
        """Read so many characters and keep them."""
        if count:
            self._kept.append(self.text[:count])
            self.skip(count)

    def strip(self, chars: str) -> str:
        """Read and keep such characters at the text's beginning. Returns the rest."""
        self.read(len(self.text) - len(self.text.lstrip(chars)))
        return self.text

    def skip(self, count: int) -> None:
        """Drop so many characters of the text."""
        self.text = self.text[count:]
        self.position += count

    def drop_kept(self) -> None:
        """Drop the text that is kept."""
        self._kept.clear()

    def unread(self) -> None:
        """Put the text that is kept back, so that it is read again."""
        kept = self.kept
        self.text = kept + self.text
        self.position -= len(kept)
        self._kept.clear()

    def take_kept(self) -> str:
        """Return the text that was kept, which ends at `position`."""
        kept = self.kept
        self._kept.clear()
        return kept


class StateParser:
    """Base class of parsers with states. Each state consumes a part of the buffer. It returns False
    if it needs more text."""

    def __init__(self, first: Callable[[], bool]):
        """first: the first state."""
        self._state = first
        self._buffer = Buffer()
        self._segments: list[Segment] = []

    def begin_at(self, position: int) -> None:
        """Give the position of the first text in the answer, 0 by default."""
        self._buffer.position = position

    def push(self, text: str) -> list[Segment]:
        self._buffer.text += text
        self._advance()
        return self._flush()

    def _advance(self) -> None:
        while self._state():
            pass

    def _flush(self) -> list[Segment]:
        segments = self._segments
        self._segments = []
        return segments

    def _output(self, segment: Segment) -> None:
        """Add output, to the last segment if it continues it."""
        if self._segments and segment.name is None:
            last = self._segments[-1]
            if last.end == segment.start and (last.kind, last.call) == (segment.kind, segment.call):
                self._segments[-1] = last._replace(text=last.text + segment.text, end=segment.end)
                return
        self._segments.append(segment)

    def _extend(self, segments: list[Segment]) -> None:
        """Add the output of another parser."""
        for segment in segments:
            self._output(segment)

    def _output_kept(self, kind: Kind, separator: str = "") -> None:
        """Output the text that is kept as it is. separator: written in front of it, in a segment of
        its own, since the answer does not have it."""
        text = self._buffer.take_kept()
        end = self._buffer.position
        segment = Segment(kind=kind, text=separator + text, start=end - len(text), end=end)
        if separator:
            self._segments.append(segment)
        else:
            self._output(segment)


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Return the number of characters at a text's end that may begin one of the markers, or are one
    that is shorter than others."""
    longest, beginning = _beginning_of(markers)
    match = beginning.search(text, max(0, len(text) - longest))
    return len(text) - match.start() if match else 0


def find_first(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the position of the first marker in a text, and that marker."""
    match = _one_of(markers).search(text)
    return (match.start(), match[0]) if match else None


@lru_cache(maxsize=256)
def _one_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers))))


@lru_cache(maxsize=256)
def _beginning_of(markers: tuple[str, ...]) -> tuple[int, re.Pattern[str]]:
    """Return a pattern for a marker's beginning at a text's end, and its length."""
    longest = max(map(len, markers)) - 1
    beginnings = {marker[:count] for marker in markers for count in range(1, longest + 1)}
    longest_first = sorted(beginnings, key=len, reverse=True)
    alternatives = "|".join(map(re.escape, longest_first)) or "(?!)"
    return longest, re.compile(rf"(?:{alternatives})\Z")
