"""One tool call as a name and, behind it, the JSON of its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from strobe.server.parsers.base import Tool
from strobe.server.parsers.call_object import CallObject

_LONGEST_HEAD = 300


class CallNamed(CallObject):
    """Reads a head with the tool's name, then the arguments, an object of JSON; as `CallObject`
    otherwise. It has begun with the arguments' brace, which is at most 300 characters behind the
    beginning, and is whole with the last one."""

    def __init__(self, head: re.Pattern[str], closer: str = "", tools: Sequence[Tool] = ()):
        """head: what stands in front of the arguments, with the name as its group `name`."""
        super().__init__(closer, tools)
        self._pattern = head
        self._read = self._head

    def _head(self) -> bool:
        brace = self.raw.find("{", 0, _LONGEST_HEAD)
        if brace < 0:
            return False if len(self.raw) < _LONGEST_HEAD else self._break()
        head = self._pattern.fullmatch(self.raw, 0, brace)
        if head is None:
            return self._break()
        self._name_it(head["name"])
        self._at = brace
        self._read = self._arguments_begin
        return True

    def _comma(self) -> bool:
        return self._whole()
