"""The JSON text of a call's arguments: the one rule by which all endpoints accept it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPE_OR_CONTROL = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)


def escape_controls(text: str) -> str:
    """Escape the control characters, such as line breaks and tabs, in the strings of a JSON text:
    models often write them raw. All other text stays as it is."""
    return _STRING.sub(_escape_in_string, text)


def read_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a text, None if the text is anything else, or is cut, or is nested
    too deeply to be written again."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_arguments(text: str) -> str | None:
    """Return the arguments in a text that a model wrote as a JSON object, with control characters
    escaped. None if the text is not an object."""
    escaped = escape_controls(text)
    return None if read_object(escaped) is None else escaped


def _escape_in_string(string: re.Match[str]) -> str:
    return _ESCAPE_OR_CONTROL.sub(_escape, string[0])


def _escape(match: re.Match[str]) -> str:
    return match[0] if match[0][0] == "\\" else json.dumps(match[0])[1:-1]


def _refuse(name: str) -> float:
    raise ValueError(f"JSON has no {name}.")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large.")
    return number
