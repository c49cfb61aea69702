"""Incremental readers of one tool call written as JSON, with or without the name in the object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from strobe.server.parsers.buffer import Buffer
from strobe.server.parsers.call_arguments import as_arguments
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.format_protocols import Tool

_KEYS = ("name", "arguments", "parameters", "type", "id", "function")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_STRING_SO_FAR = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*\\?')
_OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
_INSIDE_STRING = re.compile(r'["\\\n<]')
_STRING_MARK = re.compile(r'\\.|"', re.DOTALL)
_MAX_HEAD_CHARS = 300


class CallObject(CallReader):
    """Reads `{"name": "...", "arguments": {...}}`, with keys in any order. `parameters` is the same
    as `arguments`; `type` and `id` are skipped. The object may be a member of a list, and its keys
    may be in an object under the key `function`.

        { -> key -> : -> string, or { arguments } -> , -> key ...
                                                  -> }

    Arguments that are null or an empty string are an empty object, and so are missing ones; other
    strings are read as the object in their text. Before both the name and the arguments' first
    brace have arrived, the text may not be a call. After that it is one.
    """

    def __init__(
        self,
        buffer: Buffer,
        closer: str = "",
        tools: Sequence[Tool] = (),
        *,
        needs_arguments: bool = False,
    ):
        """closer: the markup after a call, which ends arguments that lack a brace or a quote.
        tools: the tools that may be called, empty for any. needs_arguments: whether an object
        without arguments is not a call."""
        super().__init__(buffer, tools, self._brace)
        self._closer = closer
        self._needs_arguments = needs_arguments
        self._nested = False  # whether the object under `function` is open
        self._scanned = 0  # position up to which a string was scanned
        self._key = ""
        self._keys: set[str] = set()
        self._arguments = ""
        self._first = 0  # the arguments' range in raw
        self._last = 0
        self._depth = 0
        self._in_string = False
        self._has_line_break = False

    def _end_early(self, cut: bool) -> None:
        if self._step == self._inside_arguments:
            self._at = len(self.raw)
            self._add(self.raw)

    # Each step reads from raw[_at:] on.

    def _brace(self) -> bool:
        return self._pass("{", self._member)

    def _member(self) -> bool:
        if self.begun and self._next() == "}":  # after a comma too many
            return self._comma()
        if self._next() != '"':
            return self._wait_or_break()
        key, quote, _ = self.raw[self._at + 1 :].partition('"')
        if not quote:
            return False if any(prefix.startswith(key) for prefix in _KEYS) else self._break()
        self._key = "arguments" if key == "parameters" else key
        if key not in _KEYS or self._key in self._keys:
            return self._break()
        if key == "function" and {"name", "arguments"} & self._keys:
            return self._break()
        self._keys.add(self._key)
        self._at += len(key) + 2
        self._step = self._colon
        return True

    def _colon(self) -> bool:
        value = {"arguments": self._arguments_begin, "function": self._function_begin}
        return self._pass(":", value.get(self._key, self._string))

    def _function_begin(self) -> bool:
        self._nested = True
        return self._pass("{", self._member)

    def _string(self) -> bool:
        if self._next() != '"':
            return self._wait_or_break()
        match = _STRING.match(self.raw, self._at)
        if match is None:
            return False if _STRING_SO_FAR.fullmatch(self.raw, self._at) else self._break()
        try:
            value: str = json.loads(match[0])
        except ValueError:
            return self._break()
        self._at = match.end()
        self._step = self._comma
        if self._key == "name":
            if not value:
                return self._break()
            self._set_name(value)
            if "arguments" in self._keys:
                self._begin_with(self._arguments)
        return True

    def _arguments_begin(self) -> bool:
        char = self._next()
        self._first = self._at
        if char == '"':
            self._scanned = self._at + 1
            self._step = self._arguments_in_string
            return True
        if char == "n":
            rest = self.raw[self._at : self._at + len("null")]
            if rest != "null":
                return False if "null".startswith(rest) else self._break()
            self._at += len(rest)
            return self._set_arguments("{}")
        if char != "{":
            return self._wait_or_break()
        if self.name:
            self._begin(self._at)
            self._drop(self._at)
            self._first = 0
        self._step = self._inside_arguments
        return True

    def _arguments_in_string(self) -> bool:
        """Read the arguments' JSON in a string."""
        while mark := _STRING_MARK.search(self.raw, self._scanned):
            self._scanned = mark.end()
            if mark[0] == '"':
                break
        if mark is None:
            return False
        try:
            text: str = json.loads(self.raw[self._at : self._scanned], strict=False)
        except ValueError:
            return self._break()
        self._at = self._scanned
        arguments = as_arguments(text.strip() or "{}")
        return self._break() if arguments is None else self._set_arguments(arguments)

    def _set_arguments(self, arguments: str) -> bool:
        """Take arguments that are complete at once."""
        self._step = self._comma
        self._arguments = arguments
        self._last = self._at
        if self.name:
            self._begin_with(arguments)
        return True

    def _inside_arguments(self) -> bool:
        """Scan the arguments up to their last brace."""
        while True:
            event = _INSIDE_STRING if self._in_string else _OUTSIDE_STRING
            match = event.search(self.raw, self._at)
            self._at = match.start() if match else len(self.raw)
            if match is None:
                return self._more_arguments()
            char = match[0]
            if char == "\\" and self._at + 1 == len(self.raw):
                return self._more_arguments()
            if char == "<" and (self._has_line_break or not self._in_string) and self._closer:
                rest = self.raw[self._at : self._at + len(self._closer)]
                if rest == self._closer:
                    return self._end_arguments()
                if self._closer.startswith(rest):
                    return self._more_arguments()
            self._at += 2 if char == "\\" else 1
            if char == '"':
                # A string with a line break is not valid JSON, and may lack its closing quote.
                self._in_string = not self._in_string
                self._has_line_break = False
            elif char == "\n":
                self._has_line_break = True
            elif not self._in_string:
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(char, 0)
                if self._depth == 0:
                    return self._end_arguments()

    def _more_arguments(self) -> bool:
        if self.begun:
            self._add(self.raw[: self._at])
            self._drop(self._at)
        return False

    def _end_arguments(self) -> bool:
        self._arguments = self.raw[self._first : self._at]
        self._last = self._at
        self._step = self._comma
        if self.begun:
            self._add(self._arguments)
            self._drop(self._at)
        return True

    def _comma(self) -> bool:
        char = self._next()
        if char == ",":
            return self._pass(",", self._member)
        if char != "}":
            return self._wait_or_break()
        if self._nested:
            self._nested = False
            self._at += 1
            return True
        if not self.begun:
            if not self.name or self._needs_arguments:
                return self._break()
            self._first = self._last = self._at
            self._begin_with("{}")
        self._drop(self._at + 1)
        return self._whole()

    def _begin_with(self, arguments: str) -> None:
        """Begin the call after its arguments."""
        self._begin(self._first)
        self._added = arguments
        self.end = self._buffer.position + self._last
        self._drop(self._at)

    def _pass(self, char: str, next_state: Callable[[], bool]) -> bool:
        if self._next() != char:
            return self._wait_or_break()
        self._at += 1
        self._step = next_state
        return True

    def _wait_or_break(self) -> bool:
        """Wait if the next character has not arrived, else break: it is not the expected one."""
        return self._break() if self._next() else False


class CallNamed(CallObject):
    """Reads a head with the tool's name, then the arguments, a JSON object; otherwise the same as
    `CallObject`. The call has begun at the arguments' first brace, which must be among the first
    300 characters, and is whole at their last brace."""

    def __init__(
        self,
        buffer: Buffer,
        head: re.Pattern[str],
        closer: str = "",
        tools: Sequence[Tool] = (),
    ):
        """head: the text before the arguments, with the tool's name as the group `name`."""
        super().__init__(buffer, closer, tools)
        self._pattern = head
        self._step = self._head

    def _head(self) -> bool:
        brace = self.raw.find("{", 0, _MAX_HEAD_CHARS)
        if brace < 0:
            return False if len(self.raw) < _MAX_HEAD_CHARS else self._break()
        head = self._pattern.fullmatch(self.raw, 0, brace)
        if head is None:
            return self._break()
        self._set_name(head["name"])
        self._at = brace
        self._step = self._arguments_begin
        return True

    def _comma(self) -> bool:
        return self._whole()
