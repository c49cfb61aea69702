"""Base class of the incremental readers of one tool call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from strobe.server.parsers.buffer import Buffer
from strobe.server.parsers.format_protocols import Tool

_SPACE = re.compile(r"[ \t\r\n]*")


class CallReader:
    """Reads one call from a parser's buffer, in steps. A step decides by the text alone, whatever
    part of it has arrived; it returns False if it needs more text or has set the verdict.

    name: of the function.
    begun: whether the text is certainly meant as a call; its text is then read from the buffer, and
    its arguments are emitted as they arrive. Only their end is detected.
    start, end: the range, in the answer, of the text that the last arguments were read from.
    always_valid: whether the reader writes the arguments' JSON, so that they are valid if they are
    complete; otherwise they are the model's text.
    offered: whether the tool may be called, known once the call has begun.
    verdict: "whole" at the call's end, "broken" if the text cannot continue as a call.
    """

    always_valid = False

    def __init__(self, buffer: Buffer, tools: Sequence[Tool], first: Callable[[], bool]):
        """tools: the tools that may be called, empty for any. first: the first step."""
        self.name = ""
        self.begun = False
        self.start = self.end = 0
        self.offered = True
        self.verdict: Literal["whole", "broken"] | None = None
        self._buffer = buffer
        self._tools = {tool.name: tool for tool in tools}
        self._step = first
        self._at = 0  # position in raw up to which everything was read
        self._added = ""

    @property
    def raw(self) -> str:
        """The text not read yet; all text until the call has begun."""
        return self._buffer.text

    def advance(self) -> str:
        """Read the text that has arrived. Returns what it adds to the arguments."""
        self.start = self.end
        self._added = ""
        while self.verdict is None and self._step():
            pass
        return self._added

    def finish(self, *, cut: bool) -> str:
        """Return the rest of the arguments if the answer ends inside them. cut: whether the limit
        of tokens ended it, so that more may be missing than the call's end."""
        self.start = self.end
        self._added = ""
        self._end_early(cut)
        return self._added

    def _end_early(self, cut: bool) -> None:
        """Add the rest of the arguments."""
        raise NotImplementedError

    def _set_name(self, name: str) -> None:
        self.name = name
        self.offered = not self._tools or name in self._tools

    def _begin(self, at: int) -> None:
        """Begin the call, whose arguments begin at a position in raw."""
        self.begun = True
        self.start = self.end = self._buffer.position + at

    def _add(self, arguments: str) -> None:
        """Add arguments, which were read up to `_at`."""
        self._added += arguments
        self.end = self._buffer.position + self._at

    def _drop(self, count: int) -> None:
        """Take so many characters off raw."""
        self._buffer.read(count)
        self._at = 0

    def _next(self) -> str:
        """Return the next character other than space, "" if it has not arrived."""
        raw = self._buffer.text
        space = _SPACE.match(raw, self._at)
        assert space is not None
        self._at = space.end()
        return raw[self._at : self._at + 1]

    def _whole(self) -> bool:
        self.verdict = "whole"
        return False

    def _break(self) -> bool:
        self.verdict = "broken"
        return False
