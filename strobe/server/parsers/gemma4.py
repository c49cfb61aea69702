"""The tool call format of Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strobe.server.parsers.buffer import Buffer
from strobe.server.parsers.call_gemma4 import CALL, CLOSER, NAME, OPENER, QUOTE, CallGemma4
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.gemma4_values import Values
from strobe.server.parsers.lark import arguments, check_name, check_tokens, literal, marker
from strobe.server.parsers.marked_calls import MarkedCalls


@dataclass(frozen=True, kw_only=True)
class Gemma4Calls(MarkedCalls):
    """`<|tool_call>call:name{key:value,...}<tool_call|>` after any text, with strings between two
    `<|"|>`; several calls have nothing between them."""

    name: str = "gemma4"
    opener: str = OPENER
    closer: str = CLOSER

    def reader(self, buffer: Buffer, tools: Sequence[Tool], *, opened: bool) -> CallReader:
        return CallGemma4(buffer, tools)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, added_tokens: Mapping[str, int]
    ) -> str:
        check_tokens((OPENER, CLOSER, QUOTE), added_tokens, self.name)
        opener = marker(OPENER, added_tokens)
        closer = marker(CLOSER, added_tokens)
        values = Values(marker(QUOTE, added_tokens))
        calls = "\n  | ".join(_call(tool, values) for tool in tools)
        repeats = " call*" if parallel else ""
        return "\n".join(
            (
                f"start: call{repeats}",
                f"call: {opener} function {closer}",
                f"function: {calls}",
                *values.rules(),
            )
        )


def _call(tool: Tool, values: Values) -> str:
    arguments(tool)  # raises for a schema without objects
    hint = "leave out spaces, {, }, < and >, and give at most 200 characters"
    check_name(tool, NAME, "gemma4", hint)
    return f"{literal(CALL + tool.name)} {values.arguments(tool)}"
