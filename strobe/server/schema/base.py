"""Base class of all request models: field checks, warnings, and the types of field values."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema, from_json

from strobe.grammars.json_depth import json_depth
from strobe.server.openai.protocol.request_errors import (
    FieldError,
    invalid_value,
    short_json,
    to_field_error,
)
from strobe.server.schema.rules import NO_EFFECT, UNSUPPORTED
from strobe.validation import MAX_INT

_MAX_DEPTH = 200
"""Nesting limit of a body's objects and lists, the same as in pydantic's parser."""
_SCANNED = 1 << 17
"""Number of leading characters of a body in which nesting is counted."""

INDEX = re.compile(r"\[\d+\]")

_ONLY_NULL = {"type": "null"}
"""JSON schema of unknown fields, since null is the same as a missing field."""


class FieldWarnings(list[str]):
    """One sentence for each field or value without effect. lenient: an unknown field is a warning
    instead of an error."""

    def __init__(self, *, lenient: bool = False):
        super().__init__()
        self.lenient = lenient

    def split(
        self, value: object, known_names: Collection[str], schema_key: str, path: str
    ) -> dict[str, Any]:
        """Return an object's known fields without nulls, and add a warning for each field without
        effect.

        schema_key: key of its rules in NO_EFFECT and UNSUPPORTED. path: its path in the request.
        Raises FieldError if `value` is not an object or has an unknown or unsupported field.
        """
        if not isinstance(value, Mapping):
            raise invalid_value(path or None, value, "a JSON object")
        no_effect = NO_EFFECT.get(schema_key, {})
        refused = UNSUPPORTED.get(schema_key, {})
        fields: dict[str, Any] = {}
        for name, item in value.items():
            if item is None:
                continue
            full = f"{path}.{name}" if path else str(name)
            if name in known_names:
                fields[name] = item
            elif (rule := no_effect.get(name)) is not None:
                if not rule.is_neutral(item):
                    self.append(f"{full} has no effect: {rule.reason}.")
            elif (rule := refused.get(name)) is not None:
                if not rule.is_neutral(item):
                    raise FieldError(
                        f"{full} is {short_json(item)}, which is not supported: {rule.reason}.",
                        full,
                        "unsupported_parameter",
                    )
            else:
                near = get_close_matches(str(name)[:80], [*known_names, *no_effect], n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                if not self.lenient:
                    raise FieldError(
                        f"{short_json(str(name))} is not a field of {path or 'this endpoint'}"
                        f"{hint or '; leave it out.'}",
                        full[:200],
                        "unknown_parameter",
                    )
                self.append(
                    f"{full[:200]} has no effect: this server does not know it{hint or '.'}"
                )
        return fields


def _too_deep(body: bytes | str) -> FieldError:
    text = body[:_SCANNED] if isinstance(body, str) else body[:_SCANNED].decode(errors="replace")
    return FieldError(
        f"The body is nested too deeply: {json_depth(text)} levels, at most {_MAX_DEPTH} are read; "
        "nest its objects and lists less.",
        None,
    )


class RequestModel(BaseModel):
    """An object of a request. null is the same as a missing field; no field is silently ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    schema_key: ClassVar[str]
    """Key of its rules in NO_EFFECT and UNSUPPORTED."""
    path: ClassVar[str] = ""
    """Path of the object in the request."""
    ignores_unknown_fields: ClassVar[bool] = False
    """Whether unknown fields are warnings on every server, as on one with --lenient."""

    _warnings: FieldWarnings = PrivateAttr(default_factory=FieldWarnings)

    @classmethod
    def read(cls, body: bytes | str | Mapping[str, Any], *, lenient: bool = False) -> Self:
        """Parse and check a request. lenient: unknown fields are warnings. Raises FieldError, and
        nothing else, for an invalid body."""
        data: Any = body
        if isinstance(body, bytes | str):
            try:
                data = from_json(body, allow_inf_nan=False)
            except ValueError as error:
                if "recursion limit" in str(error):
                    raise _too_deep(body) from None
                raise FieldError(
                    f"The body is not JSON: {error}; send one JSON object.", None, "invalid_json"
                ) from None
        try:
            return cls.model_validate(data, context={"lenient": lenient})
        except ValidationError as error:
            raise to_field_error(error) from None

    @model_validator(mode="wrap")
    @classmethod
    def _validate(
        cls, data: object, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        if isinstance(data, cls):
            return data
        is_lenient = cls.ignores_unknown_fields or bool((info.context or {}).get("lenient"))
        warnings = FieldWarnings(lenient=is_lenient)
        self = handler(warnings.split(data, cls.model_fields, cls.schema_key, cls.path))
        self._warnings = warnings
        self.check()
        return self

    def check(self) -> None:
        """Check fields that depend on each other. Raises FieldError."""

    def is_set(self, name: str) -> bool:
        """Whether the client sent a field with a value other than null."""
        return name in self.model_fields_set

    def warnings(self) -> list[str]:
        """One sentence for each field without effect, and one for all items of a list."""
        first: dict[str, str] = {}
        for warning in self._warnings:
            first.setdefault(INDEX.sub("[]", warning), warning)
        return list(first.values())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add the fields without effect and the unsupported ones to the OpenAPI schema."""
        reference = handler(schema)
        page: dict[str, Any] = handler.resolve_ref_schema(reference)
        page |= object_schema(page.get("properties", {}), cls.schema_key, page.get("required", ()))
        if cls.ignores_unknown_fields:
            open_page = with_unknown_fields(page)
            page.clear()
            page |= open_page
        return reference


def with_unknown_fields(part: object) -> Any:
    """Return a part of a JSON schema whose objects from `object_schema` allow further fields."""
    if isinstance(part, list):
        return [with_unknown_fields(item) for item in part]
    if not isinstance(part, dict):
        return part
    closes = part.get("additionalProperties") == _ONLY_NULL
    return {
        name: with_unknown_fields(value)
        for name, value in part.items()
        if not closes or name != "additionalProperties"
    }


def object_schema(
    properties: Mapping[str, Any], schema_key: str = "", required: Collection[str] = ()
) -> dict[str, Any]:
    """The JSON schema of an object that `FieldWarnings.split` reads. properties: its known fields;
    schema_key: key of its rules. A field that is not required may be null."""
    shown_fields: dict[str, Any] = {}
    for name, rule in NO_EFFECT.get(schema_key, {}).items():
        shown_fields[name] = {"description": f"No effect: {rule.reason}."}
    for name, rule in UNSUPPORTED.get(schema_key, {}).items():
        why = f"Not supported: {rule.reason}."
        shown_fields[name] = {"enum": [None, *rule.neutral_values], "description": why}
    known_fields = {name: s if name in required else _nullable(s) for name, s in properties.items()}
    shape: dict[str, Any] = {
        "type": "object",
        "properties": {
            **known_fields,
            **{n: s for n, s in shown_fields.items() if n not in known_fields},
        },
        "additionalProperties": _ONLY_NULL,
    }
    return {**shape, "required": list(required)} if required else shape


def _nullable(shape: Mapping[str, Any]) -> Mapping[str, Any]:
    kinds = [kind.get("type") for kind in shape.get("anyOf", [shape])]
    takes_null = "null" in kinds or None in shape.get("enum", ()) or not shape
    return shape if takes_null else {"anyOf": [shape, {"type": "null"}]}


@dataclass(frozen=True)
class Bounds:
    """A number's inclusive bounds; with `above` the lower one is exclusive."""

    low: float
    high: float
    hint: str
    above: bool = False

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        low = "exclusiveMinimum" if self.above else "minimum"
        return {**handler(schema), low: self.low, "maximum": self.high}

    def _check(self, value: float, info: ValidationInfo) -> float:
        if not self.low <= value <= self.high or (self.above and value == self.low):
            between = " and at most" if self.above else " to"
            must = f"{'above' if self.above else 'from'} {_plain(self.low)}{between}"
            raise invalid_value(info.field_name, value, f"{must} {_plain(self.high)}", self.hint)
        return value


def _plain(number: float) -> str:
    return f"{number:g}" if abs(number) < 1e6 else str(int(number))


def check_int(value: object) -> Any:
    """Convert a whole float to int, since 2.0 and 2 are the same number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(check_int)]


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def token_ids(value: object, path: str | None) -> tuple[int, ...]:
    """A list of token ids, which may be empty. Raises FieldError."""
    if not isinstance(value, list | tuple):
        raise invalid_value(path, value, "a list of token ids")
    ids = tuple(check_int(token) for token in value)
    for index, token in enumerate(ids):
        if not is_int(token) or not 0 <= token <= MAX_INT:
            raise invalid_value(
                f"{path}[{index}]", token, "a token id", "give whole numbers from 0 up"
            )
    return ids


def texts(value: object, path: str | None) -> tuple[str, ...]:
    """A single text or a list of texts, none of them empty. Raises FieldError."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        raise invalid_value(path, value, "a string or a list of strings")
    for index, text in enumerate(listed):
        if not isinstance(text, str) or not text:
            place = path if isinstance(value, str) else f"{path}[{index}]"
            raise invalid_value(place, text, "a string of one or more characters")
    return tuple(listed)


def _texts_field(value: object, info: ValidationInfo) -> tuple[str, ...]:
    return texts(value, info.field_name)


def _ids_field(value: object, info: ValidationInfo) -> tuple[int, ...]:
    return token_ids(value, info.field_name)


TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
ID_SCHEMA: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": ID_SCHEMA}

Texts = Annotated[tuple[str, ...], BeforeValidator(_texts_field)]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(_ids_field), WithJsonSchema(IDS_SCHEMA)]


class StreamOptions(RequestModel):
    """Options of a stream's chunks."""

    schema_key: ClassVar[str] = "stream_options"
    path: ClassVar[str] = "stream_options"

    include_usage: bool = Field(
        False, description="Add a last chunk with the usage and no choices."
    )
    continuous_usage_stats: bool = Field(
        False, description="Report the usage so far in every chunk; requires include_usage."
    )

    def check(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            raise FieldError(
                "stream_options.continuous_usage_stats is true without include_usage; "
                "set include_usage to true as well.",
                "stream_options.continuous_usage_stats",
            )
