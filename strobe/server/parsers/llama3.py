"""The tool call format of Llama 3: the whole answer is JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strobe.server.parsers.call_object import CallObject
from strobe.server.parsers.call_text import CallMarkers, CallText
from strobe.server.parsers.lark import call_object, marker
from strobe.server.parsers.parser import Parser, Tool

OPENER = "<|python_tag|>"
_MARKERS = CallMarkers(opener=OPENER, bare=True)


@dataclass(frozen=True)
class Llama3:
    """{"name": ..., "parameters": {...}} as the whole answer, or several of them separated by
    semicolons; with `<|python_tag|>` in front also after other text."""

    name: str = "llama3"
    keep_special: bool = True
    whole_answer: bool = False
    openers: tuple[str, ...] = (OPENER,)
    line_openers: tuple[str, ...] = ()

    def parser(
        self, tools: Sequence[Tool] = (), *, forced: bool = False, whole_calls: bool = False
    ) -> Parser:
        return CallText(
            _MARKERS,
            lambda _: CallObject("", tools, needs_arguments=True),
            forced=forced,
            whole_calls=whole_calls,
        )

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, added_tokens: Mapping[str, int]
    ) -> str:
        calls = "\n  | ".join(call_object(tool, "parameters") for tool in tools)
        tag = f"{marker(OPENER, added_tokens)}? " if OPENER in added_tokens else ""
        repeats = ' ("; " call)*' if parallel else ""
        return "\n".join((f"start: {tag}call{repeats}", f"call: {calls}"))
