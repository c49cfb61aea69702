"""The tool call format of Llama 3: the whole answer is JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strobe.server.parsers.buffer import Buffer
from strobe.server.parsers.call_json import CallObject
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.lark import call_object, marker
from strobe.server.parsers.marked_calls import MarkedCalls

OPENER = "<|python_tag|>"


@dataclass(frozen=True, kw_only=True)
class Llama3(MarkedCalls):
    """{"name": ..., "parameters": {...}} as the whole answer, or several of them separated by
    semicolons; with `<|python_tag|>` in front also after other text."""

    name: str = "llama3"
    opener: str = OPENER
    bare: bool = True

    def reader(self, buffer: Buffer, tools: Sequence[Tool], *, opened: bool) -> CallReader:
        return CallObject(buffer, "", tools, needs_arguments=True)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, added_tokens: Mapping[str, int]
    ) -> str:
        calls = "\n  | ".join(call_object(tool, "parameters") for tool in tools)
        tag = f"{marker(OPENER, added_tokens)}? " if OPENER in added_tokens else ""
        repeats = ' ("; " call)*' if parallel else ""
        return "\n".join((f"start: {tag}call{repeats}", f"call: {calls}"))
