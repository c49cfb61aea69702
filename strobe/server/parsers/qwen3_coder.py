"""The tool call format of Qwen3-Coder and Qwen3.5: tags for the function and each argument."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from strobe.server.parsers.argument_schemas import (
    Arguments,
    Form,
    is_text,
    read_arguments,
    types_of,
)
from strobe.server.parsers.buffer import Buffer
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.call_tags import (
    CLOSER,
    FUNCTION,
    FUNCTION_END,
    NAME,
    OPENER,
    PARAMETER,
    PARAMETER_END,
    CallTags,
)
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.lark import arguments, json_of, literal, marker
from strobe.server.parsers.marked_calls import MarkedCalls

MAX_COUNTED_CHARS = 1000
"""Number of characters of a string up to which a grammar counts. A larger minLength is lowered to
it; a larger maxLength is not enforced. llguidance cannot count much further."""
LINE = ">\n"
END = f"\n{PARAMETER_END}\n"

# Terminals are greedy, so TEXT and PLAIN include a value's end and exclude any other end inside it.
# llguidance cannot combine counting with a complement, so a string with lengths (PLAIN) may contain
# neither </ nor a line that begins with <pa.
_TEXT = r"""
TEXT: /(?s:.*)\n<\/parameter>\n/ & ~/(?s:.*<\/(parameter|function)>.+>\n|(.*\n)?<parameter=.*)/
PLAIN: /([^<]|<+[^<\/])*<*\n<\/parameter>\n/ & LINES
LINES: /(([^<\n].*|<([^p\n].*)?|<p([^a\n].*)?)?\n)+<\/parameter>\n/
"""
_TAGS = re.compile(f"{PARAMETER}|{PARAMETER_END}|{FUNCTION_END}")
_UNSUPPORTED = (
    "$ref", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
    "dependencies",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen3Coder(MarkedCalls):
    """`<tool_call>`, `<function=name>`, arguments as `<parameter=key>` with the value on lines of
    its own, `</function>`, `</tool_call>`; after any text. The parser accepts calls without the
    opening tag, which these models sometimes leave out."""

    name: str = "qwen3_coder"
    opener: str = OPENER
    closer: str = CLOSER
    inner: str = FUNCTION

    def reader(self, buffer: Buffer, tools: Sequence[Tool], *, opened: bool) -> CallReader:
        return CallTags(buffer, tools, opened=opened)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, added_tokens: Mapping[str, int]
    ) -> str:
        opener = marker(OPENER, added_tokens)
        closer = marker(CLOSER, added_tokens)
        repeats = ' ("\\n" call)*' if parallel else ""
        rules = [
            f"start: call{repeats}",
            f'call: {opener} "\\n" function "\\n" {closer}',
            "function: " + " | ".join(f"function_{i}" for i in range(len(tools))),
        ]
        counted: dict[str, str] = {}
        for i, tool in enumerate(tools):
            rules.append(f"function_{i}: {_function(tool, counted)}")
        return "\n".join((*rules, *counted.values(), _TEXT))


def _function(tool: Tool, counted: dict[str, str]) -> str:
    """Return a rule for a call without its outer tags, with arguments in the order of the schema.
    counted: gets the terminals that the rule needs, by name. Raises ValueError for a schema or a
    name that the format cannot represent."""
    call_arguments = read_arguments(tool)
    arguments(replace(tool, parameters=call_arguments.schema))  # raises for one without objects
    for name in _UNSUPPORTED:
        if name in call_arguments.schema:
            raise ValueError(
                f"The schema of the function {tool.name!r} has {name}, which cannot be enforced in "
                "a qwen3_coder tool call; express it by properties and required."
            )
    _check_name("function", tool.name)
    parts = [literal(f"{FUNCTION}{tool.name}{LINE}")]
    for key in dict.fromkeys((*call_arguments.properties, *call_arguments.required)):
        forms = call_arguments.forms(key)
        if forms:
            _check_name(f"parameter of the function {tool.name!r}", key)
            begin = literal(f"{PARAMETER}{key}{LINE}")
            part = f"{begin} {_value(call_arguments, key, forms, counted)}"
            parts.append(part if key in call_arguments.required else f"({part})?")
        elif key in call_arguments.required:
            raise ValueError(
                f"The schema of the function {tool.name!r} requires the parameter {key!r} and "
                "allows no value of it; allow one, or take it out of required."
            )
    undeclared = "<other>"  # a name that no parameter has
    if not call_arguments.properties and (forms := call_arguments.forms(undeclared)):
        begin = f"{literal(PARAMETER)} /{NAME.pattern}/ {literal(LINE)}"
        parts.append(f"({begin} {_value(call_arguments, undeclared, forms, counted)})*")
    return " ".join((*parts, literal(FUNCTION_END)))


def _value(
    call_arguments: Arguments, key: str, forms: Sequence[Form], counted: dict[str, str]
) -> str:
    """Return a rule for an argument's value and its end. For strings it enforces enum, const and
    lengths."""
    types = types_of(forms)
    if not is_text(types) and call_arguments.schema_of(key) not in (True, {}):
        return f"{json_of(call_arguments.standalone_schema(key))} {literal(END)}"
    alternatives = [literal(f"null{END}")] if "null" in types else []
    for form in forms:
        if "string" not in form.types:
            continue
        if form.words is not None:
            subject = f"value of the parameter {key!r} of the function {call_arguments.name!r}"
            for word in (word for word in form.words if isinstance(word, str)):
                _check(not _TAGS.search(word), subject, word, "leave out the tags of such a call")
                alternatives.append(literal(word + END))
            continue
        min_length = min(form.minimum, MAX_COUNTED_CHARS)
        max_length = form.maximum
        max_length = "" if max_length is None or max_length > MAX_COUNTED_CHARS else max_length
        if not min_length and max_length == "":
            return "TEXT"
        name = f"TEXT_{min_length}_{max_length}"
        counted[name] = rf"{name}: /(?s:.){{{min_length},{max_length}}}\n<\/parameter>\n/ & PLAIN"
        alternatives.append(name)
    return f"({' | '.join(dict.fromkeys(alternatives))})"


def _check_name(subject: str, name: str) -> None:
    hint = "leave out <, >, line breaks and space in front, and give at most 201 characters"
    _check(NAME.fullmatch(name), f"name of a {subject}", name, hint)


def _check(fits: object, subject: str, text: str, hint: str) -> None:
    """Raise ValueError, unless `fits`, for a text that the parser cannot read back."""
    if not fits:
        raise ValueError(
            f"The {subject} is {reprlib.repr(text)}, which cannot be read back from a qwen3_coder "
            f"tool call; {hint}."
        )
