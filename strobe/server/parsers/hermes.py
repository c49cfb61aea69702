"""The tool call format of Hermes and Qwen: JSON in `<tool_call>` tags, one call in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strobe.server.parsers.buffer import Buffer
from strobe.server.parsers.call_json import CallObject
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.lark import call_object, marker
from strobe.server.parsers.marked_calls import MarkedCalls

OPENER = "<tool_call>"
CLOSER = "</tool_call>"


@dataclass(frozen=True, kw_only=True)
class Hermes(MarkedCalls):
    """`<tool_call>`, a line with {"name": ..., "arguments": {...}}, `</tool_call>`; calls on lines
    of their own, after any text. The parser accepts several objects, or a list of them, in one pair
    of tags."""

    name: str = "hermes"
    opener: str = OPENER
    closer: str = CLOSER
    separators: str = "},]"
    repeats: bool = True

    def reader(self, buffer: Buffer, tools: Sequence[Tool], *, opened: bool) -> CallReader:
        return _Call(buffer, CLOSER, tools)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, added_tokens: Mapping[str, int]
    ) -> str:
        objects = "\n  | ".join(call_object(tool, "arguments") for tool in tools)
        opener = marker(OPENER, added_tokens)
        closer = marker(CLOSER, added_tokens)
        repeats = ' ("\\n" call)*' if parallel else ""
        return "\n".join(
            (
                f"start: call{repeats}",
                f'call: {opener} "\\n" object "\\n" {closer}',
                f"object: {objects}",
            )
        )


class _Call(CallObject):
    """Reads a call, including the opening bracket of a list of calls."""

    def _brace(self) -> bool:
        if self._next() == "[":
            self._at += 1
        return super()._brace()
