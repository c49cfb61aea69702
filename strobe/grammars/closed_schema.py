"""JSON schemas as Ollama and other servers' grammars read them: an object holds the properties that
it declares, and no others. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NESTED = ("additionalProperties", "items")
_LISTED = ("anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_OTHER_PROPERTIES = (
    "$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties",
    "unevaluatedProperties",
)  # fmt: skip
"""Keywords that may describe more properties of an object than it declares."""


def closed(schema: object) -> object:
    """Return the schema with `additionalProperties: false` in each object that declares properties
    and says nothing about others. Parts of an allOf stay open: each describes some properties of
    the same object. So does an object that requires properties which it does not declare."""
    return _closed(schema, _parts_of_objects(schema, set()))


def _closed(schema: object, open_references: set[str], path: str = "#") -> object:
    """path: reference to the schema. open_references: to the schemas that stay open."""
    if not isinstance(schema, Mapping):
        return schema
    fields: dict[str, Any] = dict(schema)
    for name, value in fields.items():
        if name in _LISTED and isinstance(value, list):
            fields[name] = [_closed(part, open_references) for part in value]
        elif name in _NAMED and isinstance(value, Mapping):
            fields[name] = {
                key: _closed(part, open_references, f"{path}/{name}/{key}")
                for key, part in value.items()
            }
        elif name in _NESTED:
            fields[name] = _closed(value, open_references)
    is_open = path in open_references or any(fields.get(n) is not None for n in _OTHER_PROPERTIES)
    properties = fields.get("properties")
    if isinstance(properties, Mapping) and not is_open and _declares_required(fields):
        fields["additionalProperties"] = False
    return fields


def _declares_required(fields: Mapping[str, Any]) -> bool:
    """Whether an object declares all properties that it requires."""
    required = fields.get("required")
    return not isinstance(required, list) or all(
        isinstance(name, str) and name in fields["properties"] for name in required
    )


def _parts_of_objects(schema: object, references: set[str]) -> set[str]:
    """Collect in `references` the references to a part of an object, in an allOf or next to other
    keywords, and return them."""
    if isinstance(schema, list):
        for part in schema:
            _parts_of_objects(part, references)
    if not isinstance(schema, Mapping):
        return references
    parts = schema.get("allOf")
    if isinstance(parts, list):
        references.update(_reference(part) for part in parts)
    if "properties" in schema:
        references.add(_reference(schema))
        for name in ("anyOf", "oneOf"):
            listed = schema.get(name)
            references.update(_reference(part) for part in listed or () if isinstance(listed, list))
    for part in schema.values():
        _parts_of_objects(part, references)
    return references


def _reference(schema: object) -> str:
    target = schema.get("$ref") if isinstance(schema, Mapping) else None
    return target if isinstance(target, str) else ""
