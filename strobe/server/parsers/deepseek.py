"""The tool call formats of DeepSeek-V3, -R1 and -V3.1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strobe.server.parsers.buffer import Buffer
from strobe.server.parsers.call_json import CallNamed
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.lark import arguments, check_name, literal, marker
from strobe.server.parsers.marked_calls import MarkedCalls

CALLS = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
FENCE = "\n```json\n"
FENCE_END = "\n```"

_NAME = re.compile(r"[^\s<>{}]{1,200}")
_FENCED = re.compile(rf"\s*function\s*{SEP}\s*(?P<name>{_NAME.pattern})\s*```(?:json)?\s*")
_PLAIN = re.compile(rf"\s*(?P<name>{_NAME.pattern})\s*{SEP}\s*")


@dataclass(frozen=True, kw_only=True)
class DeepSeek(MarkedCalls):
    """Consecutive calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, after any
    text. fenced: the form of V3 and R1, the word "function", the name, and the arguments in a JSON
    code fence; otherwise the form of V3.1, the name and the arguments."""

    fenced: bool
    opener: str = CALLS + CALL
    closer: str = CALL_END
    inner: str = CALL
    separators: str = "}`"
    trailer: str = CALLS_END

    def reader(self, buffer: Buffer, tools: Sequence[Tool], *, opened: bool) -> CallReader:
        return CallNamed(buffer, _FENCED if self.fenced else _PLAIN, CALL_END, tools)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, added_tokens: Mapping[str, int]
    ) -> str:
        calls, calls_end, call, call_end, sep = (
            marker(text, added_tokens) for text in (CALLS, CALLS_END, CALL, CALL_END, SEP)
        )
        alternatives: list[str] = []
        for tool in tools:
            hint = "leave out spaces, <, >, { and }, and give at most 200 characters"
            check_name(tool, _NAME, self.name, hint)
            name = literal(tool.name)
            args = arguments(tool)
            fenced = f'"function" {sep} {literal(tool.name + FENCE)} {args} {literal(FENCE_END)}'
            alternatives.append(fenced if self.fenced else f"{name} {sep} {args}")
        separator = '"\\n" ' if self.fenced else ""
        repeats = f" ({separator}call)*" if parallel else ""
        return "\n".join(
            (
                f"start: {calls} call{repeats} {calls_end}",
                f"call: {call} function {call_end}",
                "function: " + "\n  | ".join(alternatives),
            )
        )
