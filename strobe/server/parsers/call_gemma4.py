"""Incremental reader of one tool call in Gemma 4's format."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence

from strobe.server.parsers.argument_schemas import ANY, Arguments, as_json, read_arguments
from strobe.server.parsers.buffer import Buffer, held_back
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.format_protocols import Tool

OPENER = "<|tool_call>"
CLOSER = "<tool_call|>"
QUOTE = '<|"|>'
CALL = "call:"
NAME = re.compile(r"[^\s{}<>]{1,200}")
"""Function names that the format can represent."""
KEY = re.compile(r'[^\s:,{}\[\]<>"][^:,{}\[\]<>"\n]{0,200}')
"""Argument names that the format can represent without quotes."""

_HEAD = re.compile(rf"\s*{CALL}({NAME.pattern})\{{")
_SPACE = re.compile(r"[ \t\r\n]*")
_KEY_END = re.compile(r"[:,{}\[\]<]")
_SCALAR_END = re.compile(r"[,{}\[\]<]")
_JSON_MARK = re.compile(r'\\.|"', re.DOTALL)
_SINGLE_MARK = re.compile(rf"\\.|'(?=[ \t\r\n]*[,}}\]])|{re.escape(CLOSER)}", re.DOTALL)
_ESCAPE_OR_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}


class CallGemma4(CallReader):
    """Reads `call:name{key:value,...}` and returns the arguments as JSON.

        call:name{ -> key : -> value -> , -> key ...
                                     -> }

    A value is a string between two `<|"|>`, without escapes, which is emitted as it arrives; a
    list; an object with keys like these; or a number, boolean or null. Keys and strings may also be
    in JSON's quotes or in single quotes, which end before a comma or a closing bracket. If an
    argument's schema allows no strings, a string is converted to the value that it spells; if it
    allows only strings, other values become strings. A call has begun at its first brace.
    """

    always_valid = True

    def __init__(self, buffer: Buffer, tools: Sequence[Tool] = ()):
        """tools: the tools that may be called, empty for any."""
        super().__init__(buffer, tools, self._head)
        self._seen = 0  # position in raw before which the current item does not end
        self._arguments = Arguments()
        self._open: list[str] = []  # the brackets that are open
        self._separator = ""  # in front of the next key or item
        self._types = ANY  # of the current value

    def advance(self) -> str:
        added = super().advance()
        if self.begun:
            self._seen = max(0, self._seen - self._at)
            self._drop(self._at)
        return added

    def _end_early(self, cut: bool) -> None:
        self._at = len(self.raw)
        if self._step == self._string:
            self._add(_json_chars(self.raw))
        elif self._step == self._scalar:
            self._add(self.raw)

    # Each step reads from raw[_at:] on.

    def _head(self) -> bool:
        head = _HEAD.match(self.raw)
        if head is None:
            rest = self.raw.lstrip()
            name = rest.removeprefix(CALL)
            if not CALL.startswith(rest) and (name == rest or not NAME.fullmatch(name or "?")):
                return self._break()
            return False
        self._set_name(head[1])
        self._begin(head.end() - 1)
        with contextlib.suppress(ValueError):  # values are then of any type
            self._arguments = read_arguments(self._tools.get(self.name, Tool(self.name)))
        self._pass(head.end())
        self._bracket("{")
        return True

    def _bracket(self, bracket: str) -> None:
        self._add(bracket)
        self._open.append(bracket)
        self._separator = ""
        self._step = self._before_item

    def _before_item(self) -> bool:
        """Before a key, an item or a closing bracket."""
        char = self._char()
        if not char:
            return False
        if char == _CLOSING[self._open[-1]]:
            return self._close()
        self._step = self._key if self._open[-1] == "{" else self._value
        return True

    def _key(self) -> bool:
        rest = self.raw[self._at : self._at + len(QUOTE)]
        if QUOTE.startswith(rest) and rest != QUOTE:
            return False
        if rest == QUOTE:
            end = self._find(QUOTE, self._at + len(QUOTE))
            key = None if end < 0 else self.raw[self._at + len(QUOTE) : end]
            end += len(QUOTE)
        elif rest[0] == '"':
            end = self._json_end()
            key = None if end < 0 else _from_json(self.raw[self._at : end])
        else:
            key_end = _KEY_END.search(self.raw, self._seen)
            self._seen = len(self.raw)
            end = key_end.start() if key_end else -1
            key = None if end < 0 else _unquoted(self.raw[self._at : end].strip())
        if key is None:
            return False
        colon = _SPACE.match(self.raw, end)
        assert colon is not None
        if colon.end() == len(self.raw):
            self._seen = self._at  # the key is read again with what follows
            return False
        if self.raw[colon.end()] != ":" or (not key and rest[0] == ":"):
            return self._break()
        self._pass(colon.end() + 1)
        self._types = self._arguments.types(key) if len(self._open) == 1 else ANY
        self._add(f"{self._separator}{_json(key)}: ")
        self._separator = ""
        self._step = self._value
        return True

    def _value(self) -> bool:
        char = self._char()
        rest = self.raw[self._at : self._at + len(QUOTE)]
        if not char or (QUOTE.startswith(rest) and rest != QUOTE):
            return False
        if char in ",}]:":
            return self._break()
        if self._separator:
            self._add(self._separator)
            self._separator = ""
        if rest == QUOTE:
            self._pass(self._at + len(QUOTE))
            self._step = self._text
            if "string" in self._types:
                self._add('"')
                self._step = self._string
        elif char in "{[":
            self._pass(self._at + 1)
            self._types = ANY
            self._bracket(char)
        elif char == "<":
            return self._break()
        else:
            quoted = {'"': self._quoted, "'": self._single_quoted}
            self._step = quoted.get(char, self._scalar)
        return True

    def _string(self) -> bool:
        end = self.raw.find(QUOTE, self._at)
        stop = end if end >= 0 else len(self.raw) - held_back(self.raw[self._at :], (QUOTE,))
        text = self.raw[self._at : stop]
        self._pass(stop)
        if text:
            self._add(_json_chars(text))
        if end < 0:
            return False
        return self._ended(end + len(QUOTE), '"')

    def _text(self) -> bool:
        """Read a string if the schema allows none."""
        end = self._find(QUOTE, self._at)
        if end < 0:
            return False
        value = as_json(self.raw[self._at : end], self._types)
        return self._ended(end + len(QUOTE), value)

    def _quoted(self) -> bool:
        end = self._json_end()
        if end < 0:
            return False
        return self._take_text(_from_json(self.raw[self._at : end]), end)

    def _single_quoted(self) -> bool:
        position = max(self._at + 1, self._seen)
        while mark := _SINGLE_MARK.search(self.raw, position):
            if mark[0] == CLOSER:  # a word that begins with an apostrophe
                self._seen = self._at
                self._step = self._scalar
                return True
            if mark[0] == "'":
                return self._take_text(_from_single(self.raw[self._at : mark.end()]), mark.end())
            position = mark.end()
        self._seen = position
        return False

    def _take_text(self, text: str, end: int) -> bool:
        """Take a string that ends at a position."""
        return self._ended(
            end, _json(text) if "string" in self._types else as_json(text, self._types)
        )

    def _scalar(self) -> bool:
        value_end = _SCALAR_END.search(self.raw, self._seen)
        if value_end is None:
            self._seen = len(self.raw)
            return False
        text = self.raw[self._at : value_end.start()].strip()
        return self._ended(value_end.start(), as_json(text, self._types))

    def _ended(self, position: int, added: str) -> bool:
        """End a value at a position. added: the rest of its JSON."""
        self._pass(position)
        self._add(added)
        self._step = self._after_value
        return True

    def _after_value(self) -> bool:
        """After a value."""
        char = self._char()
        if not char:
            return False
        if char == _CLOSING[self._open[-1]]:
            return self._close()
        if char != ",":
            return self._break()
        self._pass(self._at + 1)
        self._separator = ", "
        self._step = self._before_item
        self._types = ANY
        return True

    def _close(self) -> bool:
        self._ended(self._at + 1, _CLOSING[self._open.pop()])
        return True if self._open else self._whole()

    def _char(self) -> str:
        """Return the next character other than space, "" if it has not arrived."""
        char = self._next()
        self._seen = self._at
        return char

    def _pass(self, position: int) -> None:
        self._at = self._seen = position

    def _find(self, marker: str, start: int) -> int:
        """Return the position of a marker at or after `start`, -1 if it has not arrived."""
        index = self.raw.find(marker, max(start, self._seen))
        if index < 0:
            self._seen = max(start, len(self.raw) - len(marker) + 1)
        return index

    def _json_end(self) -> int:
        """Return the position after a JSON string's closing quote, -1 if it has not arrived."""
        position = max(self._at + 1, self._seen)
        while mark := _JSON_MARK.search(self.raw, position):
            if mark[0] == '"':
                return mark.end()
            position = mark.end()
        self._seen = max(position, len(self.raw) - 1)
        return -1


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_chars(text: str) -> str:
    return _json(text)[1:-1]


def _from_json(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return text[1:-1]


def _unquoted(key: str) -> str:
    quoted = len(key) > 1 and key[0] == key[-1] == "'"
    return key[1:-1] if quoted else key


def _from_single(text: str) -> str:
    """Return the string in single quotes, whose escapes are JSON's and an escaped single quote."""

    def in_json(match: re.Match[str]) -> str:
        return {'"': '\\"', "\\'": "'"}.get(match[0], match[0])

    try:
        return str(json.loads(f'"{_ESCAPE_OR_QUOTE.sub(in_json, text[1:-1])}"', strict=False))
    except ValueError:
        return text[1:-1].replace("\\'", "'")
