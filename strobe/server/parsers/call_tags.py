"""One tool call written in tags, read while it is being written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from strobe.server.parsers.base import Tool, held_back

FUNCTION, PARAMETER = "<function=", "<parameter="
ENDS = PARAMETER_END, FUNCTION_END = "</parameter>", "</function>"
_SPACE = " \t\r\n"
_NAME = re.compile(r"[^<>\s][^<>\n]{0,200}")


class CallTags:
    """Reads `<function=name>`, for each argument `<parameter=key>`, a line break, the value, a line
    break, `</parameter>`, and `</function>`; gives the arguments as JSON.

        <function= -> name> -> parameters -> <parameter= key> -> value -> parameters ...
                                          -> </function>

    A value is a string where the tool's schema says so, and comes out as it arrives. Others come
    out at their end: as the JSON that they are, else as a string. Python's True, False and None
    are JSON's, as templates write them.

    begun, verdict, raw: as of `CallObject`; begun with the name.
    """

    def __init__(self, tools: Sequence[Tool] = (), *, opened: bool = False):
        """tools: those that may be called, none for any. opened: `<function=` has been read."""
        self.name = ""
        self.begun = False
        self.verdict: Literal["whole", "broken"] | None = None
        self.raw = ""
        self._tools = {tool.name: tool for tool in tools}
        self._read: Callable[[], bool] = self._name if opened else self._function
        self._added = ""
        self._joint = "{"  # what stands before the next key
        self._is_text = False
        self._breaks = False  # a value's first line break has yet to come
        self._searched = 0  # of raw, in which a value's end is not

    def push(self, text: str) -> str:
        """Take in more text; what it adds to the arguments."""
        self.raw += text
        self._added = ""
        while self.verdict is None and self._read():
            pass
        return self._added

    def finish(self) -> str:
        """The last of the arguments, where the answer ended inside them."""
        self._added = ""
        if self._read == self._value and self._is_text:
            self._give_text(self.raw)
        elif self._read == self._parameters:
            self._end()
        return self._added

    # Each step reads from the beginning of raw. It returns False when it must wait for more text or
    # has come to a verdict.

    def _function(self) -> bool:
        rest = self.raw.lstrip(_SPACE)
        if not rest.startswith(FUNCTION):
            self.verdict = None if FUNCTION.startswith(rest) else "broken"
            return False
        # Should this be no call, all of it is content: raw stays whole until the name is there.
        name, end, rest = rest.removeprefix(FUNCTION).partition(">")
        return self._named(name, end, rest)

    def _name(self) -> bool:
        return self._named(*self.raw.partition(">"))

    def _named(self, name: str, end: str, rest: str) -> bool:
        fits = _NAME.fullmatch(name) and not (end and self._tools and name not in self._tools)
        if not fits and (name or end):
            self.verdict = "broken"
        if not fits or not end:
            return False
        self.name, self.begun, self.raw = name, True, rest
        self._read = self._parameters
        return True

    def _parameters(self) -> bool:
        rest = self.raw.lstrip(_SPACE)
        if rest.startswith(FUNCTION_END):
            self.raw = rest.removeprefix(FUNCTION_END)
            return self._end()
        if any(marker.startswith(rest) for marker in (PARAMETER, FUNCTION_END)):
            return False
        key, end, value = rest.removeprefix(PARAMETER).partition(">")
        if not rest.startswith(PARAMETER) or not _NAME.fullmatch(key or "?"):
            return self._end()
        if not end:
            return False
        self._added += f"{self._joint}{_json(key)}: "
        self._joint, self._breaks, self.raw = ", ", True, value
        self._is_text = is_text(self._tools.get(self.name), key)
        self._added += '"' * self._is_text
        self._read = self._value
        return True

    def _value(self) -> bool:
        found = [at for end in ENDS if (at := self.raw.find(end, self._searched)) >= 0]
        if not found:
            self._searched = max(len(self.raw) - len(PARAMETER_END), 0)
            if self._is_text:
                certain = len(self.raw) - held_back(self.raw, *ENDS)
                certain -= self.raw[:certain].endswith("\n")  # it may be the last
                self._give_text(self.raw[:certain])
                self.raw, self._searched = self.raw[certain:], 0
            return False
        self._searched = 0
        value = self.raw[: min(found)].removesuffix("\n")
        self.raw = self.raw[min(found) :].removeprefix(PARAMETER_END)
        if self._is_text:
            self._give_text(value)
            self._added += '"'
        else:
            self._added += _converted(value.removeprefix("\n"))
        self._read = self._parameters
        return True

    def _give_text(self, text: str) -> None:
        if self._breaks and text:
            text, self._breaks = text.removeprefix("\n"), False
        self._added += _json(text)[1:-1]

    def _end(self) -> bool:
        self._added += "{}" if self._joint == "{" else "}"
        self.verdict = "whole"
        return False


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _converted(text: str) -> str:
    """A value that need not be a string, as JSON."""
    words = {"true": "true", "false": "false", "none": "null", "null": "null"}
    if (word := words.get(text.strip().lower())) is not None:
        return word
    try:
        json.loads(text, parse_constant=lambda name: _refuse(name))
    except ValueError:
        return _json(text)
    return text.strip()


def _refuse(name: str) -> None:
    raise ValueError(name)


def is_text(tool: Tool | None, key: str) -> bool:
    """Whether an argument is a string and nothing else."""
    schema = (tool.parameters or {}).get("properties", {}) if tool is not None else {}
    own = schema.get(key) if isinstance(schema, Mapping) else None
    if not isinstance(own, Mapping):
        return False
    words = own.get("enum", [own["const"]] if "const" in own else None)
    if isinstance(words, list) and "type" not in own:
        return all(isinstance(word, str) for word in words)
    return own.get("type") == "string"
