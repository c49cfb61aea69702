"""Errors of a request's fields."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
}
"""The value that each of pydantic's error types asks for."""


HERE = "\0"
"""Stands for the path of the object or value that is being read, in the sentences and paths of
errors and warnings. It becomes the path where the path is known; values are shown as JSON, which
has no such character."""


def at_path(text: str, path: str) -> str:
    """Return a sentence, or a field's path, with a path in the place of HERE; "" is the body."""
    if not path:
        text = text.replace(f"{HERE}.", "")
    return text.replace(HERE, path or "The body")


class FieldError(ValueError):
    """An invalid field of a request: an HTTP 400.

    param: the field's path, such as "messages[0].content"; None if the whole body is invalid.
    code: OpenAI's code for the kind of error.
    """

    def __init__(self, message: str, param: str | None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code

    @classmethod
    def of_value(
        cls, path: str | None, value: object, requirement: str, hint: str = ""
    ) -> FieldError:
        """Return the error "PATH is VALUE, but must be REQUIREMENT; HINT." """
        tail = f"; {hint}" if hint else ""
        sentence = f"{path or 'The body'} is {short_json(value)}, but must be {requirement}{tail}."
        return cls(sentence, path)

    def at_path(self, path: str | None) -> FieldError:
        """The same error with a path in the place of HERE."""
        param = path if self.param == HERE else self.param and at_path(self.param, path or "")
        return FieldError(at_path(str(self), path or ""), param, self.code)


class FieldNames(dict[str, str]):
    """An API's names of the fields of a `GenerationRequest`; the others have the same name there.
    A field inside an object has a name of its own, such as "chat_template_kwargs.add"."""

    def __missing__(self, name: str) -> str:
        return name

    def option_error(self, sentence: str) -> FieldError:
        """Return the error for a sentence that begins with the option that is wrong, if any is, as
        errors of SamplingParams and of the engine do."""
        field = field_in(sentence)
        if field is None:
            return FieldError(sentence, None)
        option = field.partition(".")[0]
        name = self[option]
        return FieldError(name + sentence[len(option) :], name + field[len(option) :])


def field_in(sentence: str) -> str | None:
    """Return the field that an error begins with, None if it begins otherwise."""
    word = sentence.split()[0].rstrip(":")
    return word if word.replace(".", "").replace("_", "").isalpha() and word.islower() else None


class HasErrors(Protocol):
    """pydantic's ValidationError, or a framework's exception with the same `errors()`."""

    def errors(self) -> Sequence[Any]: ...


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as "1 token" or "2 tokens"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def short_json(value: object) -> str:
    """Return a value as JSON, cut to fit into a sentence."""
    if isinstance(value, str):
        text = json.dumps(value[:60], ensure_ascii=False)
        return text if len(value) <= 60 else f'{text[:-1]}…"'
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return _JSON.repr(value)


class _Json(reprlib.Repr):
    """Formats lists and objects as JSON, cut where they are long or deep."""

    def repr_str(self, x: str, level: int) -> str:
        return short_json(x)

    def repr_bool(self, x: bool, level: int) -> str:
        return short_json(x)

    def repr_NoneType(self, x: None, level: int) -> str:
        return short_json(x)

    def repr_tuple(self, x: tuple[Any, ...], level: int) -> str:
        return self.repr_list(list(x), level)


_JSON = _Json()


def to_field_error(error: HasErrors) -> FieldError:
    """Return the first of a validation's errors.

    error: pydantic's ValidationError, or a framework's with the same `errors()`, whose locations
    may begin with "body".
    """
    first: Mapping[str, Any] = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    location = list(first["loc"])
    if location[:1] == ["body"]:
        location = location[1:]
    if isinstance(cause, FieldError):
        return cause.at_path(_path(location))
    if first["type"] == "json_invalid":
        return FieldError("The body is not JSON; send one JSON object.", None, "invalid_json")
    param = _path(location)
    if cause is not None:
        return FieldError(str(cause), param)
    kind: str = first["type"]
    if kind == "missing":
        sentence = f"{param or 'The body'} is missing; the request needs it."
        return FieldError(sentence, param, "missing_required_parameter")
    if kind == "literal_error":
        return FieldError.of_value(
            param, first["input"], f"one of {first['ctx']['expected']}".replace("'", '"')
        )
    requirement = KINDS.get(kind) or KINDS.get(kind.split("_")[0])
    if requirement is None:
        message = str(first["msg"])
        return FieldError(
            f"{param or 'The body'} is {short_json(first['input'])}: "
            f"{message[:1].lower()}{message[1:]}.",
            param,
        )
    field_error = FieldError.of_value(param, first["input"], requirement)
    field_error.code = "invalid_type"
    return field_error


def _path(location: Sequence[str | int]) -> str | None:
    """Return a location in the body in OpenAI's notation, such as messages[0].content."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None
