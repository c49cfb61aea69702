"""Pieces of grammars in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from strobe.server.parsers.base import Tool

# JSON as chat templates write it: no space but one behind a comma or colon.
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def literal(text: str) -> str:
    """A rule for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, added_tokens: Mapping[str, int]) -> str:
    """A rule for a marker: the token where the tokenizer has one for it, its letters otherwise.

    By id, because llguidance knows an end token by no name. In its eyes every added token between
    angle brackets is special, whatever the tokenizer says, and no letters make one.
    """
    return f"<[{added_tokens[text]}]>" if text in added_tokens else literal(text)


def call_object(tool: Tool, key: str) -> str:
    """A rule for a call as a JSON object with the arguments under this key."""
    name = json.dumps(tool.name, ensure_ascii=False)
    head = '{"name": ' + name + ', "' + key + '": '
    return " ".join((literal(head), arguments(tool), literal("}")))


def arguments(tool: Tool) -> str:
    """A rule for a tool's arguments. Raises ValueError where its schema allows no object."""
    schema: dict[str, Any] = dict(tool.parameters or {})
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ValueError(
            f"The parameters of the function {tool.name!r} have the type {kinds!r}, but arguments "
            'are an object; give "type": "object".'
        )
    return json_of(schema | {"type": "object"})


def json_of(schema: Mapping[str, Any]) -> str:
    """A rule for JSON of a schema, written as chat templates write it."""
    options = schema.get("x-guidance", {})
    writing = {**_WRITING, **options} if isinstance(options, Mapping) else options
    return "%json " + json.dumps({**schema, "x-guidance": writing})
