"""Tool calls as Qwen3-Coder and Qwen3.5 write them: tags for the function and for each argument."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strobe.server.parsers.base import Parser, Tool
from strobe.server.parsers.call_tags import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    CallTags,
    is_text,
)
from strobe.server.parsers.call_text import CallText
from strobe.server.parsers.lark import arguments, literal, marker

LONGEST = 1000
"""Characters of a string up to which a grammar counts."""
OPENER, CLOSER, LINE = "<tool_call>", "</tool_call>", "\n"


@dataclass(frozen=True)
class Qwen3Coder:
    """`<tool_call>`, `<function=name>`, arguments as `<parameter=key>` with the value on lines of
    its own, `</function>`, `</tool_call>`; behind any text. A call may lack the opener, as these
    models' do at times."""

    name: str = "qwen3_coder"
    keep_special: bool = True
    whole_answer: bool = False

    def parser(self, tools: Sequence[Tool] = ()) -> Parser:
        return CallText(
            OPENER, CLOSER, lambda opened: CallTags(tools, opened=opened), inner=FUNCTION
        )

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        parallel: bool,
        added_tokens: Mapping[str, int],
        lead: str = "",
    ) -> str:
        opener, closer = marker(OPENER, added_tokens), marker(CLOSER, added_tokens)
        more = ' ("\\n" call)*' if parallel else ""
        rules = [
            f"start: {literal(lead)} call{more}",
            f'call: {opener} "\\n" function "\\n" {closer}',
            "function: " + " | ".join(f"function_{i}" for i in range(len(tools))),
            # With its end, since a terminal is as long as it can be; and no end inside it.
            r"TEXT: /(?s:.*)\n<\/parameter>\n/ & ~/(?s:.*)<\/(parameter|function)>(?s:.+)>\n/",
        ]
        texts: set[str] = set()
        for i, tool in enumerate(tools):
            rules.append(f"function_{i}: {_function(tool, texts)}")
        return "\n".join((*rules, *sorted(texts)))


def _function(tool: Tool, texts: set[str]) -> str:
    """A rule for a call without its outer tags; arguments in the order of the schema. texts: takes
    up the terminals that it needs."""
    arguments(tool)  # raises where there can be none
    schema: dict[str, Any] = dict(tool.parameters or {})
    parts = [literal(f"{FUNCTION}{tool.name}>{LINE}")]
    properties: Mapping[str, Any] = schema.get("properties") or {}
    for key, own in properties.items():
        if own is False:  # an argument that may not be
            continue
        part = f"{literal(f'{PARAMETER}{key}>' + LINE)} {_value(tool, key, own, texts)}"
        parts.append(part if key in schema.get("required", ()) else f"({part})?")
    if not properties:
        parts.append(f"({literal(PARAMETER)} /[^<>\\s][^<>\\n]*/ {literal('>' + LINE)} TEXT)*")
    return " ".join((*parts, literal(FUNCTION_END)))


def _value(tool: Tool, key: str, own: Any, texts: set[str]) -> str:
    """A rule for an argument's value and its end. Of strings, enum, const and lengths are held."""
    end = literal(f"{LINE}{PARAMETER_END}{LINE}")
    if not is_text(tool, key):
        schema = tool.parameters or {}
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        own = {**shared, **own} if isinstance(own, Mapping) else own
        return f"%json {json.dumps(own)} {end}"
    words = own.get("enum", [own["const"]] if "const" in own else None)
    if words is not None:
        return f"({' | '.join(literal(str(word)) for word in words)}) {end}"
    least, most = min(own.get("minLength", 0), LONGEST), own.get("maxLength", "")
    most = "" if most == "" or most > LONGEST else most
    if not least and most == "":
        return "TEXT"
    name = f"TEXT_{least}_{most}"
    texts.add(rf"{name}: /(?s:.){{{least},{most}}}\n<\/parameter>\n/ & TEXT")
    return name
