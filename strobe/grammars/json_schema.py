"""JSON schemas in the form that llguidance enforces. Imports no torch.

llguidance refuses a schema for each keyword that it cannot enforce. Here such keywords are replaced
by others where that says the same, and otherwise dropped and named: the rest is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from strobe.grammars.json_depth import json_depth

_FORMATS = frozenset((
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
))  # fmt: skip
"""Formats that llguidance enforces; all others are annotations."""

_DATA = ("const", "default", "examples")
"""Keywords whose value may be null."""
_NESTED = (
    "additionalItems", "additionalProperties", "items", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTED = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
"""Keywords that hold a schema, a list of schemas, and schemas by name, all of them enforced."""
_ANNOTATIONS = frozenset(("$comment", "default", "deprecated", "description", "examples", "title"))

_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_MAX_REFERENCES = 32
"""References followed one after another."""

_MAX_COMPARED = 4000
_MAX_COMPARED_DEPTH = 3
"""Comparisons of two schemas, and their depth."""

_OPEN_LEVELS = 4
_SPACES = 4
"""Levels of indentation for a value that the schema lets nest as deep as it likes, and the spaces
of one level."""


class Enforced(NamedTuple):
    """A schema, and the names of the keywords in it that the original has and it does not
    enforce."""

    schema: Any
    dropped: tuple[str, ...] = ()


def enforceable(schema: object) -> Enforced:
    """Return the schema in a form that llguidance enforces. Invalid parts stay as they are, for
    llguidance to reject."""
    reader = _Reader(schema)
    return Enforced(reader.read(schema), tuple(reader.dropped))


def with_whitespace(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an enforceable schema whose JSON may be indented, unless it has options for whitespace
    of its own."""
    options = schema.get("x-guidance", {})
    if isinstance(options, Mapping):
        whitespace = {} if _WHITESPACE_OPTIONS & set(options) else _whitespace(schema)
        options = {"coerce_one_of": True, **whitespace, **options}
    return {**schema, "x-guidance": options}


_WHITESPACE_OPTIONS = {"whitespace_pattern", "whitespace_flexible"}


def _whitespace(schema: Mapping[str, Any]) -> dict[str, str]:
    """Return the option for whitespace between the tokens of JSON: a space, or a line break and the
    indentation of the schema's depth. With more, a model that is forced into unlikely JSON may
    write whitespace for ever."""
    levels = _Nesting(schema).levels(schema)
    return {"whitespace_pattern": f"\\n( {{0,{levels * _SPACES}}}|\\t{{0,{levels}}})| ?"}


class _Reader:
    """Rewrites the parts of one document."""

    def __init__(self, document: object):
        self.document = document
        self.dropped: dict[str, None] = {}
        self._compared = 0
        self._known_values: dict[int, tuple[Any, dict[str, None] | None]] = {}

    def read(self, schema: object) -> object:
        """Return an enforceable schema."""
        if not isinstance(schema, Mapping):
            return schema
        fields = _without_nulls(schema)
        for name, value in fields.items():
            if name in _LISTED and isinstance(value, list):
                fields[name] = [self.read(part) for part in value]
            elif name in _NAMED and isinstance(value, Mapping):
                fields[name] = {key: self.read(part) for key, part in value.items()}
            elif name in _NESTED:
                fields[name] = self.read(value)
        self._format(fields)
        self._nullable(fields)
        self._property_names(fields)
        self._items(fields)
        self._unevaluated(fields)
        self._conditions(fields)
        self._one_of(fields)
        return self._not(fields)

    def _drop(self, name: str) -> None:
        self.dropped[name] = None

    def _format(self, fields: dict[str, Any]) -> None:
        name = fields.get("format")
        if isinstance(name, str) and name not in _FORMATS:
            del fields["format"]
            self._drop("format")

    def _nullable(self, fields: dict[str, Any]) -> None:
        """OpenAPI's word for a value that may also be null."""
        if fields.get("nullable") is not True:
            return
        types, values, choices = (fields.get(name) for name in ("type", "enum", "anyOf"))
        if isinstance(types, str):
            fields["type"] = [types, "null"] if types != "null" else types
        elif isinstance(types, list) and "null" not in types:
            fields["type"] = [*types, "null"]
        elif types is None and isinstance(choices, list) and {"type": "null"} not in choices:
            fields["anyOf"] = [*choices, {"type": "null"}]
        if isinstance(values, list) and None not in values:
            fields["enum"] = [*values, None]

    def _property_names(self, fields: dict[str, Any]) -> None:
        if "propertyNames" not in fields:
            return
        names = _without_nulls(self._target(fields.pop("propertyNames")))
        extra = fields.get("additionalProperties", True)
        properties = _mapping(fields.get("properties"))
        has_patterns = bool(fields.get("patternProperties"))
        if names is True or extra is False:
            return
        rules = {k: v for k, v in _mapping(names).items() if k not in _ANNOTATIONS}
        if rules.get("type") == "string":
            del rules["type"]
        if isinstance(names, Mapping) and not rules:
            return
        values = _values(rules)
        pattern = _name_pattern(rules)
        if values is not None and not has_patterns:
            keys = [json.loads(value) for value in values]
            listed = {key: properties.get(key, extra) for key in keys if isinstance(key, str)}
            fields |= {"properties": listed, "additionalProperties": False}
        elif pattern is not None and not has_patterns and (not properties or extra is True):
            fields |= {"patternProperties": {pattern: extra}, "additionalProperties": False}
        else:
            self._drop("propertyNames")

    def _items(self, fields: dict[str, Any]) -> None:
        """Rewrite uniqueItems and contains."""
        unique = fields.pop("uniqueItems", False)
        max_items = fields.get("maxItems")
        if unique is not False and max_items not in (0, 1):
            self._drop("uniqueItems")
        min_contains = fields.pop("minContains", 1)
        max_contains = fields.pop("maxContains", None)
        if "contains" not in fields:
            return
        part = _without_nulls(fields.pop("contains"))
        min_items = fields.get("minItems", 0)
        if (
            isinstance(min_contains, int)
            and isinstance(min_items, int)
            and min_contains > min_items
        ):
            fields["minItems"] = min_contains
        has_only_those = part in (True, {}) or (
            "prefixItems" not in fields and part == fields.get("items")
        )
        if has_only_those and max_contains is not None:
            fields["maxItems"] = max_contains if max_items is None else min(max_contains, max_items)
        if not has_only_those and (min_contains != 0 or max_contains is not None):
            self._drop("contains")

    def _unevaluated(self, fields: dict[str, Any]) -> None:
        """Read unevaluated parts as additional ones where nothing else could evaluate them."""
        others = {"$ref", "allOf", "anyOf", "else", "if", "oneOf", "then"} & set(fields)
        for name, twin in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if name not in fields:
                continue
            value = fields.pop(name)
            if twin in fields or value in (True, {}):
                continue
            if others:
                self._drop(name)
            else:
                fields[twin] = value

    def _conditions(self, fields: dict[str, Any]) -> None:
        condition = fields.pop("if", True)
        branches = fields.pop("then", True), fields.pop("else", True)
        if condition is not True and branches != (True, True):
            self._drop("if")
        for name in ("dependencies", "dependentRequired", "dependentSchemas"):
            if fields.pop(name, None):
                self._drop(name)

    def _one_of(self, fields: dict[str, Any]) -> None:
        """Name oneOf unless no value fits two of its schemas: it is enforced as anyOf."""
        branches = fields.get("oneOf")
        if not isinstance(branches, list):
            return
        types = self._types(fields, without="oneOf")
        for i, branch in enumerate(branches):
            for earlier in branches[:i]:
                if not self._is_disjoint(earlier, branch, types, _MAX_COMPARED_DEPTH):
                    self._drop("oneOf")
                    return

    def _not(self, fields: dict[str, Any]) -> object:
        """Return the schema without `not`."""
        if "not" not in fields:
            return fields
        banned = _without_nulls(fields.pop("not"))
        if banned is False:
            return fields
        if banned in (True, {}):
            return False
        target = self._target(banned)
        rules = {k: v for k, v in _mapping(target).items() if k not in _ANNOTATIONS}
        banned_values = _values(rules)
        values = _values(fields)
        if set(rules) == {"type"}:
            types = self._types(fields, without="")
            if (left := _without_types(types, rules["type"])) is not None:
                return fields | {"type": left} if left else False
        elif len(rules) == 1 and banned_values is not None and values is not None:
            fields.pop("const", None)
            left_values = [json.loads(value) for value in values if value not in banned_values]
            return fields | {"enum": left_values} if left_values else False
        self._drop("not")
        return fields

    def _target(self, schema: object) -> object:
        """Return the schema that a reference without other keywords leads to; without a target, the
        reference."""
        for _ in range(_MAX_REFERENCES):
            rules = {k for k in _mapping(schema) if k not in _ANNOTATIONS}
            if rules != {"$ref"}:
                break
            target = _resolve(_mapping(schema)["$ref"], self.document)
            if target is None:
                break
            schema = target
        return schema

    def _types(
        self, schema: object, without: str, depth: int = _MAX_COMPARED_DEPTH
    ) -> frozenset[str]:
        """Return all JSON types that a schema may allow; a number may be whole."""
        schema = self._target(schema)
        if schema is False:
            return frozenset()
        fields = _mapping(schema)
        types = _TYPES
        values = self._values(fields)
        if values is not None:
            return frozenset(map(_json_type, values))
        named = fields.get("type")
        if isinstance(named, str | list):
            listed = [named] if isinstance(named, str) else named
            types = frozenset(name for name in listed if isinstance(name, str))
            types |= {"integer"} if "number" in types else set()
        for name in ("anyOf", "oneOf"):
            parts = fields.get(name)
            if name != without and isinstance(parts, list) and depth:
                of_parts = [self._types(part, "", depth - 1) for part in parts[:_MAX_REFERENCES]]
                if len(parts) <= _MAX_REFERENCES:
                    types &= frozenset[str]().union(*of_parts)
        return types

    def _values(self, schema: object) -> dict[str, None] | None:
        """Return `_values` of a schema, computed once."""
        if id(schema) not in self._known_values:
            self._known_values[id(schema)] = schema, _values(_mapping(schema))
        return self._known_values[id(schema)][1]

    def _is_disjoint(self, a: object, b: object, types: frozenset[str], depth: int) -> bool:
        """Whether no value of the types fits both schemas, as far as types, values, required and
        undeclared properties say."""
        self._compared += 1
        if self._compared > _MAX_COMPARED:
            return False
        a = self._target(a)
        b = self._target(b)
        of_a = self._values(a)
        of_b = self._values(b)
        if of_a is not None and of_b is not None:
            return of_a.keys().isdisjoint(of_b)
        common = types & self._types(a, "") & self._types(b, "")
        if not common:
            return True
        if common != {"object"} or not depth:
            return False
        required = [
            *_sequence(_mapping(a).get("required")),
            *_sequence(_mapping(b).get("required")),
        ]
        return any(
            self._is_disjoint(_property(a, name), _property(b, name), _TYPES, depth - 1)
            for name in required
            if isinstance(name, str)
        )


class _Nesting:
    """The depth to which the values of a document's schemas are nested."""

    def __init__(self, document: object):
        self.document = document
        self._levels: dict[str, int] = {}
        self._num_open = 0

    def levels(self, schema: object) -> int:
        """Return the levels of objects and lists that the schema describes; _OPEN_LEVELS for any
        value, and for a schema within itself."""
        fields = _mapping(schema)
        if not fields:
            return 0 if schema is False else _OPEN_LEVELS
        values = _values(fields)
        if values is not None:
            return max(map(json_depth, values), default=0)
        levels = [self._of_reference(fields["$ref"])] if "$ref" in fields else [0]
        for name in ("allOf", "anyOf", "oneOf"):
            levels += map(self.levels, _sequence(fields.get(name)))
        containers = _containers(fields)
        if "object" in containers:
            named = [fields.get(name) for name in ("properties", "patternProperties")]
            parts = [part for schemas in named for part in _mapping(schemas).values()]
            if "additionalProperties" in fields or not parts:
                parts.append(fields.get("additionalProperties", True))
            levels += [1 + self.levels(part) for part in parts]
        if "array" in containers:
            parts = [*_sequence(fields.get("prefixItems"))]
            if "items" in fields or not parts:
                parts.append(fields.get("items", True))
            levels += [1 + self.levels(part) for part in parts]
        return max(levels)

    def _of_reference(self, reference: object) -> int:
        if not isinstance(reference, str) or self._num_open == _MAX_REFERENCES:
            return _OPEN_LEVELS
        if reference not in self._levels:
            self._levels[reference] = _OPEN_LEVELS  # of a schema within itself
            self._num_open += 1
            self._levels[reference] = self.levels(_resolve(reference, self.document))
            self._num_open -= 1
        return self._levels[reference]


def _containers(fields: Mapping[str, Any]) -> set[str]:
    """Return which of an object and a list a schema itself describes."""
    named = fields.get("type")
    types = {named} if isinstance(named, str) else set(map(str, _sequence(named)))
    if types:
        return {"object", "array"} & types
    described = set[str]()
    if {"properties", "additionalProperties", "patternProperties"} & set(fields):
        described.add("object")
    if {"items", "prefixItems"} & set(fields):
        described.add("array")
    leads_elsewhere = {"$ref", "allOf", "anyOf", "oneOf"} & set(fields)
    return described if described or leads_elsewhere else {"object", "array"}


def _resolve(reference: object, document: Any) -> Any:
    """Return the target of a reference into the document, None without one."""
    if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
        return None
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        try:
            document = document[int(name) if isinstance(document, list) else name]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return document


def _property(schema: object, name: str) -> object:
    """Return the schema of a property, declared or not."""
    fields = _mapping(schema)
    patterns = _mapping(fields.get("patternProperties"))
    undeclared = True if patterns else fields.get("additionalProperties", True)
    return _mapping(fields.get("properties")).get(name, undeclared)


def _values(fields: Mapping[str, Any]) -> dict[str, None] | None:
    """Return the values that const or enum allows as JSON texts, None for all."""
    listed = [fields["const"]] if "const" in fields else fields.get("enum")
    if not isinstance(listed, list):
        return None
    try:
        return {json.dumps(value, sort_keys=True): None for value in listed}
    except (TypeError, ValueError):
        return None


def _json_type(text: str) -> str:
    """Return the type of a JSON text."""
    by_start = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean",
                "n": "null"}  # fmt: skip
    return by_start.get(text[0], "integer" if text.lstrip("-").isdigit() else "number")


def _without_types(types: frozenset[str], banned: object) -> list[str] | None:
    """Return the types without the banned ones; None if types do not say so, as for numbers that
    are not whole."""
    listed = {banned} if isinstance(banned, str) else set(map(str, _sequence(banned)))
    if "number" in listed:
        listed.add("integer")
    elif "integer" in listed and "number" in types:
        return None
    left = types - listed
    return sorted(left - {"integer"} if "number" in left else left)


def _name_pattern(rules: Mapping[str, Any]) -> str | None:
    """Return a regular expression for the names that these keywords allow, None if there is
    none."""
    if set(rules) == {"pattern"} and isinstance(rules["pattern"], str):
        return rules["pattern"]
    if not rules or not set(rules) <= {"minLength", "maxLength"}:
        return None
    shortest = rules.get("minLength", 0)
    longest = rules.get("maxLength", "")
    return rf"^[\s\S]{{{shortest},{longest}}}$"


def _without_nulls(schema: object) -> Any:
    """Return a schema without keywords that are null: they are the same as absent ones."""
    if not isinstance(schema, Mapping):
        return schema
    return {name: value for name, value in schema.items() if value is not None or name in _DATA}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
