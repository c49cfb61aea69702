"""Types of field values, with the errors of values that do not fit them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
)
from pydantic_core import CoreSchema, core_schema, from_json

from strobe.server.schema.field_errors import HERE, FieldError
from strobe.validation import MAX_INT


class Rule:
    """Base class of annotations that read the value of a type, and say in the JSON schema what it
    must be besides."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self.read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), **self.shown()}

    def read(self, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        """Return a value as the request has it. inner: reads it as the type."""
        raise NotImplementedError

    def shown(self) -> dict[str, Any]:
        """Return what the JSON schema says of the value besides its type."""
        return {}


class Value(Rule):
    """Base class of annotations that read a value by themselves, whatever its type."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.parse)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return self.shown()

    def parse(self, value: object) -> object:
        """Return a value as the request has it. Raises FieldError."""
        raise NotImplementedError


@dataclass(frozen=True)
class Must(Rule):
    """What a value must be, as its error says it. A required field of a nested object that is
    missing has the error of null, unless if_missing says what to give."""

    requirement: str
    hint: str = ""
    if_missing: str = ""

    def read(self, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        try:
            return inner(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["loc"] or isinstance(first.get("ctx", {}).get("error"), FieldError):
                raise  # the value is of the right kind, but a part of it is wrong
            if value is None and self.if_missing:
                sentence = f"{HERE} is missing; {self.if_missing}."
                raise FieldError(sentence, HERE, "missing_required_parameter") from None
            raise FieldError.of_value(HERE, value, self.requirement, self.hint) from None


@dataclass(frozen=True)
class OneOf:
    """Reads an object as one model of a union. choose: returns the model of an object; raises
    FieldError. requirement: what a value must be. words: values that are no objects. code: of the
    error for a value that is neither."""

    choose: Callable[[Mapping[str, Any]], type[BaseModel]]
    requirement: str = "a JSON object"
    words: Sequence[str | bool] = ()
    code: str = "invalid_value"

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.with_info_wrap_validator_function(self._read, handler(source))

    def _read(
        self, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        if isinstance(value, BaseModel) or any(value is word for word in self.words):
            return value
        if isinstance(value, str) and value in self.words:
            return value
        if not isinstance(value, Mapping):
            error = FieldError.of_value(HERE, value, self.requirement)
            error.code = self.code
            raise error
        return self.choose(value).model_validate(value, context=info.context)


class OrText(Rule):
    """Reads a union of a text and another type, whose errors have no part for the union in their
    paths."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        text, other = get_args(source)
        assert text is str, "the text comes first"
        return core_schema.no_info_wrap_validator_function(
            self.read, handler.generate_schema(other)
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    def read(self, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        return value if isinstance(value, str) else inner(value)


@dataclass(frozen=True)
class OrJson(Rule):
    """Reads an object, or its text as JSON. requirement: what the text must be."""

    requirement: str

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        text = {
            "type": "string",
            "pattern": r"^[ \t\r\n]*\{[\s\S]*\}[ \t\r\n]*$",
            "contentMediaType": "application/schema+json",
        }
        return {"anyOf": [handler(schema), text]}

    def read(self, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        if not isinstance(value, str):
            return inner(value)
        try:
            parsed = from_json(value, allow_inf_nan=False)
        except ValueError as error:
            hint = f"as JSON it fails: {error}"
            raise FieldError.of_value(HERE, value, self.requirement, hint) from None
        return inner(parsed)


@dataclass(frozen=True)
class Nonempty(Rule):
    """Rejects an empty list. requirement: what the list must be."""

    requirement: str

    def read(self, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        items = inner(value)
        if not items:
            raise FieldError.of_value(HERE, [], self.requirement)
        return items

    def shown(self) -> dict[str, Any]:
        return {"minItems": 1}


@dataclass(frozen=True)
class Bounds(Rule):
    """A number's inclusive bounds; with `above` the lower one is exclusive."""

    low: float
    high: float
    hint: str
    above: bool = False

    def read(self, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        number = inner(value)
        if not self.low <= number <= self.high or (self.above and number == self.low):
            between = " and at most" if self.above else " to"
            must = f"{'above' if self.above else 'from'} {_plain(self.low)}{between}"
            raise FieldError.of_value(HERE, number, f"{must} {_plain(self.high)}", self.hint)
        return number

    def shown(self) -> dict[str, Any]:
        low = "exclusiveMinimum" if self.above else "minimum"
        return {low: self.low, "maximum": self.high}


def _plain(number: float) -> str:
    return f"{number:g}" if abs(number) < 1e6 else str(int(number))


def check_int(value: object) -> Any:
    """Convert a whole float to int, since 2.0 and 2 are the same number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(check_int)]


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Ids(Value):
    """A list of token ids, read at once because prompts are long."""

    min_items: int = 0
    max_items: int | None = None
    hint: str = ""

    def parse(self, value: object, path: str = HERE) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            raise FieldError.of_value(path, value, "a list of token ids")
        ids = tuple(check_int(token) for token in value)
        for index, token in enumerate(ids):
            if not is_int(token) or not 0 <= token <= MAX_INT:
                raise FieldError.of_value(
                    f"{path}[{index}]", token, "a token id", "give whole numbers from 0 up"
                )
        if len(ids) < self.min_items:
            raise FieldError.of_value(path, [], "a list of one or more token ids", self.hint)
        if self.max_items is not None and len(ids) > self.max_items:
            raise FieldError(
                f"{path} holds {len(ids)} ids, but the limit is {self.max_items}; send fewer.",
                path,
            )
        return ids

    def shown(self) -> dict[str, Any]:
        counts = {"minItems": self.min_items or None, "maxItems": self.max_items}
        return {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT},
            **{name: count for name, count in counts.items() if count is not None},
        }


@dataclass(frozen=True)
class TextList(Value):
    """A text or a list of texts, none of them empty. Their number and lengths are limited, because
    every new token is searched for each of them."""

    max_items: int = 64
    max_chars: int = 1000

    def parse(self, value: object) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            raise FieldError.of_value(HERE, value, "a string or a list of strings")
        for index, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                path = HERE if isinstance(value, str) else f"{HERE}[{index}]"
                raise FieldError.of_value(path, text, "a string of one or more characters")
        if len(texts) > self.max_items:
            raise FieldError(
                f"{HERE} holds {len(texts)} strings, but the limit is {self.max_items}; send "
                "fewer.",
                HERE,
            )
        longest = max(map(len, texts), default=0)
        if longest > self.max_chars:
            raise FieldError(
                f"{HERE} holds a string of {longest} characters, but each may have at most "
                f"{self.max_chars}; shorten it.",
                HERE,
            )
        return tuple(texts)

    def shown(self) -> dict[str, Any]:
        text = {"type": "string", "minLength": 1, "maxLength": self.max_chars}
        return {"anyOf": [text, {"type": "array", "items": text, "maxItems": self.max_items}]}


TokenIds = Annotated[tuple[int, ...], Ids()]
Texts = Annotated[tuple[str, ...], TextList()]

Text = Annotated[str, Must("a string")]
SomeText = Annotated[str, Field(min_length=1), Must("a string of one or more characters")]
Flag = Annotated[bool, Must("true or false")]
JsonSchema = Annotated[dict[str, Any], Must("a JSON schema, as an object")]
