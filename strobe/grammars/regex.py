r"""Regular expressions in which \d, \w and \s mean ASCII.

llguidance reads them as Unicode's classes, whose digits and letters of all scripts a model may
write where a client expects 0 to 9.
"""

from __future__ import annotations

import re

_DIGIT = "0-9"
_WORD = "0-9A-Za-z_"
_SPACE = r"\t\n\x0B\f\r\x20"
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_FLAGS = re.compile(r"\(\?([A-Za-z]*)(?:-([A-Za-z]*))?([:)])")
_CLASS_START = re.compile(r"\[\^?\]?")
"""A bracket that comes first in a class is a member of it."""


def ascii_classes(pattern: str) -> str:
    r"""Return the expression with \d, \w, \s and their complements replaced by ASCII classes, but
    for the parts in which the flag `u` asks for Unicode, as `(?u)` and `(?u:...)` do."""
    parts = list[str]()
    position = 0
    unicode = [False]  # of the open groups
    depth = 0  # of the open character classes
    while position < len(pattern):
        piece = replacement = pattern[position]
        if piece == "\\":
            piece = replacement = pattern[position : position + 2]
            if piece[1:].lower() in _CLASSES and not unicode[-1]:
                replacement = _ascii_class(piece[1], inside=depth > 0)
        elif piece == "[":
            depth += 1
            start = _CLASS_START.match(pattern, position)
            piece = replacement = start[0] if start is not None else piece
        elif depth:
            depth -= piece == "]"
        elif piece == "(":
            flags = _FLAGS.match(pattern, position)
            is_unicode = unicode[-1]
            if flags is not None:
                piece = replacement = flags[0]
                is_unicode = "u" in flags[1] or (is_unicode and "u" not in (flags[2] or ""))
            if flags is not None and flags[3] == ")":
                unicode[-1] = is_unicode
            else:
                unicode.append(is_unicode)
        elif piece == ")" and len(unicode) > 1:
            unicode.pop()
        parts.append(replacement)
        position += len(piece)
    return "".join(parts)


def _ascii_class(name: str, *, inside: bool) -> str:
    members = _CLASSES[name.lower()]
    if name.isupper():
        return f"[^{members}]"
    # Outside a class, ignoring case must not bring in letters that fold to ASCII, such as U+017F.
    return f"[{members}]" if inside else rf"(?-u:\{name})"
