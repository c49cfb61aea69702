"""Base classes of all request models: field checks and warnings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, from_json

from strobe.grammars.json_depth import json_depth
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    at_path,
    short_json,
    to_field_error,
)
from strobe.server.schema.unsupported_fields import NO_EFFECT, UNSUPPORTED
from strobe.server.schema.values import Must

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


def _too_deep(body: bytes | str) -> FieldError:
    text = body[:_SCANNED] if isinstance(body, str) else body[:_SCANNED].decode(errors="replace")
    return FieldError(
        f"The body is nested too deeply: {json_depth(text)} levels, at most {_MAX_DEPTH} are read; "
        "nest its objects and lists less.",
        None,
    )


class RequestObject(BaseModel):
    """An object of a request. null is the same as a missing field; no field is silently ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    schema_key: ClassVar[str] = ""
    """Key of its rules in NO_EFFECT and UNSUPPORTED."""
    owner: ClassVar[str] = HERE
    """Name of the object in errors."""
    _names: ClassVar[tuple[str, ...]] = ()
    """Names of its fields in a request."""
    _null_if_missing: ClassVar[tuple[str, ...]] = ()
    """Names of its required fields whose error says what they must be."""

    _sent: Mapping[str, Any] = PrivateAttr(default_factory=dict[str, Any])
    _warnings: FieldWarnings = PrivateAttr(default_factory=FieldWarnings)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._names = tuple(field.alias or name for name, field in cls.model_fields.items())
        cls._null_if_missing = tuple(
            field.alias or name
            for name, field in cls.model_fields.items()
            if field.is_required() and any(isinstance(part, Must) for part in field.metadata)
        )

    @model_validator(mode="wrap")
    @classmethod
    def _validate(
        cls, data: object, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        if isinstance(data, cls):
            return data
        warnings = FieldWarnings(lenient=bool((info.context or {}).get("lenient")))
        fields = cls.split(data, warnings)
        self = handler({**dict.fromkeys(cls._null_if_missing), **fields})
        self._sent = fields
        self._warnings = warnings
        for name, value in self:
            self._adopt(value, f"{HERE}.{cls.model_fields[name].alias or name}")
        self.check()
        return self

    def _adopt(self, value: object, path: str) -> None:
        """Add the warnings of a nested object, or of a list of objects, at this path."""
        if isinstance(value, RequestObject):
            self._warnings.extend(at_path(sentence, path) for sentence in value._warnings)
        elif isinstance(value, list):
            for index, item in enumerate(cast(list[object], value)):
                self._adopt(item, f"{path}[{index}]")

    @classmethod
    def split(cls, data: object, warnings: FieldWarnings) -> dict[str, Any]:
        """Return an object's known fields without nulls, in the order of the client, and add a
        warning for each field without effect. Raises FieldError if `data` is no object or has an
        unknown or unsupported field."""
        if not isinstance(data, Mapping):
            raise FieldError.of_value(HERE, data, "a JSON object")
        no_effect = NO_EFFECT.get(cls.schema_key, {})
        refused = UNSUPPORTED.get(cls.schema_key, {})
        fields: dict[str, Any] = {}
        for name, item in data.items():
            if item is None:
                continue
            path = f"{HERE}.{name}"
            if name in cls._names:
                fields[name] = item
            elif (rule := no_effect.get(name)) is not None:
                if not rule.is_neutral(item):
                    warnings.append(f"{path} has no effect: {rule.reason}.")
            elif (rule := refused.get(name)) is not None:
                if not rule.is_neutral(item):
                    raise FieldError(
                        f"{path} is {short_json(item)}, which is not supported: {rule.reason}.",
                        path,
                        "unsupported_parameter",
                    )
            else:
                warnings.append(cls._unknown(str(name), [*cls._names, *no_effect], warnings))
        return fields

    @classmethod
    def _unknown(cls, name: str, known_names: list[str], warnings: FieldWarnings) -> str:
        """Return the warning for an unknown field. Raises FieldError if it is an error."""
        path = f"{HERE}.{name}"[:200]
        near = get_close_matches(name[:80], known_names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if not warnings.lenient:
            raise FieldError(
                f"{short_json(name)} is not a field of {cls.owner}{hint or '; leave it out.'}",
                path,
                "unknown_parameter",
            )
        return f"{path} has no effect: this server does not know it{hint or '.'}"

    def check(self) -> None:
        """Check fields that depend on each other. Raises FieldError."""

    def is_set(self, name: str) -> bool:
        """Whether the client sent a field with a value other than null."""
        return name in self.model_fields_set

    @property
    def sent(self) -> Mapping[str, Any]:
        """The fields that the client sent, without nulls, in the client's order."""
        return self._sent

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add the fields without effect and the unsupported ones to the OpenAPI schema."""
        reference = handler(schema)
        page: dict[str, Any] = handler.resolve_ref_schema(reference)
        required = page.get("required", ())
        properties = page.get("properties", {})
        known = {name: s if name in required else _nullable(s) for name, s in properties.items()}
        page |= {
            "type": "object",
            "properties": {**cls._ruled_fields(), **known},
            "additionalProperties": _ONLY_NULL,
        }
        return reference

    @classmethod
    def _ruled_fields(cls) -> dict[str, Any]:
        """Return the JSON schemas of the fields without effect and of the unsupported ones."""
        fields: dict[str, Any] = {}
        for name, rule in NO_EFFECT.get(cls.schema_key, {}).items():
            fields[name] = {"description": f"No effect: {rule.reason}."}
        for name, rule in UNSUPPORTED.get(cls.schema_key, {}).items():
            why = f"Not supported: {rule.reason}."
            fields[name] = {"enum": [None, *rule.neutral_values], "description": why}
        return fields


class RequestModel(RequestObject):
    """The body of a request."""

    owner: ClassVar[str] = "this endpoint"
    ignores_unknown_fields: ClassVar[bool] = False
    """Whether unknown fields are warnings on every server, as on one with --lenient."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._null_if_missing = ()

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
        is_lenient = lenient or cls.ignores_unknown_fields
        try:
            return cls.model_validate(data, context={"lenient": is_lenient})
        except ValidationError as error:
            raise to_field_error(error) from None

    def warnings(self) -> list[str]:
        """One sentence for each field without effect, and one for all items of a list."""
        first: dict[str, str] = {}
        for warning in self._warnings:
            sentence = at_path(warning, "")
            first.setdefault(INDEX.sub("[]", sentence), sentence)
        return list(first.values())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Allow unknown fields in the OpenAPI schema, also in nested objects, if they are
        ignored."""
        reference = super().__get_pydantic_json_schema__(schema, handler)
        if cls.ignores_unknown_fields:
            page: dict[str, Any] = handler.resolve_ref_schema(reference)
            open_page = with_unknown_fields(_in_place(page, handler))
            page.clear()
            page |= open_page
        return reference


def _in_place(part: Any, handler: GetJsonSchemaHandler) -> Any:
    """Return a part of a JSON schema with the schemas that it refers to."""
    if isinstance(part, list):
        return [_in_place(item, handler) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _in_place(handler.resolve_ref_schema(part), handler)
    return {name: _in_place(value, handler) for name, value in part.items()}


def with_unknown_fields(part: object) -> Any:
    """Return a part of a JSON schema whose objects allow further fields."""
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


def _nullable(shape: Mapping[str, Any]) -> Mapping[str, Any]:
    kinds = [kind.get("type") for kind in shape.get("anyOf", [shape])]
    is_any = not shape.keys() - {"title", "default", "description"}
    takes_null = "null" in kinds or None in shape.get("enum", ()) or is_any
    return shape if takes_null else {"anyOf": [shape, {"type": "null"}]}


class StreamOptions(RequestObject):
    """Options of a stream's chunks."""

    schema_key: ClassVar[str] = "stream_options"

    include_usage: bool = Field(
        False, description="Add a last chunk with the usage and no choices."
    )
    continuous_usage_stats: bool = Field(
        False, description="Report the usage so far in every chunk; requires include_usage."
    )

    def check(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            raise FieldError(
                f"{HERE}.continuous_usage_stats is true without include_usage; "
                "set include_usage to true as well.",
                f"{HERE}.continuous_usage_stats",
            )
