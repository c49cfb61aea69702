"""Reads the types and values of each argument from a tool's JSON schema."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from strobe.server.parsers.call_arguments import escape_controls
from strobe.server.parsers.format_protocols import Tool

ANY = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_PYTHON = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer",
           float: "number", type(None): "null"}  # fmt: skip
_MAX_FORMS = 1000
_MAX_STEPS = 32
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}


@dataclass(frozen=True)
class Form:
    """One alternative of a schema. types: the allowed JSON types; words: the allowed values, None
    for all; minimum, maximum: length of strings in characters."""

    types: frozenset[str] = ANY
    words: tuple[Any, ...] | None = None
    minimum: int = 0
    maximum: int | None = None

    def fits(self, value: object) -> bool:
        """Whether a value has an allowed type and length; `words` are not checked."""
        if not isinstance(value, str):
            return type_of(value) in self.types
        short = self.maximum is None or len(value) <= self.maximum
        return "string" in self.types and short and len(value) >= self.minimum

    def intersect(self, form: Form) -> Form:
        """Return the form of the values that both forms allow; without types if there are none."""
        words = self.words if form.words is None else form.words
        if self.words is not None and form.words is not None:
            words = tuple(word for word in self.words if word in form.words)
        maximum = min((m for m in (self.maximum, form.maximum) if m is not None), default=None)
        merged = Form(
            types=self.types & form.types,
            words=None,
            minimum=max(self.minimum, form.minimum),
            maximum=maximum,
        )
        if words is not None:
            words = tuple(filter(merged.fits, words))
            return Form(
                types=frozenset(map(type_of, words)),
                words=words,
                minimum=merged.minimum,
                maximum=maximum,
            )
        if maximum is not None and merged.minimum > maximum:
            return Form(types=merged.types - {"string"})
        return merged


def type_of(value: Any) -> str:
    """Return the JSON type of a parsed value."""
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else _PYTHON[type(value)]


def as_json(text: str, types: frozenset[str]) -> str:
    """Convert an unquoted value to JSON: as the value that it spells if `types` allow its JSON
    type, else as a string. Python's True, False and None become JSON's, and raw line breaks in its
    strings are escaped."""
    word = _WORDS.get(text.strip().lower(), escape_controls(text.strip()))
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    # A value of no allowed type stays as it is, unless it may be a string.
    fits = type_of(value) in types or "string" not in types
    return word if fits else json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(name)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a tool. schema: the schema of their object; document: the schema that its
    references point into."""

    name: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict[str, Any])
    document: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the declared arguments by name."""
        return self.schema.get("properties", {})

    @property
    def required(self) -> Sequence[str]:
        """The names of the required arguments."""
        return self.schema.get("required", ())

    def schema_of(self, key: str) -> object:
        """The schema of an argument, declared or not."""
        return self.properties.get(key, self.schema.get("additionalProperties", True))

    def forms(self, key: str) -> list[Form]:
        """The forms of an argument. Raises ValueError for an invalid schema."""
        with self._naming(key):
            return _forms(self.schema_of(key), self.document, {})

    def types(self, key: str) -> frozenset[str]:
        """The JSON types of an argument, ANY for an invalid schema."""
        try:
            return types_of(self.forms(key))
        except ValueError:
            return ANY

    def standalone_schema(self, key: str) -> dict[str, Any]:
        """Return an argument's schema with its references' targets copied into `$defs`. Raises
        ValueError for a reference without a target."""
        with self._naming(key):
            definitions: dict[str, Any] = {}
            schema = _relocated(self.schema_of(key), self.document, definitions)
        parts = {str(number): part for number, part in enumerate(definitions.values())}
        return schema | ({"$defs": parts} if parts else {})

    @contextmanager
    def _naming(self, key: str) -> Generator[None]:
        """Put the argument's name in front of errors about its schema."""
        try:
            yield
        except (ValueError, RecursionError) as error:
            reason = "is nested too deeply." if isinstance(error, RecursionError) else error
            owner = f"The parameter {key!r} of the function {self.name!r}"
            raise ValueError(f"{owner} {reason}") from None


def read_arguments(tool: Tool) -> Arguments:
    """Return a tool's arguments. Raises ValueError for an invalid schema."""
    document = schema = tool.parameters or {}
    try:
        for _ in range(_MAX_STEPS):
            if "$ref" not in schema or "properties" in schema:
                break
            schema = target_of(schema["$ref"], document)
            if not isinstance(schema, Mapping):
                raise _invalid("schema", schema, "one of an object")
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise _invalid("properties", properties, "an object with the schema of each parameter")
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise _invalid("required", required, "a list of names")
    except ValueError as error:
        raise ValueError(f"The schema of the function {tool.name!r} {error}") from None
    return Arguments(tool.name, schema, document)


def types_of(forms: Sequence[Form]) -> frozenset[str]:
    """Return the JSON types that any of the forms allows."""
    return frozenset[str]().union(*(form.types for form in forms))


def is_text(types: frozenset[str]) -> bool:
    """Whether a value of these JSON types is a string or null."""
    return "string" in types and types <= {"string", "null"}


def _forms(schema: object, document: object, cache: dict[str, list[Form]]) -> list[Form]:
    """Return the forms of a schema by its type, enum, const, lengths, references and alternatives.
    cache: the forms of references so far; a recursive reference allows any form. Raises
    ValueError."""
    if isinstance(schema, bool):
        return [Form()] if schema else []
    if not isinstance(schema, Mapping):
        raise _invalid("schema", schema, "an object, true or false")
    parts = [[_own_form(schema)]]
    if "$ref" in schema:
        ref = schema["$ref"]
        target = target_of(ref, document)
        if ref not in cache:
            cache[ref] = [Form()]
            cache[ref] = _forms(target, document, cache)
        parts.append(cache[ref])
    for name in ("anyOf", "oneOf", "allOf"):
        if name not in schema:
            continue
        listed = schema[name]
        if not isinstance(listed, list):
            raise _invalid(name, listed, "a list of schemas")
        alternatives = [_forms(branch, document, cache) for branch in listed]
        parts += (
            alternatives if name == "allOf" else [[form for way in alternatives for form in way]]
        )
    forms = [Form()]
    for part in parts:
        if len(forms) * len(part) > _MAX_FORMS:
            raise ValueError(f"has more than {_MAX_FORMS} alternatives; give fewer.")
        forms = [branch.intersect(partner) for branch in forms for partner in part]
    forms = [form for form in forms if form.types]
    return [*forms, Form(types=frozenset(("null",)))] if schema.get("nullable") is True else forms


def _own_form(schema: Mapping[str, Any]) -> Form:
    """Return the form of a schema's own type, enum, const and lengths."""
    types = schema.get("type", list(ANY))
    words = schema.get("enum")
    names = types if isinstance(types, list) else [types]
    if not all(isinstance(name, str) and name in ANY for name in names):
        raise _invalid("type", types, f"one of {', '.join(sorted(ANY))}, or a list of them")
    if "enum" in schema and not isinstance(words, list):
        raise _invalid("enum", words, "a list of values")
    for name in ("minLength", "maxLength"):
        length = schema.get(name, 0)
        if type(length) is not int or length < 0:
            raise _invalid(name, length, "a whole number from 0 on")
    if "number" in names:
        names = [*names, "integer"]
    if "const" in schema:
        words = [schema["const"]]
    form = Form(
        types=frozenset(names),
        words=None,
        minimum=schema.get("minLength", 0),
        maximum=schema.get("maxLength"),
    )
    return form.intersect(Form(words=None if words is None else tuple(words)))


def target_of(ref: object, document: Any) -> Any:
    """Return the target of a reference into a document. Raises ValueError."""
    if not isinstance(ref, str) or not (ref + "/").startswith("#/"):
        raise _invalid("$ref", ref, "one that begins with #/, into the function's parameters")
    for part in ref.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        try:
            document = document[int(name) if isinstance(document, list) else name]
        except (KeyError, IndexError, TypeError, ValueError):
            raise _invalid("$ref", ref, "one to a schema in the function's parameters") from None
    return document


def _relocated(schema: object, document: object, definitions: dict[str, Any]) -> Any:
    """Return a schema whose references point to `#/$defs/N`, N being an index of `definitions`,
    which gets their targets. Raises ValueError."""
    if isinstance(schema, list):
        return [_relocated(part, document, definitions) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    relocated = {name: _relocated(part, document, definitions) for name, part in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        if ref not in definitions:
            definitions[ref] = True  # reserves the index
            definitions[ref] = _relocated(target_of(ref, document), document, definitions)
        relocated["$ref"] = f"#/$defs/{list(definitions).index(ref)}"
    return relocated


def _invalid(name: str, value: object, hint: str) -> ValueError:
    return ValueError(f"has the {name} {reprlib.repr(value)}; give {hint}.")
