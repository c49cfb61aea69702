"""Types of field values, with the errors of values that do not fit them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema, from_json

from strobe.server.schema.field_errors import HERE, FieldError, invalid_value
from strobe.validation import MAX_INT


@dataclass(frozen=True)
class Must:
    """What a value must be, as its error says it. A required field of a nested object that is
    missing has the error of null, unless if_missing says what to give."""

    requirement: str
    hint: str = ""
    if_missing: str = ""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._read, handler(source))

    def _read(self, value: object, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["loc"] or isinstance(first.get("ctx", {}).get("error"), FieldError):
                raise  # the value is of the right kind, but a part of it is wrong
            if value is None and self.if_missing:
                sentence = f"{HERE} is missing; {self.if_missing}."
                raise FieldError(sentence, HERE, "missing_required_parameter") from None
            raise invalid_value(HERE, value, self.requirement, self.hint) from None


@dataclass(frozen=True)
class OneOf:
    """Reads a value as one model of a union. choose: returns the model of a value, None for a value
    that is no object; raises FieldError."""

    choose: Callable[[Any], type[BaseModel] | None]

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.with_info_wrap_validator_function(self._read, handler(source))

    def _read(
        self, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        if isinstance(value, BaseModel):
            return value
        model = self.choose(value)
        if model is None:
            return value
        return model.model_validate(value, context=info.context)


class OrText:
    """Reads a union of a text and another type, whose errors have no part for the union in their
    paths."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        text, other = get_args(source)
        assert text is str, "the text comes first"
        return core_schema.no_info_wrap_validator_function(
            self._read, handler.generate_schema(other)
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    def _read(self, value: object, handler: ValidatorFunctionWrapHandler) -> Any:
        return value if isinstance(value, str) else handler(value)


@dataclass(frozen=True)
class OrJson:
    """Reads an object, or its text as JSON. requirement: what the text must be."""

    requirement: str

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._parse, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        text = {
            "type": "string",
            "pattern": r"^[ \t\r\n]*\{[\s\S]*\}[ \t\r\n]*$",
            "contentMediaType": "application/schema+json",
        }
        return {"anyOf": [handler(schema), text]}

    def _parse(self, value: object) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return from_json(value, allow_inf_nan=False)
        except ValueError as error:
            hint = f"as JSON it fails: {error}"
            raise invalid_value(HERE, value, self.requirement, hint) from None


@dataclass(frozen=True)
class Nonempty:
    """Rejects an empty list. requirement: what the list must be."""

    requirement: str
    hint: str = ""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "minItems": 1}

    def _check(self, value: Sequence[Any]) -> Sequence[Any]:
        if not value:
            raise invalid_value(HERE, [], self.requirement, self.hint)
        return value


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
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        low = "exclusiveMinimum" if self.above else "minimum"
        return {**handler(schema), low: self.low, "maximum": self.high}

    def _check(self, value: float) -> float:
        if not self.low <= value <= self.high or (self.above and value == self.low):
            between = " and at most" if self.above else " to"
            must = f"{'above' if self.above else 'from'} {_plain(self.low)}{between}"
            raise invalid_value(HERE, value, f"{must} {_plain(self.high)}", self.hint)
        return value


def _plain(number: float) -> str:
    return f"{number:g}" if abs(number) < 1e6 else str(int(number))


def check_int(value: object) -> Any:
    """Convert a whole float to int, since 2.0 and 2 are the same number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(check_int)]


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def token_ids(value: object, path: str = HERE) -> tuple[int, ...]:
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


def texts(value: object, path: str = HERE) -> tuple[str, ...]:
    """A single text or a list of texts, none of them empty. Raises FieldError."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        raise invalid_value(path, value, "a string or a list of strings")
    for index, text in enumerate(listed):
        if not isinstance(text, str) or not text:
            place = path if isinstance(value, str) else f"{path}[{index}]"
            raise invalid_value(place, text, "a string of one or more characters")
    return tuple(listed)


TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
ID_SCHEMA: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": ID_SCHEMA}

Texts = Annotated[tuple[str, ...], BeforeValidator(texts)]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(token_ids), WithJsonSchema(IDS_SCHEMA)]

Text = Annotated[str, Must("a string")]
SomeText = Annotated[str, Field(min_length=1), Must("a string of one or more characters")]
Flag = Annotated[bool, Must("true or false")]
JsonSchema = Annotated[dict[str, Any], Must("a JSON schema, as an object")]
