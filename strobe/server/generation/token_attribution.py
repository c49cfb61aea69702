"""The log probabilities of the tokens of each segment of an answer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from strobe.outputs import StreamDelta
from strobe.request import TokenLogprob
from strobe.server.parsers.segment import Kind, Segment


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
