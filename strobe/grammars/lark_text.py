r"""Lark grammars of clients: their regular expressions mean ASCII by \d, \w and \s, and their JSON
schemas are read as others are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from strobe.grammars.regex import ascii_classes

_PIECES = re.compile(
    r"""
    (?P<text> " (?: \\. | [^"\\\n] )* " )
    | (?P<comment> (?: // | \# ) [^\n]* )
    | / (?P<regex> (?: \\. | [^/\\\n] )+ ) / (?P<flags> [a-z]* )
    | (?P<json> %json \s* )
    """,
    re.VERBOSE,
)


def rewrite_lark(grammar: str, convert: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> str:
    """Return a Lark grammar with ASCII classes, and with each JSON schema converted."""
    parts = list[str]()
    position = 0
    while (piece := _PIECES.search(grammar, position)) is not None:
        parts.append(grammar[position : piece.start()])
        position = piece.end()
        text = piece[0]
        if piece["regex"] is not None and "u" not in piece["flags"]:
            text = f"/{ascii_classes(piece['regex'])}/{piece['flags']}"
        elif piece["json"] is not None:
            try:
                schema, position = json.JSONDecoder().raw_decode(grammar, position)
            except ValueError:  # llguidance reports the error
                schema = None
            if isinstance(schema, Mapping):
                text += json.dumps(convert(schema))
            else:
                text = grammar[piece.start() : position]
        parts.append(text)
    parts.append(grammar[position:])
    return "".join(parts)


def schemas_in(grammar: str) -> list[Mapping[str, Any]]:
    """Return the JSON schemas in a Lark grammar."""
    schemas = list[Mapping[str, Any]]()

    def note(schema: Mapping[str, Any]) -> Mapping[str, Any]:
        schemas.append(schema)
        return schema

    rewrite_lark(grammar, note)
    return schemas
