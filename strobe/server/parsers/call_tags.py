"""Incremental reader of one tool call written in tags, and the end of a value between them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Sequence

from strobe.server.parsers.argument_schemas import ANY, Arguments, as_json, is_text, read_arguments
from strobe.server.parsers.buffer import Buffer, held_back
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.format_protocols import Tool

OPENER = "<tool_call>"
CLOSER = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
NAME = re.compile(r"[^<> \t\r\n][^<>\n]{0,200}")
"""Names of functions and parameters that a tag can hold."""
LINE = re.compile(r"\r?\n")

_COMMENT = r"<!--(?s:.{0,200}?)-->"
_MAX_CHARS = 207
"""Length of the longest comment in characters, which is above any tag's."""
_BLANK = re.compile(rf"(?:[ \t\r\n]|{_COMMENT})*")
_BLANK_OR_END = re.compile(rf"(?:[ \t\r\n]|{PARAMETER_END}|{_COMMENT})*")
_MARKER = re.compile(rf"(\r?\n)?({PARAMETER_END}|{FUNCTION_END}|{PARAMETER})")
_MARKERS = tuple(
    line + tag for line in ("", "\n", "\r\n") for tag in (PARAMETER_END, FUNCTION_END, PARAMETER)
)
_FOLLOWS = {
    PARAMETER_END: (PARAMETER, FUNCTION_END, CLOSER, FUNCTION, OPENER),
    FUNCTION_END: (CLOSER, FUNCTION, OPENER),
}
_NO_TEXT = re.compile(r'\s*["{\[]')
_QUOTES = re.compile(r'\\.|["\n]')
_NULLS = ("null", "None")
_LONGEST_NULL = len("\r\nnull")


class CallTags(CallReader):
    """Reads `<function=name>`, for each argument `<parameter=key>`, a line break, the value, a line
    break, `</parameter>`, and `</function>`; returns the arguments as JSON.

        <function= -> name> -> parameters -> <parameter= key> -> value -> parameters ...
                                          -> </function>

    If the tool's schema says that a value is a string, it is emitted as it arrives. Other values
    are emitted at their end: as JSON if they are valid and the schema allows their type, else as a
    string. Python's True, False and None, which templates write, become JSON's. If a parameter is
    repeated, its first value counts. A call has begun after its name.
    """

    always_valid = True

    def __init__(self, buffer: Buffer, tools: Sequence[Tool] = (), *, opened: bool = False):
        """tools: the tools that may be called, empty for any. opened: whether `<function=` has been
        read."""
        super().__init__(buffer, tools, self._name if opened else self._function)
        self._last = False  # whether the answer has ended
        self._arguments = Arguments()
        self._seen_keys: set[str] = set()
        # State of the current value:
        self._types = ANY
        self._is_text = False
        self._opened = False  # whether its opening quote was emitted
        self._breaks = False  # whether its first line break is still to be skipped
        self._repeated = False
        self._end = ValueEnd((), text=False)

    def _end_early(self, cut: bool) -> None:
        """Add the rest of the arguments, with their closing brace only if nothing but the
        function's end is missing."""
        self._last = True
        while self.verdict is None and self._step():
            pass
        if self.verdict is None and self._step == self._value:
            value = self.raw
            self._drop(len(value))
            if self._is_text:
                self._emit_text(value)
            else:
                self._emit(self._unbroken(value))
        elif self.verdict is None and self._seen_keys and not self.raw and not cut:
            self._end_call()

    # Each step but the first reads from the beginning of raw.

    def _function(self) -> bool:
        self._next()
        rest = self.raw[self._at :]
        if not rest.startswith(FUNCTION):
            return False if FUNCTION.startswith(rest) else self._break()
        # raw stays complete until the name has arrived, since without a call all of it is content.
        return self._named(rest.removeprefix(FUNCTION))

    def _name(self) -> bool:
        return self._named(self.raw)

    def _named(self, text: str) -> bool:
        name, end, rest = text.partition(">")
        fits = NAME.fullmatch(name)
        if not fits and (name or end):
            return self._break()
        if not end:
            return False
        self._set_name(name)
        self._drop(len(self.raw) - len(rest))
        self._begin(0)
        with contextlib.suppress(ValueError):  # values are then of any type
            self._arguments = read_arguments(self._tools.get(name, Tool(name)))
        self._step = self._parameters
        return True

    def _parameters(self) -> bool:
        self._drop(blank(self.raw))
        if self.raw.startswith(FUNCTION_END):
            self._drop(len(FUNCTION_END))
            return self._end_call()
        if may_begin(self.raw, (PARAMETER, PARAMETER_END, FUNCTION_END)):
            return False
        key, end, _ = self.raw.removeprefix(PARAMETER).partition(">")
        if not self.raw.startswith(PARAMETER) or not NAME.fullmatch(key or "?"):
            return self._end_call()
        if not end:
            return False
        self._drop(len(PARAMETER) + len(key) + len(end))
        self._begin_value(key)
        return True

    def _begin_value(self, key: str) -> None:
        self._types = self._arguments.types(key)
        self._is_text = is_text(self._types)
        self._opened = self._types == {"string"}
        self._repeated = key in self._seen_keys
        self._emit("{" if not self._seen_keys else ", ")
        self._emit(_json(key) + ': "' if self._opened else _json(key) + ": ")
        self._seen_keys.add(key)
        self._breaks = True
        self._end = ValueEnd(
            self._arguments.properties.keys() - self._seen_keys, text=self._is_text
        )
        self._step = self._value

    def _value(self) -> bool:
        value_end = self._end.find(self.raw, last=self._last)
        count = self._end.certain
        if value_end is None:
            if self._is_text and (self._opened or count > _LONGEST_NULL):
                text = self.raw[:count]
                self._drop(count)
                self._emit_text(text)
                self._end.certain = 0
            return False
        value = self.raw[:count]
        self._drop(value_end.end() if value_end[2] == PARAMETER_END else value_end.start(2))
        if not self._is_text or (not self._opened and self._unbroken(value) in _NULLS):
            self._emit(as_json(self._unbroken(value), self._types))
        else:
            self._emit_text(value)
            self._emit('"')
        self._step = self._parameters
        return True

    def _unbroken(self, value: str) -> str:
        """Return a value's text without the line break in front of it."""
        line = LINE.match(value) if self._breaks else None
        return value[line.end() :] if line else value

    def _emit_text(self, text: str) -> None:
        if not self._opened:
            self._emit('"')
            self._opened = True
        if text:
            self._emit(_json(self._unbroken(text))[1:-1])
            self._breaks = False

    def _emit(self, arguments: str) -> None:
        if not self._repeated:
            self._add(arguments)

    def _end_call(self) -> bool:
        self._add("}" if self._seen_keys else "{}")
        return self._whole()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def blank(text: str) -> int:
    """Return the number of characters at a text's beginning that are skipped between parameters:
    space, comments and surplus ends of parameters."""
    match = _BLANK_OR_END.match(text)
    return match.end() if match else 0


def may_begin(text: str, tags: Iterable[str]) -> bool:
    """Whether a text may be the beginning of one of the tags or of a comment."""
    comment = "<!--".startswith(text[:4]) and len(text) < _MAX_CHARS
    return comment or any(tag.startswith(text) for tag in tags)


class ValueEnd:
    """Finds the end of a value as it arrives. A value may contain markup itself.

    `</parameter>` ends it if another tag of the call or the answer's end follows; `</function>` if
    a tag follows that comes after calls; `<parameter=key>` if it is on a line of its own and that
    parameter is expected. Tags inside a JSON string do not count.

    certain: number of characters of the value so far that do not contain its end.
    """

    def __init__(self, expected: Collection[str], *, text: bool):
        """text: whether the value is plain text and never JSON."""
        self.certain = 0
        self._expected = expected
        self._text = text
        self._blank = 0  # blank characters after a marker
        self._counted = 0
        self._in_string = False

    def find(self, raw: str, *, last: bool) -> re.Match[str] | None:
        """Return the line break and the tag at the value's end, None if it has not arrived. last:
        whether the answer has ended."""
        while marker := _MARKER.search(raw, self.certain):
            ends = self._ends(raw, marker, last)
            if ends is None or ends:
                self.certain = marker.start()
                return marker if ends else None
            self.certain = marker.end()
            self._blank = 0
        self.certain = max(self.certain, len(raw) - held_back(raw, _MARKERS))
        return None

    def _ends(self, raw: str, marker: re.Match[str], last: bool) -> bool | None:
        """Whether the value ends at a marker, None if that depends on further text."""
        line, tag = marker.groups()
        if not line and self._is_quoted(raw, marker.start()):
            return False
        if tag == PARAMETER:
            key, end, _ = raw[marker.end() : marker.end() + _MAX_CHARS].partition(">")
            if not line or end or last:
                return bool(line and end) and key in self._expected
            return None if any(name.startswith(key) for name in self._expected) else False
        following = _BLANK.match(raw, marker.end() + self._blank)
        assert following is not None
        self._blank = following.end() - marker.end()
        rest = raw[following.end() : following.end() + _MAX_CHARS]
        follows = _FOLLOWS[tag]
        if line and tag == PARAMETER_END:  # the end tag on two consecutive lines
            follows = (*follows, tag)
        if not rest.startswith(follows) and may_begin(rest, follows):
            return last or None
        return rest.startswith(follows)

    def _is_quoted(self, raw: str, position: int) -> bool:
        """Whether a position is inside a JSON string, which never spans lines."""
        if self._text or not _NO_TEXT.match(raw):
            return False
        for mark in _QUOTES.finditer(raw, self._counted, position):
            if mark[0] in '"\n':
                self._in_string = mark[0] == '"' and not self._in_string
        self._counted = position
        return self._in_string
