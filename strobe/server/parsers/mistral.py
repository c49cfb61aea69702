"""The tool call formats of Mistral's models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strobe.server.parsers.buffer import Buffer
from strobe.server.parsers.call_json import CallNamed, CallObject
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.lark import arguments, call_object, check_name, literal, marker
from strobe.server.parsers.marked_calls import MarkedCalls

OPENER = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}]{1,200}")
_HEAD = re.compile(
    rf"\s*(?P<name>{_NAME.pattern})\s*(\[CALL_ID\]\s*\w+\s*)?({re.escape(ARGS)})?\s*"
)


@dataclass(frozen=True, kw_only=True)
class Mistral(MarkedCalls):
    """`[TOOL_CALLS]`, then a list of {"name": ..., "arguments": {...}}; or, if the tokenizer has
    `[ARGS]`, `[TOOL_CALLS]name[ARGS]{...}` for each call. Both after any text."""

    name: str = "mistral"
    opener: str = OPENER
    separators: str = ",]"

    def reader(self, buffer: Buffer, tools: Sequence[Tool], *, opened: bool) -> CallReader:
        return _Call(buffer, tools)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, added_tokens: Mapping[str, int]
    ) -> str:
        opener = marker(OPENER, added_tokens)
        if ARGS not in added_tokens:
            calls = "\n  | ".join(call_object(tool, "arguments") for tool in tools)
            repeats = ' (", " call)*' if parallel else ""
            return "\n".join((f'start: {opener} " "? "[" call{repeats} "]"', f"call: {calls}"))
        for tool in tools:
            hint = "leave out spaces, brackets and braces, and give at most 200 characters"
            check_name(tool, _NAME, self.name, hint)
        number = rf"({marker(CALL_ID, added_tokens)} /[a-zA-Z0-9]{{9}}/)?"
        middle = f"{number if CALL_ID in added_tokens else ''} {marker(ARGS, added_tokens)}"
        calls = "\n  | ".join(
            f"{opener} {literal(tool.name)} {middle} {arguments(tool)}" for tool in tools
        )
        repeats = " call*" if parallel else ""
        return "\n".join((f"start: call{repeats}", f"call: {calls}"))


class _Call(CallNamed):
    """Reads a call of either style, including a list's opening bracket."""

    def __init__(self, buffer: Buffer, tools: Sequence[Tool]):
        super().__init__(buffer, _HEAD, "", tools)
        self._step = self._style

    def _style(self) -> bool:
        first = self._next()
        if not first:
            return False
        if first == "[":
            self._at += 1
        self._listed = first in "[{"
        self._step = self._brace if self._listed else self._head
        return True

    def _comma(self) -> bool:
        return CallObject._comma(self) if self._listed else super()._comma()
