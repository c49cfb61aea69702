"""How deep a JSON text is nested, without reading it."""

from __future__ import annotations

import re

_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{\]}]', re.DOTALL)


def json_depth(text: str) -> int:
    """Return the number of objects and lists that are open at once, at most."""
    deepest = level = 0
    for mark in _MARKS.finditer(text):
        level += (mark[0] in "[{") - (mark[0] in "]}")
        deepest = max(deepest, level)
    return deepest
