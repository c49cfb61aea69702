"""Incremental reader of one tool call written as a name and the JSON of its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from strobe.server.parsers.buffer import Buffer
from strobe.server.parsers.call_object import CallObject
from strobe.server.parsers.parser import Tool

_MAX_HEAD_CHARS = 300


class CallNamed(CallObject):
    """Reads a head with the tool's name, then the arguments, a JSON object; otherwise the same as
    `CallObject`. The call has begun at the arguments' first brace, which must be among the first
    300 characters, and is whole at their last brace."""

    def __init__(
        self,
        buffer: Buffer,
        head: re.Pattern[str],
        closer: str = "",
        tools: Sequence[Tool] = (),
    ):
        """head: the text before the arguments, with the tool's name as the group `name`."""
        super().__init__(buffer, closer, tools)
        self._pattern = head
        self._step = self._head

    def _head(self) -> bool:
        brace = self.raw.find("{", 0, _MAX_HEAD_CHARS)
        if brace < 0:
            return False if len(self.raw) < _MAX_HEAD_CHARS else self._break()
        head = self._pattern.fullmatch(self.raw, 0, brace)
        if head is None:
            return self._break()
        self._set_name(head["name"])
        self._at = brace
        self._step = self._arguments_begin
        return True

    def _comma(self) -> bool:
        return self._whole()
