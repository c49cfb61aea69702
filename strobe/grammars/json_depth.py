"""The nesting depth of a JSON text, without parsing it."""

from __future__ import annotations

import re

_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{\]}]', re.DOTALL)


def json_depth(text: str) -> int:
    """Return the maximum number of objects and lists open at once."""
    deepest = level = 0
    for mark in _MARKS.finditer(text):
        level += (mark[0] in "[{") - (mark[0] in "]}")
        deepest = max(deepest, level)
    return deepest
