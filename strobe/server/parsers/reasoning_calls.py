"""Tool calls that end an answer's reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strobe.server.parsers.parser import CallDelta, Parser, held_back


class ReasoningCalls:
    """Finds the calls at the end of the reasoning, in reasoning that arrives in pieces.

        reasoning --marker--> trial --only calls up to the answer's end--> calls
            \\----- any other text: the marker was reasoning -----/

    Some models call tools before they end their reasoning. Text from a marker on is held back while
    it consists of calls. Line breaks before the calls are dropped.
    """

    def __init__(
        self, make: Callable[[], Parser], openers: Sequence[str], line_openers: Sequence[str]
    ):
        """make: returns a parser of calls that emits whole calls only. openers: the markers that
        begin a call; line_openers: those that do so at the beginning of a line."""
        self._make = make
        self._line_openers = tuple(line_openers)
        self._markers = (*openers, *line_openers)
        self._buffer = ""
        self._at_line_start = True  # whether the buffer begins a line
        self._trial: Parser | None = None
        self._lead = 0  # number of line breaks before the marker
        self._marker = ""
        self._fed = 0  # number of the buffer's characters that the trial has got
        self._calls: list[CallDelta] = []

    @property
    def trial(self) -> Parser | None:
        """The parser of the text that may be calls, None if there is no such text."""
        return self._trial

    def push(self, text: str) -> str:
        """Add reasoning. Returns the reasoning that is certain so far."""
        self._buffer += text
        certain: list[str] = []
        while self._trial is not None or self._find(certain):
            if self._is_calls(finished=False, cut=False):
                break
            certain.append(self._reject())
        return "".join(certain)

    def release(self) -> str:
        """Return the rest of the reasoning, after which the answer goes on."""
        self._trial = None
        self._calls = []
        return self._take(len(self._buffer))

    def finish(self, *, cut: bool) -> tuple[str, tuple[CallDelta, ...]]:
        """Return the rest of the reasoning, and the calls at the answer's end."""
        certain: list[str] = []
        while self._trial is not None or self._find(certain):
            if self._is_calls(finished=True, cut=cut):
                return "".join(certain), tuple(self._calls)
            certain.append(self._reject())
        return "".join([*certain, self.release()]), ()

    def _is_calls(self, *, finished: bool, cut: bool) -> bool:
        """Whether the text from the marker on may consist of calls, or if finished consists of
        them."""
        assert self._trial is not None
        outputs = [self._trial.push(self._buffer[self._fed :])]
        self._fed = len(self._buffer)
        if finished:
            outputs.append(self._trial.finish(cut=cut))
        for parsed in outputs:
            self._calls += parsed.calls
        other = any(parsed.content.strip() for parsed in outputs)
        return not other and (bool(self._calls) or not finished)

    def _reject(self) -> str:
        """Treat the marker as reasoning."""
        self._trial = None
        self._calls = []
        return self._take(self._lead + len(self._marker))

    def _find(self, certain: list[str]) -> bool:
        """Begin a trial at the buffer's first marker. Adds the reasoning before it to `certain`.
        Returns False if there is no marker."""
        match = min(filter(None, map(self._first, self._markers)), default=None)
        if match is None:
            keep = held_back(self._buffer, self._markers)
            text = self._buffer[: len(self._buffer) - keep].rstrip("\n")
            certain.append(self._take(len(text)))
            return False
        position, self._marker = match
        text = self._buffer[:position].rstrip("\n")
        certain.append(self._take(len(text)))
        self._lead = position - len(text)
        self._fed = self._lead
        self._trial = self._make()
        return True

    def _first(self, marker: str) -> tuple[int, str] | None:
        """Return the first position at which this marker may begin a call."""
        position = self._buffer.find(marker)
        while position >= 0 and marker in self._line_openers and not self._begins_line(position):
            position = self._buffer.find(marker, position + 1)
        return None if position < 0 else (position, marker)

    def _begins_line(self, position: int) -> bool:
        return self._buffer[position - 1] == "\n" if position else self._at_line_start

    def _take(self, count: int) -> str:
        text = self._buffer[:count]
        self._buffer = self._buffer[count:]
        if text:
            self._at_line_start = text.endswith("\n")
        return text
