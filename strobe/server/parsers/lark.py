"""Rules of grammars in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from strobe.server.parsers.format_protocols import Tool

# JSON as chat templates write it: one space after commas and colons, no other space.
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def literal(text: str) -> str:
    """Return a rule for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, added_tokens: Mapping[str, int]) -> str:
    """Return a rule for a marker: its token if the tokenizer has one, else its text.

    The token is named by id, because llguidance does not know end tokens by name. For llguidance
    every added token in angle brackets is special, and its text never matches the token.
    """
    return f"<[{added_tokens[text]}]>" if text in added_tokens else literal(text)


def call_object(tool: Tool, key: str) -> str:
    """Return a rule for a call as a JSON object with the arguments under `key`."""
    name = json.dumps(tool.name, ensure_ascii=False)
    head = '{"name": ' + name + ', "' + key + '": '
    return " ".join((literal(head), arguments(tool), literal("}")))


def arguments(tool: Tool) -> str:
    """Return a rule for a tool's arguments. Raises ValueError if its schema allows no object."""
    schema: dict[str, Any] = dict(tool.parameters or {})
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ValueError(
            f"The parameters of the function {tool.name!r} have the type {kinds!r}, but arguments "
            'are an object; give "type": "object".'
        )
    return json_of(schema | {"type": "object"})


def check_name(tool: Tool, names: re.Pattern[str], form: str, hint: str) -> None:
    """Raise ValueError for a function name that a call of this format cannot hold."""
    if not names.fullmatch(tool.name):
        raise ValueError(
            f"The function name {tool.name!r} cannot be used in a {form} tool call; {hint}."
        )


def check_tokens(texts: Sequence[str], added_tokens: Mapping[str, int], form: str) -> None:
    """Raise ValueError if the tokenizer lacks a token that calls of this format need."""
    for text in texts:
        if text not in added_tokens:
            raise ValueError(
                f"The tokenizer has no token {text}, without which there is no {form} tool call; "
                "choose the tool format of the model's own family."
            )


def json_of(schema: Mapping[str, Any]) -> str:
    """Return a rule for JSON of a schema, with the whitespace of chat templates."""
    options = schema.get("x-guidance", {})
    writing = {**_WRITING, **options} if isinstance(options, Mapping) else options
    return "%json " + json.dumps({**schema, "x-guidance": writing})
