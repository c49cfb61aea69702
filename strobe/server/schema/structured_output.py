"""The structured output constraint, in the many fields that clients use for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import ConfigDict, Field

from strobe.grammars.json_schema import enforceable
from strobe.grammars.lark_text import schemas_in
from strobe.grammars.rules import text_without
from strobe.server.schema.base import FieldWarnings, RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    FieldNames,
    short_json,
)
from strobe.server.schema.structural_tags import (
    NewerStructuralTag,
    OlderStructuralTag,
    StructuralTag,
    StructuralTagOrText,
    structural_tag_model,
)
from strobe.server.schema.values import Flag, Must, OneOf, OrJson, SomeText, Text

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

SchemaOrText = Annotated[
    dict[str, Any],
    OrJson("a JSON schema"),
    Must("a JSON schema", "send an object or a JSON string", if_missing="the request needs it"),
]
Choices = Annotated[list[SomeText], Field(min_length=1), Must("a list of one or more strings")]


class Constraint(NamedTuple):
    """A constraint's kind, a field of StructuredOutputs, and its value. source: the request's field
    that holds it."""

    source: str
    kind: str
    value: Any


class AnswerFormat(Protocol):
    """The form of an answer in text, as an API states it."""

    def constraint(self, source: str) -> Constraint | None:
        """The constraint, None for a free text. source: the request's field that holds it."""
        ...


KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def _only(kind: str) -> dict[str, Any]:
    """The part of the JSON schema that says that a kind is the only one."""
    fields: dict[str, Any] = {name: {"type": "null"} for name in KINDS if name != kind}
    return {"required": [kind], "properties": {**fields, kind: {"not": {"enum": [None, False]}}}}


class StructuredOutputs(RequestObject):
    """Exactly one constraint. false is the same as null."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_only(kind) for kind in KINDS]})
    schema_key: ClassVar[str] = "structured_outputs"

    json_: SchemaOrText | None = Field(None, alias="json")
    json_object: Flag | None = None
    regex: SomeText | None = None
    choice: Choices | None = None
    grammar: SomeText | None = None
    structural_tag: StructuralTagOrText | None = None

    @classmethod
    def split(cls, data: object, warnings: FieldWarnings) -> dict[str, Any]:
        fields = super().split(data, warnings)
        fields = {name: value for name, value in fields.items() if value is not False}
        if len(fields) != 1:
            problem = f"holds {' and '.join(fields)}" if fields else f"is {short_json(data)}"
            raise FieldError(
                f"{HERE} {problem}, but must hold exactly one of {', '.join(KINDS)}.", HERE
            )
        return fields

    def constraint(self, source: str) -> Constraint:
        (kind,) = self.sent
        value = self.json_ if kind == "json" else getattr(self, kind)
        if isinstance(value, StructuralTag):
            value = value.tags()
        return Constraint(source, kind, value)


class PlainFormat(RequestObject):
    """Text without a constraint, or any JSON object."""

    schema_key: ClassVar[str] = "response_format"

    type: Literal["text", "json_object"]

    @classmethod
    def split(cls, data: object, warnings: FieldWarnings) -> dict[str, Any]:
        if isinstance(data, Mapping) and data.get("json_schema") is not None:
            raise FieldError(
                f'{HERE}.json_schema is set together with the type "{data["type"]}"; '
                'give the type "json_schema".',
                f"{HERE}.json_schema",
            )
        return super().split(data, warnings)

    def constraint(self, source: str) -> Constraint | None:
        return Constraint(source, "json_object", True) if self.type == "json_object" else None


class NamedSchema(RequestObject):
    """A JSON schema."""

    schema_key: ClassVar[str] = "json_schema"

    name: Text | None = None
    schema_: SchemaOrText = Field(alias="schema")
    strict: Flag | None = None


class SchemaFormat(RequestObject):
    """JSON that follows a schema."""

    schema_key: ClassVar[str] = "response_format"

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def constraint(self, source: str) -> Constraint:
        return Constraint(source, "json", self.json_schema.schema_)


class PlainTextFormat(RequestObject):
    """A text.format of /v1/responses without a schema."""

    schema_key: ClassVar[str] = "json_schema"

    type: Literal["text", "json_object"]

    def constraint(self, source: str) -> Constraint | None:
        return Constraint(source, "json_object", True) if self.type == "json_object" else None


class SchemaTextFormat(NamedSchema):
    """A text.format of /v1/responses with a schema."""

    type: Literal["json_schema"]

    def constraint(self, source: str) -> Constraint:
        return Constraint(source, "json", self.schema_)


_TEXT_TYPES = "text, json_object and json_schema"
_TYPES = "text, json_object, json_schema and structural_tag"


def _format_type(value: Mapping[str, Any], types: str) -> str:
    """Return the type of a format. types: the possible ones. Raises FieldError."""
    kind = value.get("type")
    if kind is None:
        raise FieldError(
            f"{HERE}.type is missing; the request needs it.",
            f"{HERE}.type",
            "missing_required_parameter",
        )
    if not isinstance(kind, str) or kind not in types.replace(" and ", ", ").split(", "):
        raise FieldError(
            f"{HERE}.type is {short_json(kind)}, which is not supported; the types are {types}.",
            f"{HERE}.type",
            "unsupported_parameter" if kind == "structural_tag" else "invalid_value",
        )
    return kind


def _response_format(value: Mapping[str, Any]) -> type[RequestObject]:
    kind = _format_type(value, _TYPES)
    if kind == "structural_tag":
        return structural_tag_model(value)
    return SchemaFormat if kind == "json_schema" else PlainFormat


def _text_format(value: Mapping[str, Any]) -> type[RequestObject]:
    kind = _format_type(value, _TEXT_TYPES)
    return SchemaTextFormat if kind == "json_schema" else PlainTextFormat


ResponseFormat = Annotated[
    PlainFormat | SchemaFormat | OlderStructuralTag | NewerStructuralTag,
    OneOf(choose=_response_format, requirement=f"an object with a type; the types are {_TYPES}"),
]
TextFormat = Annotated[
    PlainTextFormat | SchemaTextFormat,
    OneOf(choose=_text_format, requirement=f"an object with a type; the types are {_TEXT_TYPES}"),
]


def read_constraint(fields: Mapping[str, Any], names: FieldNames) -> Constraint | None:
    """Return the request's constraint, None if it has none. fields: the request's fields that are
    in SOURCES; names: this API's names of them. Raises FieldError for more than one constraint."""
    constraints: list[Constraint] = []
    for source in SOURCES:
        if source not in fields:
            continue
        constraint = _constraint(source, fields[source])
        if constraint is not None:
            constraints.append(constraint)
    if len(constraints) > 1:
        first = names[constraints[0].source]
        second = names[constraints[1].source]
        raise FieldError(
            f"{second} is set together with {first}, but an answer follows one constraint; leave "
            "one of them out.",
            second,
        )
    return constraints[0] if constraints else None


def _constraint(source: str, value: Any) -> Constraint | None:
    if source == "bad_words":
        return Constraint(source, "grammar", text_without(value)) if value else None
    if source in SINGLE_FIELDS:
        return Constraint(source, SINGLE_FIELDS[source], value)
    if isinstance(value, StructuralTag):
        return Constraint(source, "structural_tag", value.tags())
    return value.constraint(source)


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
