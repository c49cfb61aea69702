"""The tags of Qwen3-Coder's tool calls, and a search for the end of a value between them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from strobe.server.parsers.buffer import held_back

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
