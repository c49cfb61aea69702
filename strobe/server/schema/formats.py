"""Reads the structured output constraint from the many fields that clients use for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json

from strobe.grammars.json_schema import enforceable
from strobe.grammars.lark_text import schemas_in
from strobe.grammars.rules import text_without
from strobe.server.openai.protocol.request_errors import FieldError, invalid_value, short_json
from strobe.server.schema.base import FieldWarnings, object_schema
from strobe.server.schema.structural_tags import TAGS_SCHEMA, read_tags
from strobe.server.schema.values import TEXT_SCHEMA, texts

RESPONSE_FORMAT_FIELDS = ("type", "json_schema")
JSON_SCHEMA_FIELDS = ("name", "schema", "strict")
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")

SINGLE_FIELDS: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
}
"""Fields that hold one kind of constraint: vLLM's older ones and SGLang's."""

SOURCES = ("response_format", "structured_outputs", *SINGLE_FIELDS, "bad_words")

_TYPES = ("text", "json_object", "json_schema")

_JSON_TEXT: dict[str, Any] = {
    "type": "string",
    "pattern": r"^[ \t\r\n]*\{[\s\S]*\}[ \t\r\n]*$",
    "contentMediaType": "application/schema+json",
}
VALUE_SCHEMAS: Mapping[str, dict[str, Any]] = {
    "json": {"anyOf": [{"type": "object"}, _JSON_TEXT]},
    "json_object": {"const": True},
    "regex": TEXT_SCHEMA,
    "choice": {"type": "array", "minItems": 1, "items": TEXT_SCHEMA},
    "grammar": TEXT_SCHEMA,
    "structural_tag": {"anyOf": [TAGS_SCHEMA, _JSON_TEXT]},
}
"""The JSON schema of each kind's value."""

_OFF: dict[str, Any] = {"enum": [None, False]}
STRUCTURED_OUTPUTS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        object_schema(
            {**dict.fromkeys(KINDS, _OFF), kind: VALUE_SCHEMAS[kind]},
            "structured_outputs",
            (kind,),
        )
        for kind in KINDS
    ]
}

_FREE: dict[str, Any] = {"enum": ["text", "json_object"]}
_NAMED: dict[str, Any] = {
    "name": {"type": "string"},
    "schema": VALUE_SCHEMAS["json"],
    "strict": {"type": "boolean"},
}
RESPONSE_FORMAT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        object_schema({"type": _FREE}, "response_format", ("type",)),
        object_schema(
            {
                "type": {"const": "json_schema"},
                "json_schema": object_schema(_NAMED, "json_schema", ("schema",)),
            },
            "response_format",
            ("type", "json_schema"),
        ),
        TAGS_SCHEMA,
    ]
}
TEXT_FORMAT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        object_schema({"type": _FREE}, "json_schema", ("type",)),
        object_schema(
            {"type": {"const": "json_schema"}, **_NAMED}, "json_schema", ("type", "schema")
        ),
    ]
}
"""The JSON schema of text.format of /v1/responses."""


class Constraint(NamedTuple):
    """A constraint's kind, one of KINDS, and its value. source: the request's field that holds
    it."""

    source: str
    kind: str
    value: Any


def read_constraint(fields: Mapping[str, Any], warnings: FieldWarnings) -> Constraint | None:
    """Return the request's constraint, None if it has none.

    fields: the request's fields that are in SOURCES. warnings: gets a sentence for each field
    without effect. Raises FieldError, also for more than one constraint.
    """
    constraints: list[Constraint] = []
    for source in SOURCES:
        if source not in fields:
            continue
        constraint = _read(source, fields[source], warnings)
        if constraint is not None:
            constraints.append(constraint)
    if len(constraints) > 1:
        raise FieldError(
            f"{constraints[1].source} is set together with {constraints[0].source}, but an answer "
            "follows one constraint; leave one of them out.",
            constraints[1].source,
        )
    return constraints[0] if constraints else None


def unenforced(constraint: Constraint) -> list[str]:
    """Return the names of the schemas' keywords that are not enforced."""
    kind = constraint.kind
    value = constraint.value
    contents: list[Any] = [value]
    if kind == "structural_tag":
        contents = [tag.content for tag in value]
        contents = [part[1] if isinstance(part, tuple) else part for part in contents]
    schemas = list[Any]()
    if kind in ("json", "grammar", "structural_tag"):
        for content in contents:
            schemas += schemas_in(content) if isinstance(content, str) else [content]
    names = [name for schema in schemas for name in enforceable(schema).dropped]
    return list(dict.fromkeys(names))


def _read(source: str, value: Any, warnings: FieldWarnings) -> Constraint | None:
    if source == "response_format":
        return _response_format(value, warnings)
    if source == "structured_outputs":
        return _structured_outputs(value, warnings)
    if source == "bad_words":
        return Constraint(source, "grammar", text_without(value)) if value else None
    kind = SINGLE_FIELDS[source]
    return Constraint(source, kind, _value(kind, value, source))


def _structured_outputs(outputs: object, warnings: FieldWarnings) -> Constraint | None:
    path = "structured_outputs"
    fields = warnings.split(outputs, KINDS, path, path)
    json_object = fields.get("json_object")
    if json_object is not None and not isinstance(json_object, bool):
        raise invalid_value(f"{path}.json_object", json_object, "true or false")
    set_names = [name for name, value in fields.items() if value is not False]
    if len(set_names) != 1:
        problem = f"holds {' and '.join(set_names)}" if set_names else f"is {short_json(outputs)}"
        raise FieldError(
            f"{path} {problem}, but must hold exactly one of {', '.join(KINDS)}.", path
        )
    kind = set_names[0]
    if kind == "structural_tag":
        return Constraint(path, kind, read_tags(fields[kind], f"{path}.{kind}", warnings))
    return Constraint(path, kind, _value(kind, fields[kind], f"{path}.{kind}"))


def _response_format(value: object, warnings: FieldWarnings) -> Constraint | None:
    path = "response_format"
    kind = _format_type(value, path, (*_TYPES, "structural_tag"))
    if kind == "structural_tag":
        return Constraint(path, kind, read_tags(value, path, warnings))
    inner = warnings.split(value, RESPONSE_FORMAT_FIELDS, path, path).get("json_schema")
    if kind != "json_schema":
        if inner is not None:
            raise FieldError(
                f'{path}.json_schema is set together with the type "{kind}"; '
                'give the type "json_schema".',
                f"{path}.json_schema",
            )
        return None if kind == "text" else Constraint(path, "json_object", True)
    if inner is None:
        raise _missing(f"{path}.json_schema")
    inner_path = f"{path}.json_schema"
    fields = warnings.split(inner, JSON_SCHEMA_FIELDS, "json_schema", inner_path)
    return _named_schema(fields, path, inner_path)


def read_text_format(value: object, warnings: FieldWarnings) -> dict[str, Any]:
    """Convert text.format of /v1/responses to a chat's response_format. Raises FieldError."""
    path = "text.format"
    kind = _format_type(value, path, _TYPES)
    known_fields = ("type", *JSON_SCHEMA_FIELDS) if kind == "json_schema" else ("type",)
    fields = warnings.split(value, known_fields, "json_schema", path)
    if kind != "json_schema":
        return {"type": kind}
    _named_schema(fields, path, path)
    del fields["type"]
    return {"type": kind, "json_schema": fields}


def _format_type(value: object, path: str, types: Sequence[str]) -> str:
    listed = f"{', '.join(types[:-1])} and {types[-1]}"
    if not isinstance(value, Mapping):
        raise invalid_value(path, value, "an object with a type", f"the types are {listed}")
    kind = value.get("type")
    if kind is None:
        raise _missing(f"{path}.type")
    if kind not in types:
        raise FieldError(
            f"{path}.type is {short_json(kind)}, which is not supported; the types are {listed}.",
            f"{path}.type",
            "unsupported_parameter" if kind == "structural_tag" else "invalid_value",
        )
    return kind


def _named_schema(fields: Mapping[str, Any], source: str, path: str) -> Constraint:
    if not isinstance(fields.get("name", ""), str):
        raise invalid_value(f"{path}.name", fields["name"], "a string")
    if not isinstance(fields.get("strict", False), bool):
        raise invalid_value(f"{path}.strict", fields["strict"], "true or false")
    if "schema" not in fields:
        raise _missing(f"{path}.schema")
    return Constraint(source, "json", _value("json", fields["schema"], f"{path}.schema"))


def _value(kind: str, value: object, path: str) -> object:
    if kind == "json_object":
        return True
    if kind == "json":
        return _schema(value, path)
    if kind == "choice":
        if not isinstance(value, list | tuple) or not value:
            raise invalid_value(path, value, "a list of one or more strings")
        return list(texts(value, path))
    if not isinstance(value, str) or not value:
        raise invalid_value(path, value, "a string of one or more characters")
    return value


def _schema(value: object, path: str) -> dict[str, Any]:
    """Return a JSON schema that is sent as an object or as JSON text."""
    schema = value
    if isinstance(value, str):
        try:
            schema = from_json(value, allow_inf_nan=False)
        except ValueError as error:
            raise invalid_value(
                path, value, "a JSON schema", f"as JSON it fails: {error}"
            ) from None
    if not isinstance(schema, Mapping):
        raise invalid_value(path, value, "a JSON schema", "send an object or a JSON string")
    return dict(schema)


def _missing(path: str) -> FieldError:
    return FieldError(
        f"{path} is missing; the request needs it.", path, "missing_required_parameter"
    )
