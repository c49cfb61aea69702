"""Base class of the incremental readers of one tool call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from strobe.server.parsers.parser import Tool

_SPACE = re.compile(r"[ \t\r\n]*")


class CallReader:
    """Reads one call in steps. A step decides by the text alone, not by how much has arrived; it
    returns False if it needs more text or has set the verdict.

    name: of the function.
    begun: whether the text is certainly meant as a call; its arguments are then emitted as they
    arrive. Only their end is detected.
    always_valid: whether the reader writes the arguments' JSON, so that they are valid if they are
    complete; otherwise they are the model's text.
    offered: whether the tool may be called, known once the call has begun.
    verdict: "whole" at the call's end, "broken" if the text cannot continue as a call.
    raw: the text not read yet; all text until the call has begun.
    """

    always_valid = False

    def __init__(self, tools: Sequence[Tool], first: Callable[[], bool]):
        """tools: the tools that may be called, empty for any. first: the first step."""
        self.name = ""
        self.begun = False
        self.offered = True
        self.verdict: Literal["whole", "broken"] | None = None
        self.raw = ""
        self._tools = {tool.name: tool for tool in tools}
        self._read = first
        self._at = 0  # position in raw up to which everything was read
        self._added = ""

    def push(self, text: str) -> str:
        """Add text. Returns what it adds to the arguments."""
        self.raw += text
        self._added = ""
        while self.verdict is None and self._read():
            pass
        return self._added

    def finish(self, *, cut: bool) -> str:
        """Return the rest of the arguments if the answer ends inside them. cut: whether the limit
        of tokens ended it, so that more may be missing than the call's end."""
        raise NotImplementedError

    def _set_name(self, name: str) -> None:
        self.name = name
        self.offered = not self._tools or name in self._tools

    def _next(self) -> str:
        """Return the next character other than space, "" if it has not arrived."""
        space = _SPACE.match(self.raw, self._at)
        assert space is not None
        self._at = space.end()
        return self.raw[self._at : self._at + 1]

    def _whole(self) -> bool:
        self.verdict = "whole"
        return False

    def _break(self) -> bool:
        self.verdict = "broken"
        return False
