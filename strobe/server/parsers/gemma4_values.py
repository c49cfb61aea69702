"""Grammars of the arguments in Gemma 4's tool calls, from a tool's schema."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from strobe.server.parsers.argument_schemas import ANY, read_arguments, target_of
from strobe.server.parsers.call_gemma4 import KEY, QUOTE
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.lark import json_of, literal

MAX_COUNTED_CHARS = 1000
"""Number of characters of a string up to which a grammar counts. A larger minLength is lowered to
it; a larger maxLength is not enforced."""

_UNSUPPORTED = (
    "allOf", "not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties",
    "dependentRequired", "dependentSchemas", "dependencies", "prefixItems", "contains",
    "uniqueItems",
)  # fmt: skip
_SCALARS = ("boolean", "integer", "null", "number")
_ANY = r"""
any: text | scalar | list | object
scalar: %json {"type": ["number", "boolean", "null"]}
list: "[" (any ("," any)*)? "]"
object: "{" (member ("," member)*)? "}"
member: KEY ":" any
"""


class Values:
    """Builds the rules of one grammar's values."""

    def __init__(self, quote: str):
        """quote: the rule for the token around strings."""
        self._quote = quote
        self._rules: list[str] = []
        self._known: dict[tuple[int, str], str] = {}
        self._owner = ""
        self._document: object = {}

    def arguments(self, tool: Tool) -> str:
        """Return a rule for a tool's arguments, braces included. Raises ValueError for a schema
        that the grammar cannot express."""
        call_arguments = read_arguments(tool)
        self._owner = f"The schema of the function {tool.name!r}"
        self._document = call_arguments.document
        for name in ("anyOf", "oneOf", "enum", "const", "$ref"):
            if name in call_arguments.schema:
                raise self._unsupported(name)
        try:
            return self._object({**call_arguments.schema, "type": "object"})
        except RecursionError:
            raise ValueError(f"{self._owner} is nested too deeply.") from None

    def rules(self) -> list[str]:
        """Return the rules that the results of `arguments` refer to."""
        text = rf"text: {self._quote} TEXT {self._quote}"
        return [*self._rules, _ANY, text, rf"KEY: /{KEY.pattern}/", r"TEXT: /(?s:.*)/"]

    def _rule(self, body: str) -> str:
        name = f"value_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: object) -> str:
        """Return a rule for a value of a schema."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise ValueError(
                f"{self._owner} has the schema {reprlib.repr(schema)}, which allows no value or is "
                "not a schema; give an object."
            )
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        for name in _UNSUPPORTED:
            if name in schema:
                raise self._unsupported(name)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                alternatives = schema[name]
                if (
                    not isinstance(alternatives, list)
                    or not alternatives
                    or {"type", "properties"} & set(schema)
                ):
                    raise self._unsupported(name)
                return f"({' | '.join(self._value(way) for way in alternatives)})"
        words = [schema["const"]] if "const" in schema else schema.get("enum")
        if words is not None:
            if not isinstance(words, list) or not words:
                raise ValueError(f"{self._owner} has an enum that is not a list; give its values.")
            return f"({' | '.join(self._word(word) for word in words)})"
        kinds = schema.get("type", sorted(ANY))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if schema.get("nullable") is True:
            kinds = [*kinds, "null"]
        alternatives = [self._kind(kind, schema) for kind in dict.fromkeys(kinds)]
        return f"({' | '.join(alternatives)})"

    def _reference(self, ref: str) -> str:
        try:
            target = target_of(ref, self._document)
        except ValueError as error:
            raise ValueError(f"{self._owner} {error}") from None
        cache_key = (id(self._document), ref)
        if cache_key not in self._known:
            index = len(self._rules)
            self._known[cache_key] = self._rule("any")
            self._rules[index] = f"{self._known[cache_key]}: {self._value(target)}"
        return self._known[cache_key]

    def _kind(self, kind: object, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._string(schema)
        if kind in _SCALARS:
            return json_of({**schema, "type": kind})
        if kind == "array":
            min_items = schema.get("minItems", 0)
            max_items = schema.get("maxItems")
            item = self._rule(self._value(schema.get("items", True)))
            if max_items == 0:
                return '"[" "]"'
            repeats = f"{{{max(min_items - 1, 0)},{'' if max_items is None else max_items - 1}}}"
            items = f'{item} ("," {item}){repeats}'
            return f'"[" {items} "]"' if min_items else f'"[" ({items})? "]"'
        if kind == "object":
            return self._object(schema)
        raise ValueError(f"{self._owner} has the type {kind!r}; give one of {', '.join(ANY)}.")

    def _string(self, schema: Mapping[str, Any]) -> str:
        min_length = min(schema.get("minLength", 0), MAX_COUNTED_CHARS)
        max_length = schema.get("maxLength")
        max_length = "" if max_length is None or max_length > MAX_COUNTED_CHARS else max_length
        if not min_length and max_length == "":
            return "text"
        return rf"{self._quote} /(?s:.){{{min_length},{max_length}}}/ {self._quote}"

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for an object, its members sorted by name as in the chat template."""
        for name in _UNSUPPORTED:
            if name in schema:
                raise self._unsupported(name)
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        additional = schema.get("additionalProperties", True)
        if not properties and not required:
            if additional is False:
                return '"{" "}"'
            member = self._rule(f'KEY ":" {self._value(additional)}')
            return f'"{{" ({member} ("," {member})*)? "}}"'
        # first: the members from a key on if none precedes them; remainder: if one does.
        first = remainder = '""'
        for key in sorted({*properties, *required}, key=str.lower, reverse=True):
            member = f"{self._key(key)} {self._value(properties.get(key, additional))}"
            value = self._rule(member)
            following = remainder
            if key in required:
                first = f"{value} {following}"
                remainder = f'"," {value} {following}'
            else:
                first = f"{value} {following} | {first}"
                remainder = f'("," {value})? {following}'
            first = self._rule(first)
            remainder = self._rule(remainder)
        return f'"{{" {first} "}}"'

    def _key(self, key: str) -> str:
        if not KEY.fullmatch(key) or key != key.strip():
            raise ValueError(
                f"{self._owner} has the parameter {reprlib.repr(key)}, which cannot be read back "
                "from a gemma4 tool call; leave out quotes, brackets, commas, colons, <, > and "
                "space at the ends."
            )
        return literal(key + ":")

    def _word(self, word: object) -> str:
        """Return a rule for exactly this value."""
        if isinstance(word, str):
            if QUOTE in word:
                raise ValueError(f"{self._owner} has a value with {QUOTE} in it; leave it out.")
            return f"{self._quote} {literal(word)} {self._quote}" if word else f"{self._quote} " * 2
        if isinstance(word, list):
            inner = ' "," '.join(map(self._word, word))
            return f'"[" {inner} "]"'
        if isinstance(word, Mapping):
            ordered = sorted(word, key=str.lower)
            inner = ' "," '.join(f"{self._key(key)} {self._word(word[key])}" for key in ordered)
            return f'"{{" {inner} "}}"'
        return literal(json.dumps(word))

    def _unsupported(self, name: str) -> ValueError:
        return ValueError(
            f"{self._owner} has {name}, which cannot be enforced at its place in a gemma4 tool "
            "call; express it by properties, required, type and items."
        )
