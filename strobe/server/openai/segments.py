"""An answer's parts in the order of the text, and the tokens of each part.

A parser returns the reasoning, content and calls in a piece of text, but not their order.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from strobe.outputs import StreamDelta
from strobe.request import TokenLogprob
from strobe.server.parsers import Parsed, Parser, Phase
from strobe.server.parsers.parser import join

Kind = Literal["reasoning", "content", "call"]

_PLAIN = re.compile(r"[^<>{}]+")
"""Text in which no marker or call can begin or end."""


class Segment(NamedTuple):
    """A piece of the reasoning, the content or a call's arguments.

    start, end: its range in the raw text, in characters. call: index of the call in the answer.
    name: the function's name, in a call's first segment.
    """

    kind: Kind
    text: str
    start: int
    end: int
    call: int = 0
    name: str | None = None


class OrderedParser:
    """A parser that also records its results as segments.

    Consecutive segments of one kind, joined, do not depend on how the text was cut. Plain text
    goes to the parser in pieces, all else character by character, so each piece has one kind.
    """

    def __init__(self, parser: Parser):
        self._parser = parser
        self._fed = 0
        self._raw = ""  # the text since the parser's last output
        self._segments: list[Segment] = []

    @property
    def phase(self) -> Phase:
        return self._parser.phase

    def push(self, text: str) -> Parsed:
        parts: list[Parsed] = []
        start = 0
        while start < len(text):
            plain = None if self._raw else _PLAIN.match(text, start)
            end = plain.end() if plain else start + 1
            parts.append(self._push(text[start:end]))
            start = end
        return join(parts)

    def finish(self, *, cut: bool = False) -> Parsed:
        return self._record(self._parser.finish(cut=cut))

    def take(self) -> list[Segment]:
        """Return the segments since the last call."""
        segments = self._segments
        self._segments = []
        return segments

    def _push(self, piece: str) -> Parsed:
        self._raw += piece
        self._fed += len(piece)
        return self._record(self._parser.push(piece))

    def _record(self, parsed: Parsed) -> Parsed:
        if parsed.reasoning:
            self._add("reasoning", parsed.reasoning)
        if parsed.content:
            self._add("content", parsed.content)
        for delta in parsed.calls:
            self._add("call", delta.arguments, delta.index, delta.name)
        return parsed

    def _add(self, kind: Kind, text: str, call: int = 0, name: str | None = None) -> None:
        start, end = self._locate(text)
        last = self._segments[-1] if self._segments else None
        if last is not None and (last.kind, last.end, last.call) == (kind, start, call):
            self._segments[-1] = last._replace(text=last.text + text, end=end)
        else:
            self._segments.append(
                Segment(kind=kind, text=text, start=start, end=end, call=call, name=name)
            )

    def _locate(self, text: str) -> tuple[int, int]:
        """Return the range of the parser's last output in the raw text: its last occurrence, which
        is after any marker. Cut or repeated markers may make it too early."""
        begin = self._fed - len(self._raw)
        # A parser may add a line break between two messages that is not in the raw text.
        for shown in (text, text.removeprefix("\n")):
            offset = self._raw.rfind(shown)
            if shown and offset >= 0:
                self._raw = self._raw[offset + len(shown) :]
                return begin + offset, begin + offset + len(shown)
        return begin, begin


@dataclass
class _Token:
    """A token. start, end: the range of its text, in characters. last_kind: the kind of the last
    segment that it was attributed to."""

    start: int
    end: int
    logprob: TokenLogprob | None
    last_kind: Kind | None = None


class TokenAttribution:
    """Attributes tokens to segments."""

    def __init__(self) -> None:
        self._tokens: deque[_Token] = deque()
        self._end = 0

    def add(self, delta: StreamDelta) -> None:
        """Add a step's tokens."""
        for i, piece in enumerate(delta.pieces):
            start = self._end
            self._end += len(piece)
            logprob = delta.logprobs[i] if i < len(delta.logprobs) else None
            self._tokens.append(_Token(start=start, end=self._end, logprob=logprob))

    def tokens_of(self, segment: Segment) -> list[TokenLogprob | None]:
        """Return the log probabilities of the tokens with text in a segment, in order. Must be
        called for each segment in order.

        A token with text in two segments of a kind belongs to the first. A token without text,
        such as the first bytes of a character, belongs to the segment of the next text.
        """
        logprobs: list[TokenLogprob | None] = []
        while self._tokens and self._tokens[0].start < segment.end:
            token = self._tokens[0]
            if max(token.end, token.start + 1) > segment.start and token.last_kind != segment.kind:
                logprobs.append(token.logprob)
                token.last_kind = segment.kind
            if token.end > segment.end:
                break
            self._tokens.popleft()
        return logprobs
