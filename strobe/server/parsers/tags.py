"""The tags of Qwen3-Coder's tool calls, and where a value between them ends."""

from __future__ import annotations

import re
from collections.abc import Collection

from strobe.server.parsers.base import held_back

OPENER, CLOSER = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<> \t\r\n][^<>\n]{0,200}")
"""The name of a function or parameter that can stand in a tag."""
LINE = re.compile(r"\r?\n")

_COMMENT = r"<!--(?s:.{0,200}?)-->"
_LONGEST = 207
"""The characters of the longest comment, and more than those of any tag."""
_BLANK = re.compile(rf"(?:[ \t\r\n]|{_COMMENT})*")
_BLANK_OR_END = re.compile(rf"(?:[ \t\r\n]|{PARAMETER_END}|{_COMMENT})*")
_MARKER = re.compile(rf"(\r?\n)?({PARAMETER_END}|{FUNCTION_END}|{PARAMETER})")
_MARKERS = [
    line + tag for line in ("", "\n", "\r\n") for tag in (PARAMETER_END, FUNCTION_END, PARAMETER)
]
_FOLLOWS = {
    PARAMETER_END: (PARAMETER, FUNCTION_END, CLOSER, FUNCTION, OPENER),
    FUNCTION_END: (CLOSER, FUNCTION, OPENER),
}
_NO_TEXT = re.compile(r'\s*["{\[]')
_QUOTES = re.compile(r'\\.|["\n]')


def blank(text: str) -> int:
    """Characters at a text's beginning that say nothing between two parameters: space, comments
    and ends of parameters that have ended."""
    match = _BLANK_OR_END.match(text)
    return match.end() if match else 0


def may_begin(text: str, *tags: str) -> bool:
    """Whether a text may yet turn out to begin with one of the tags, or with a comment."""
    comment = "<!--".startswith(text[:4]) and len(text) < _LONGEST
    return comment or any(tag.startswith(text) for tag in tags)


class ValueEnd:
    """Finds the end of a value that is being written, which may have markup of its own.

    `</parameter>` is the end in front of another tag of the call, or of the answer's end;
    `</function>` in front of a tag that follows a call; `<parameter=key>` on a line of its own
    where such a parameter is awaited. In JSON none is inside a string.

    certain: characters of the value so far in which the end is not.
    """

    def __init__(self, awaited: Collection[str], *, text: bool):
        """text: whether the value is a string as it stands, and never JSON."""
        self.certain = 0
        self._awaited, self._text = awaited, text
        self._blank = 0  # characters behind a marker that say nothing
        self._counted, self._in_string = 0, False

    def find(self, raw: str, *, last: bool) -> re.Match[str] | None:
        """The line break and the tag at a value's end, None where it is not there. last: whether
        no more text comes."""
        while marker := _MARKER.search(raw, self.certain):
            ends = self._ends(raw, marker, last)
            if ends is None or ends:
                self.certain = marker.start()
                return marker if ends else None
            self.certain, self._blank = marker.end(), 0
        self.certain = max(self.certain, len(raw) - held_back(raw, *_MARKERS))
        return None

    def _ends(self, raw: str, marker: re.Match[str], last: bool) -> bool | None:
        """Whether a value ends here, None where what follows has yet to say."""
        line, tag = marker.groups()
        if not line and self._is_quoted(raw, marker.start()):
            return False
        if tag == PARAMETER:
            key, end, _ = raw[marker.end() : marker.end() + _LONGEST].partition(">")
            if not line or end or last:
                return bool(line and end) and key in self._awaited
            return None if any(name.startswith(key) for name in self._awaited) else False
        following = _BLANK.match(raw, marker.end() + self._blank)
        assert following is not None
        self._blank = following.end() - marker.end()
        rest = raw[following.end() : following.end() + _LONGEST]
        follows = _FOLLOWS[tag]
        if line and tag == PARAMETER_END:  # twice, one below the other
            follows = (*follows, tag)
        if not rest.startswith(follows) and may_begin(rest, *follows):
            return last or None
        return rest.startswith(follows)

    def _is_quoted(self, raw: str, place: int) -> bool:
        """Whether a place lies in a string of JSON, which has no line break in it."""
        if self._text or not _NO_TEXT.match(raw):
            return False
        for mark in _QUOTES.finditer(raw, self._counted, place):
            if mark[0] in '"\n':
                self._in_string = mark[0] == '"' and not self._in_string
        self._counted = place
        return self._in_string
